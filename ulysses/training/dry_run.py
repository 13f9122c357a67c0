"""--dry-run and --inspect: what can be known of a run without training.

A dry run needs no weights, no data and no GPU: it reports what is absent as findings and plans the rest.
"""

import math
import os
import sys
from typing import Any

from ulysses.data.preview import preview_examples
from ulysses.training.checkpoint import resume_point
from ulysses.training.config import Config, Options
from ulysses.training.memory import plan_lines, planned_machine, planner_case
from ulysses.training.prepare import prepare
from ulysses.training.quiet import wants_debug
from ulysses.training.section import ConfigError, blame, refuse

# exit code of a right configuration that names something which is not on this machine
ABSENT = 3


def dry_run(config: Config, options: Options) -> int:
    """Check everything and print the plan and a verdict; return the exit code, 3 if weights or data are absent.

    Raises ConfigError for a configuration that cannot be honoured, or that does not fit the GPU it names.
    """
    findings: list[str] = []
    world = options.gpus or int(os.environ.get("WORLD_SIZE", "1"))
    prepared = prepare(config, world, findings)
    if wants_debug(sys.argv) or options.debug:
        print(config.model_dump_json(indent=2))
    stage, run = config.stage_class, config.run
    facts, tokens, squares = stage.facts(config), stage.budget(config), 0.0
    sp, shape = config.parallel.sequence_parallel_size, prepared.shape
    if sp == "auto":
        machine = planned_machine(config, options.planner, world)
        sp = planner_case(config, shape, machine, tokens).sp if shape else 1
    groups = world // sp
    print(
        f"{world} processes: data parallel {groups} x sequence parallel {sp}, among neighbours"
    )
    longest = stage.sequences_per_example * facts.longest_example
    full = groups * max(tokens, longest)
    micro_batches = math.ceil(facts.examples_per_step * longest / full)
    length = f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs of unknown length"
    if not findings:
        complaints: list[Any] = []
        with blame("", complaints):  # the hub may not have the data
            train, _ = prepared.open_data()
            loader = prepared.loader(train, groups)
            per_epoch = loader.steps_per_epoch * facts.steps_per_load
            total = stage.total_steps(config, loader)
            length = f"{len(train)} examples, {per_epoch} steps per epoch, {total} steps; {train.report}"
            micro_batches = len(loader.step(0, 0))
            tokens = prepared.budget(train)
            squares = prepared.squares(train, tokens)
            length = "\n".join([length, *prepared.remarks(loader)])
        refuse(complaints, findings)
    print(length)
    policies = config.gradients.chain().policies
    print(f"gradient policies: {', '.join(policy.name for policy in policies)}")
    lr, lora = config.optimizer.lr, config.model.lora.rank > 0
    if lr == stage.default_lr(lora=lora):
        more = "; adapters take ten times as much" * lora
        print(f"optimizer.lr {lr:g} is the default of {stage.name}: {stage.lr_reason}{more}")
    print()
    fits = True
    if prepared.shape is None:
        print("without the model's config.json there is no plan of its memory")
    else:
        if config.model.path and prepared.folder is None:
            print(f"the model is planned with the published shape of {config.model.path}")
        print(prepared.shape.describe_window())
        for line in plan_lines(
            config, prepared.shape, options.planner, world, tokens, micro_batches, squares
        ):
            print(line)
            fits = fits and not line.startswith("does not fit")
    for finding in findings:
        print(f"finding: {finding}")
    verdict = "the run can start"
    try:
        resume_point(config.output / "checkpoints", run.resume, overwrite=run.overwrite)
    except ValueError as error:
        verdict = f"the run would be refused: {error}"
    if not fits:
        verdict = "the run does not fit the assumed GPU; --gpu-memory describes yours"
    if findings:
        verdict = f"the settings are right; absent on this machine: {len(findings)}, see the findings above"
    print(f"verdict: {verdict}")
    return ABSENT if findings else 0


def inspect(config: Config, samples: int) -> int:
    """Print training samples as the loss sees them; return the exit code."""
    # neither the number of processes nor the weights, the disk or the folder's checkpoints matter here
    findings: list[str] = []
    degree = config.parallel.sequence_parallel_size
    prepared = prepare(config, 1 if degree == "auto" else degree, findings)
    if prepared.tokenizer is None:
        raise ConfigError(findings[0])
    preview_examples(prepared.open_data()[0], prepared.tokenizer, samples)
    print(prepared.shape.describe_window())
    return 0
