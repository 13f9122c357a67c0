"""What can be known without training: the checked configuration, the rank grid, the steps, and a look at the data."""

import json
import os

from ulysses.data.inspect import inspect_examples
from ulysses.training.checks import check_run
from ulysses.training.command_line import CommandLine, ConfigError


def dry_run(command: CommandLine) -> int:
    """Check everything and print the plan; returns the exit code (3 if weights or data are absent)."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    config = command.config
    world = int(command.planner.get("gpus", 0)) or int(os.environ.get("WORLD_SIZE", "1"))
    plan = check_run(config, world)
    print(json.dumps(config.model_dump(mode="json"), indent=2))
    sp = config.parallel.sequence_parallel_size
    print(f"\n{world} processes: data parallel {world // sp} x sequence parallel {sp}")
    for dp in range(min(world // sp, 8)):
        print(f"  group {dp}: ranks {dp * sp}..{dp * sp + sp - 1}")
    train, _ = plan.datasets()
    loader = plan.loader(train, world // sp, 0)
    print(f"{len(train)} examples, {loader.steps_per_epoch} steps per epoch, {plan.total_steps(loader)} steps; {train.report}")
    return 0


def inspect(command: CommandLine) -> int:
    """Print samples as the loss sees them."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    plan = check_run(command.config, int(os.environ.get("WORLD_SIZE", "1")))
    train, _ = plan.datasets()
    inspect_examples(train, plan.tokenizer, command.inspect)
    return 0


__all__ = ["ConfigError", "dry_run", "inspect"]
