"""--dry-run and --inspect: what can be known of a run without training.

A dry run needs no weights, no data and no GPU: it lists what is absent as findings, and plans with the rest.
"""

from math import inf

import torch

from ulysses.check.input_files import RunInputs
from ulysses.check.preflight import prepare, remarks, remarks_on_data
from ulysses.check.run_folder import resume_point
from ulysses.check.setting_checks import check_trackers
from ulysses.config.schema import Config, Options
from ulysses.config.section import AbsentError, ConfigError, refuse
from ulysses.data.serve.dataset import TokenizedDataset, preview_examples
from ulysses.environment import wants_debug, world_size
from ulysses.memory.levels import LEVELS
from ulysses.plan.hardware import (
    ASSUMED_GIB,
    GIB,
    Machine,
    cpu_flops,
    planned_machine,
    slow_products,
)
from ulysses.plan.planner import (
    choose,
    choose_memory,
    longest_sequence,
    memory_line,
    micro_batch_line,
    run_question,
)
from ulysses.plan.step_cost import Question, fits, predict, step_flops, step_seconds
from ulysses.run.build import open_data, step_loader

ABSENT = 3  # exit code for right settings that name something which is not on this machine


def dry_run(config: Config, options: Options) -> int:
    """Check everything and print the plan and a verdict; return the exit code, 3 if weights or data are absent.

    Raises ConfigError for a configuration that cannot be honoured, or that does not fit the GPU it names.
    """
    findings: list[str] = []
    world = options.gpus or world_size()
    if not torch.cuda.is_available():
        print(
            f"this machine has no GPU: the plan is for {counted(world, 'GPU')} of "
            f"{options.gpu_memory or ASSUMED_GIB:g} GiB; --gpus and --gpu-memory name others"
        )
    inputs = prepare(config, world, findings)
    config = inputs.config
    if options.debug or wants_debug([]):
        print(config.model_dump_json(indent=2))
    verdict = "the run can start"
    try:
        resume_point(config.run)
        refuse([*check_trackers(config, strict=False)])
    except ValueError as error:
        verdict = f"the run would be refused: {error}"
    if inputs.shape is None:
        print(
            "without the model's config.json there is no plan of its memory",
            *findings,
            sep="\nfinding: ",
        )
    else:
        machine = planned_machine(config, options, world)
        train = _open(inputs, findings)
        question = run_question(inputs.stage, inputs.shape, machine, train)
        _plan_steps(inputs, question, train, findings)
        if not (torch.cuda.is_available() or options.gpus or options.gpu_memory):
            _plan_cpu(inputs, machine, train)
    if findings:
        verdict = f"the settings are right; absent on this machine: {len(findings)}, see the findings above"
    print(f"verdict: {verdict}")
    return ABSENT if findings else 0


def counted(count: int, thing: str, ending: str = "s") -> str:
    """Write a number with its noun, such as "2 GPUs"."""
    return f"{count} {thing}{ending if count > 1 else ''}"


def _open(inputs: RunInputs, findings: list[str]) -> TokenizedDataset | None:
    """Return the opened training data, or None if anything is absent."""
    if not findings:
        try:
            return open_data(inputs)[0]
        except AbsentError as error:  # the hub may not have the data
            findings.append(str(error))
    return None


def _plan_steps(
    inputs: RunInputs,
    question: Question,
    train: TokenizedDataset | None,
    findings: list[str],
) -> None:
    """Print how the run is divided, how long it is, and what it takes."""
    config, machine = inputs.config, question.machine
    stage, run, requirements = inputs.stage, config.run, inputs.stage.requirements
    groups = machine.gpus // question.sp
    print(
        f"{counted(machine.gpus, 'process', 'es')}: data parallel {groups} x sequence parallel {question.sp}, "
        "among neighbours"
    )
    if train:
        loader = step_loader(inputs, train, question.tokens_per_microbatch, groups)
        per_epoch = loader.steps_per_epoch * requirements.steps_per_load
        total = stage.total_steps(loader)
        print(
            f"{len(train)} examples, {per_epoch} steps per epoch, {total} steps; {train.report}",
            *remarks(inputs, loader),
            *remarks_on_data(config, loader),
            sep="\n",
        )
    else:
        print(f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs of unknown length")
    for finding in findings:
        print("finding:", finding)
    rate, reason = config.usual_lr
    if config.optimizer.lr == rate:
        more = "; adapters take ten times as much" if config.model.lora.rank else ""
        print(f"optimizer.lr {rate:g} is the default of {stage.name}: {reason}{more}")
    _plan_memory(inputs, question)


def _plan_memory(inputs: RunInputs, question: Question) -> None:
    """Print what every level takes, the longest sequence and what the run itself would choose.

    Raises ConfigError for a run that does not fit.
    """
    config, machine, model = inputs.config, question.machine, question.model
    world = machine.gpus
    plans = [choose(question._replace(recompute=level)) for level in LEVELS]
    sequences = inputs.stage.sequences_per_example
    if config.model.path and inputs.folder is None:
        print(f"\nthe model is planned with the published shape of {config.model.path}")
    print(
        f"\n{inputs.shape.describe_window()}\n"
        f"predicted for {counted(world, 'GPU')} of {machine.gpu_bytes / GIB:.1f} GiB (--gpu-memory), "
        f"{machine.host_bytes / GIB:.0f} GiB of host memory per node (--host-memory; 0 is unknown):\n"
        f"{model.parameters:,} parameters, {model.trained:,} trained; {counted(question.documents, 'sequence')} at a "
        f"time, {question.tokens_per_microbatch:,} tokens together:\n"
        f"  {'recompute':<16}{'GPU GiB':>9}{'host GiB / node':>17}{'layers offloaded':>18}{'weights':>10}"
        f"{'s / step':>10}"
    )
    for level, plan in zip(LEVELS, plans):
        p = predict(plan)
        print(
            f"  {level:<16}{p.gpu / GIB:9.1f}{p.host * machine.local_processes / GIB:17.1f}"
            f"{plan.offloaded_layers:18}{'resident' if plan.resident else 'sharded':>10}"
            f"{_time(step_seconds(plan)):>10}{'' if fits(plan) else '   does not fit'}"
        )
    if question.rollout:
        print("  (the time of sampling comes on top)")
    note = " on each side of a pair" if sequences == 2 else ""
    for sp in sorted({question.sp, world}):
        longest = longest_sequence(question._replace(sp=sp, documents=sequences))
        print(f"longest sequence at sequence_parallel_size {sp}: {longest:,} tokens{note}")
    plan = choose_memory(question)
    print(f"{memory_line(plan)}; {_time(step_seconds(plan))} s / step")
    print(micro_batch_line(question, config.batch.tokens_per_microbatch == "auto"))


def _time(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.01 else "<0.01"


def _plan_cpu(inputs: RunInputs, machine: Machine, train: TokenizedDataset | None) -> None:
    """Print how long a step takes on this machine's CPU, and how much memory."""
    config = inputs.config
    dtype = config.model.dtype
    cpus = machine._replace(gpu_bytes=inf)
    plan = choose(run_question(inputs.stage, inputs.shape, cpus, train))
    flops = sum(step_flops(plan)) * plan.question.micro_batches
    seconds = flops * machine.gpus / cpu_flops(dtype)
    needed = predict(plan).gpu
    line = f"on this machine's CPU a step takes about {_time(seconds)} s"
    line += f", and each process about {needed / GIB:.1f} GiB of memory"
    if needed * machine.gpus > machine.host_bytes:
        line += ", which is more than is free"
    print("; ".join(filter(None, (line, slow_products(dtype)))))


def inspect(config: Config, samples: int) -> int:
    """Print training samples as the loss sees them; return the exit code."""
    # as for a dry run, whose findings (absent weights, disk space) do not matter here
    findings: list[str] = []
    degree = config.parallel.sequence_parallel_size
    inputs = prepare(config, 1 if degree == "auto" else degree, findings)
    if inputs.tokenizer is None:
        raise ConfigError(findings[0])
    preview_examples(open_data(inputs)[0], inputs.tokenizer, samples)
    print(inputs.shape.describe_window())
    return 0
