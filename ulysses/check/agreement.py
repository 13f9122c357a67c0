"""What all processes must have in common before a run begins: settings, data, source, weights and the run folder."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from ulysses.check.preflight import Prepared
from ulysses.config.section import ConfigError, flat
from ulysses.data.read.chat import tokenizer_digest
from ulysses.disk import HOLDER, DiskError, digest_of, held, sampled_digest
from ulysses.environment import NODE, local_rank
from ulysses.parallel.mesh import gather

PACKAGES = Path(__file__).parents[2]


def facts_of(plan: Prepared, inputs: dict[str, str], *, verify: bool) -> dict[str, Any]:
    """Return what must be equal on all ranks, by the words that name it; files are read by one process of a node.

    Args:
        inputs: digests of data and weights, by words that name them.
        verify: compare whole weight files, and not only 64 blocks of each.
    """
    facts = flat(plan.config.model_dump(mode="json"))
    facts |= inputs | {"the checkpoint to resume": str(plan.resume_from)}
    facts |= {package: version(package) for package in ("torch", "deepspeed")}
    if local_rank() == 0:
        facts["the tokenizer"] = tokenizer_digest(plan.tokenizer)
        for package in ("losses", "models", "ulysses"):
            for path in (PACKAGES / package).rglob("*"):
                if path.suffix in (".py", ".toml", ".jinja"):
                    facts[str(path.relative_to(PACKAGES))] = digest_of(path)
        read = digest_of if verify else sampled_digest
        for setting, weights in plan.models.items():
            for path in weights.paths:
                facts[f"{setting} {path.name}"] = read(path)
    return facts


def agree(facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank if a rank has other facts than rank 0, naming the first and both nodes."""
    known = gather((NODE, facts))
    home, first = known[0]
    for rank, (node, theirs) in enumerate(known):
        for what, value in theirs.items():
            if value != first.get(what):
                raise ConfigError(
                    f"{what} is {value!r} on {node} (rank {rank}) but {first.get(what)!r} on {home} (rank 0); "
                    "start all processes with the same settings, files and library versions"
                )


def hold_output(output: Path, resources: ExitStack) -> tuple[str, str]:
    """Let rank 0 hold the run folder until `resources` are closed, and see that all nodes share it.

    Return the run's id and who held the folder before without giving it back. Raises ConfigError on every rank if
    another run holds the folder, or a node does not see what rank 0 writes there.
    """
    run_id, before, complaint = token_hex(4), "", ""
    holder = f"run {run_id}, process {os.getpid()} on {NODE}"
    if dist.get_rank() == 0:
        try:
            before = resources.enter_context(held(output, holder))
        except DiskError as error:
            complaint = str(error)
    run_id, before, holder = gather((run_id, before, holder))[0]
    place = output.absolute() / HOLDER
    if not complaint and not (place.exists() and place.read_text() == holder):
        complaint = (
            f"{place.parent} on {NODE} is not the folder that rank 0 writes to; set it to a folder on a file system "
            "that all nodes share"
        )
    for refusal in filter(None, gather(complaint)):  # all raise the first one
        raise ConfigError(refusal, "run.output")
    return run_id, before
