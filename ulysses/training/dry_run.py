"""What can be known without training: the checked configuration, rank grid, steps, memory, time, and a look at the data.

Needs no weights, no data and no GPU: what is absent is reported as a finding, and the rest is planned.
"""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

from models.arch import ARCHITECTURES
from models.arch import ModelConfig as Shape
from models.hf_format import resolve_model
from ulysses.data.preview import preview_examples
from ulysses.data.sources import is_hub_id, missing_sources
from ulysses.training.build import check_weights, open_data, read_shape, step_loader, total_steps
from ulysses.training.checks import (
    Plan,
    check_disk,
    check_numbers,
    check_run,
    read_sources,
    read_tokenizer,
)
from ulysses.training.config import Config, Options
from ulysses.training.memory import (
    plan_lines,
)
from ulysses.training.resume import find_checkpoint
from ulysses.training.section import ConfigError

ABSENT = 3  # exit code: the configuration is right, but weights or data are not here


def dry_run(config: Config, options: Options) -> int:
    """Check everything and print the plan; returns the exit code (3 if weights or data are absent).

    Raises:
        ConfigError: for a configuration that cannot be honoured, or that does not fit the GPU it names.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    given = options.planner
    world = int(given.get("gpus", 0)) or int(os.environ.get("WORLD_SIZE", "1"))
    check_numbers(config, world)
    findings: list[str] = []
    shape, folder = _shape(config, findings)
    plan = _plan(config, world, shape, folder, findings) if shape is not None else None
    if plan is not None and not given:
        check_disk(plan)
    _print_grid(config, world)
    micro_batches = _print_steps(config, world, plan)
    print(f"gradient policies: {', '.join(p.name for p in config.gradients.chain().policies)}")
    if shape is not None:
        print()
        for line in plan_lines(config, shape, given, world, micro_batches):
            print(line)
    for finding in findings:
        print(f"finding: {finding}")
    return ABSENT if findings else 0


def _shape(config: Config, findings: list[str]) -> tuple[Shape | None, Path | None]:
    """Read the model's shape; absent weights become findings."""
    path = config.model.path
    try:
        shape, folder = read_shape(config, need_weights=False)
    except ConfigError as error:
        if path is None or (Path(path).expanduser() / "config.json").exists():
            raise
        shape = published_shape(path)
        findings.append(
            f"{error}; "
            + (
                "planned with the published shape of that name"
                if shape
                else "there is no memory plan without it"
            )
        )
        return shape, None
    if folder is not None and config.model.init == "pretrained":
        if any(folder.glob("*.safetensors")):
            check_weights(shape, folder, reward=config.stage_class.reward)
        else:
            findings.append(f"model.path: {folder.absolute()} holds no .safetensors weights")
    return shape, folder


def published_shape(path: str) -> Shape | None:
    """Return the shape that a folder or hub id such as "meta-llama/Meta-Llama-3-8B-Instruct" names, or None."""
    name = path.rstrip("/").split("/")[-1].lower().removeprefix("meta-").replace("llama-", "llama")
    return ARCHITECTURES.get(re.sub(r"-(instruct|base)$", "", name))


def _plan(
    config: Config, world: int, shape: Shape, folder: Path | None, findings: list[str]
) -> Plan | None:
    """Return the run's plan if tokenizer and data are here; absent ones become findings."""
    before = len(findings)
    place = config.model.tokenizer or (str(folder) if folder else None)
    if place is None:
        if config.model.path is None:
            findings.append(
                "model.tokenizer is not set and model.arch brings none; data cannot be read without it"
            )
    elif (
        config.model.tokenizer
        and "/" in place
        and not Path(place).expanduser().exists()
        and place.startswith((".", "/", "~"))
    ):
        findings.append(f"model.tokenizer: there is no {Path(place).expanduser().absolute()}")
    sources = read_sources(config)
    findings += [f"data: {sentence}" for sentence in missing_sources(sources)]
    if not config.data.train:
        findings.append("data.train is empty")
    for other in config.stage_class.other_models(config):
        try:
            resolve_model(other.path, need_weights=False, key=other.setting)
        except (ValueError, OSError) as error:
            findings.append(str(error))
    resume_from = find_checkpoint(config, shape)
    if len(findings) > before or place is None:
        return None
    plan = Plan(config, world, shape, folder, None, "", "", resume_from)
    hub = (
        config.model.tokenizer is not None
        and not Path(config.model.tokenizer).expanduser().exists()
    )
    try:
        plan = replace(plan, tokenizer=read_tokenizer(config, folder, shape))
        hub = any(is_hub_id(source) for source in sources)
        open_data(plan)
    except ConfigError as error:
        if not hub:
            raise
        findings.append(str(error))  # the hub could not be reached, or does not have it
        return None
    return plan


def _print_grid(config: Config, world: int) -> None:
    print(json.dumps(config.model_dump(mode="json"), indent=2))
    sp = config.parallel.sequence_parallel_size
    print(f"\n{world} processes: data parallel {world // sp} x sequence parallel {sp}")
    for dp in range(min(world // sp, 8)):
        print(f"  group {dp}: ranks {dp * sp}..{dp * sp + sp - 1}")
    if world // sp > 8:
        print(f"  ... {world // sp - 8} more groups")


def _print_steps(config: Config, world: int, plan: Plan | None) -> int:
    """Print how long the run is; returns the micro-batches of one step."""
    groups = world // config.parallel.sequence_parallel_size
    if plan is None:
        print(
            f"{config.run.steps} steps"
            if config.run.steps
            else f"{config.run.epochs:g} epochs; their steps depend on the data"
        )
        stage = config.stage_class
        each = stage.sequences_per_example * stage.longest_example(config)
        full = groups * max(stage.budget(config), each)
        return math.ceil(stage.examples_per_step(config) * each / full)
    train, _ = open_data(plan)
    loader = step_loader(plan, train, groups, 0)
    total = total_steps(config, loader)
    per_epoch = loader.steps_per_epoch * config.stage_class.steps_per_load(config)
    print(f"{len(train)} examples, {per_epoch} steps per epoch, {total} steps; {train.report}")
    return len(loader.plan(0, 0)[0])


def inspect(config: Config, options: Options) -> int:
    """Print samples as the loss sees them."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    plan = check_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    train, _ = open_data(plan)
    preview_examples(train, plan.tokenizer, options.inspect or 1)
    return 0


__all__ = ["ConfigError", "dry_run", "inspect"]
