"""What several processes must have in common before a run begins: settings, data, source and weights."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from ulysses.check.inputs import RunInputs
from ulysses.config.section import ConfigError, flat
from ulysses.data.read.tokenizer import tokenizer_digest
from ulysses.disk import digest_of, sampled_digest
from ulysses.environment import NODE, local_rank
from ulysses.parallel.mesh import gather

PACKAGES = Path(__file__).parents[2]


def facts_of(inputs: RunInputs, digests: Mapping[str, str], verify: bool) -> dict[str, object]:
    """Return what must be equal on all ranks, by the words that name it; files are read by one process of a node.

    Args:
        digests: of the inputs (run_folder.py).
        verify: compare whole weight files, and not only 64 blocks of each.
    """
    facts = flat(inputs.config.model_dump(mode="json"))
    facts |= digests | {"the checkpoint to resume": str(inputs.resume_from)}
    facts |= {package: version(package) for package in ("torch", "deepspeed")}
    if local_rank() == 0:
        facts["the tokenizer"] = tokenizer_digest(inputs.tokenizer)
        for package in ("losses", "models", "ulysses"):
            for path in (PACKAGES / package).rglob("*"):
                if path.suffix in (".py", ".toml", ".jinja"):
                    facts[str(path.relative_to(PACKAGES))] = digest_of(path)
        read = digest_of if verify else sampled_digest
        for setting, weights in {"model.path": inputs.weights, **inputs.others}.items():
            for path in weights.paths:
                facts[f"{setting} {path.name}"] = read(path)
    return facts


def agree(facts: Mapping[str, object]) -> None:
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
