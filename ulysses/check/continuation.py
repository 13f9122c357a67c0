"""What a run continues: its checkpoint, and whether what that does not hold is still what it was.

Data, the base of adapters and frozen models are told by digests of their content in run.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.arch import ModelConfig
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError, error_context, flat
from ulysses.data.cache import digest_of_value
from ulysses.run.build import InitialWeights
from ulysses.run.checkpoint import read_run_state, resume_point
from ulysses.run.optim import gradient_policies

# What a run may only change between a checkpoint and its continuation if run.resume_anyway says so.
ALLOWED_ANYWAY = ("stage", "batch.examples", "run.seed")
TRAINED_ON, HELD_OUT = "the training data or how they are tokenised", "the held-out data"
# Of a model's config.json, what may differ between a checkpoint and the run that continues it.
FREE_KEYS = (
    "initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def find_checkpoint(config: Config, shape: ModelConfig) -> Path | None:
    """Return the checkpoint that the run continues, or None to start afresh; nothing is loaded yet."""
    run = config.run
    checkpoint = resume_point(run)
    if checkpoint is None:
        return None
    state = read_run_state(checkpoint)
    own = {**flat(config.model_dump(mode="json")), **shape.to_hf()}
    theirs = {**flat(state["config"]), **ModelConfig.from_hf(state["shape"]).to_hf()}
    fixed = [key for key in shape.to_hf() if key not in FREE_KEYS]
    for name in (
        *ALLOWED_ANYWAY,
        *fixed,
        "model.quantize",
        "model.lora.rank",
        "model.lora.targets",
    ):
        anyway = name in ALLOWED_ANYWAY
        if own[name] != theirs[name] and not (anyway and run.resume_anyway):
            raise ConfigError(
                f"the run that wrote {checkpoint} had {name} {theirs[name]!r} but this run has {own[name]!r}; "
                f"set the same, or another run.output{', or run.resume_anyway = true' * anyway}",
                "run.resume",
            )
    with error_context("run.resume"):
        gradient_policies(config.gradients).load_state_dict(state["policies"])
    return checkpoint


def digests_of_inputs(
    train: Any, held_out: Any, frozen: Mapping[str, InitialWeights], cache: Path
) -> dict[str, str]:
    """Return digests of what a run's numbers depend on and its checkpoints do not hold, by words that name it.

    Weights are told by whole files: a part would not show an edited layer, or a row of an embedding. What config.json
    says of the trained model is compared key by key, and is not in its digest; weights drawn at random have none.
    """
    found = {TRAINED_ON: train.folder.name, HELD_OUT: str(held_out and held_out.folder.name)}
    for setting, weights in frozen.items():
        if weights.paths:
            shape = "" if setting == "model.path" else str(weights.shape)
            digest = digest_of_value([shape, weights.content(cache)])
            found[f"the weights of {setting}"] = digest
    return found


def changes(config: Config, checkpoint: Path | None, inputs: dict[str, str]) -> list[str]:
    """Return what has changed since the checkpoint that the run continues, in words.

    Raises ConfigError if other training data would be taken for the rest of the old ones, or other weights for those
    that the run began with.
    """
    if checkpoint is None:
        return []
    state = read_run_state(checkpoint)
    known = state["inputs"]
    others = [key for key in inputs if key != HELD_OUT and known.get(key) != inputs[key]]
    if others and not config.run.resume_anyway:
        raise ConfigError(
            f"{' and '.join(others)} have changed since {checkpoint} was written; restore them, or set "
            "run.resume_anyway = true or another run.output",
            "run.resume",
        )
    before = flat(state["config"]) | known
    return [
        f"{key} was {before.get(key)!r} and is {value!r}"
        for key, value in (flat(config.model_dump(mode="json")) | inputs).items()
        if value != before.get(key) and not key.startswith(("run.resume", "run.overwrite"))
    ]
