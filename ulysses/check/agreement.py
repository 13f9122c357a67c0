"""What all processes must have in common before a run begins: settings, data, source, weights and the run folder."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex

import torch.distributed as dist

from ulysses.check.preflight import RunInputs
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError, flat
from ulysses.config.stage_sections import is_function
from ulysses.data.cache import content_digest, digest_of_value
from ulysses.data.read.tokenizer import tokenizer_digest
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import HOLDER, DiskError, digest_of, held, sampled_digest
from ulysses.environment import NODE, local_rank
from ulysses.parallel.mesh import gather

PACKAGES = Path(__file__).parents[2]
TRAINED_ON, HELD_OUT = "the training data or how they are tokenised", "the held-out data"
OWN = "model.path"  # the setting of the trained model


def digests_of_inputs(
    inputs: RunInputs, train: TokenizedDataset, held_out: TokenizedDataset | None
) -> dict[str, str]:
    """Return digests of what a run's numbers depend on and its checkpoints do not hold, by words that name it.

    Weights are told by whole files: a part would not show an edited layer, or a row of an embedding. What config.json
    says of the trained model is compared key by key, and is not in its digest; weights drawn at random have none. The
    code of a reward function is its module's file; the checks have imported it.
    """
    found = {TRAINED_ON: train.folder.name, HELD_OUT: str(held_out and held_out.folder.name)}
    config, frozen = inputs.config, inputs.others
    # adapters and a stage that compares with the initial policy need what the run began with
    if config.model.lora.rank or not all(m.path for m in inputs.stage.requirements.models):
        frozen = {OWN: inputs.weights, **frozen}
    for setting, weights in frozen.items():
        if weights.paths:
            shape = "" if setting == OWN else str(weights.shape)
            content = content_digest(weights.paths, Path(config.data.cache))
            found[f"the weights of {setting}"] = digest_of_value([shape, content])
    for reward in filter(is_function, config.ppo.reward):
        module = sys.modules.get(reward.partition(":")[0])
        if "//" not in reward and (file := getattr(module, "__file__", None)):
            found[f"the lines of {reward}"] = digest_of(Path(file))
    return found


def facts_of(inputs: RunInputs, digests: Mapping[str, str], verify: bool) -> dict[str, object]:
    """Return what must be equal on all ranks, by the words that name it; files are read by one process of a node.

    Args:
        digests: from `digests_of_inputs`.
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
        for setting, weights in {OWN: inputs.weights, **inputs.others}.items():
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


def hold_output(config: Config, resources: ExitStack) -> tuple[str, str]:
    """Let rank 0 hold the run folder until `resources` are closed, and see that all nodes share it.

    Return the run's id and who held the folder before without giving it back. Raises ConfigError on every rank if
    another run holds the folder, or a node does not see what rank 0 writes there.
    """
    output, run_id, before, complaint = config.output, token_hex(4), "", ""
    holder = f"run {run_id}, process {os.getpid()} on {NODE}"
    if dist.get_rank() == 0:
        try:
            before = resources.enter_context(held(output, holder))
        except DiskError as error:
            complaint = str(error)
    run_id, before, holder = gather((run_id, before, holder))[0]
    place = output / HOLDER
    if not complaint and not (place.exists() and place.read_text() == holder):
        complaint = (
            f"{output} on {NODE} is not the folder that rank 0 writes to; set it to a folder on a file system "
            "that all nodes share"
        )
    for refusal in filter(None, gather(complaint)):  # all raise the first one
        raise ConfigError(refusal, "run.output")
    return run_id, before
