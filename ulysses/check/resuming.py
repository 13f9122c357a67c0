"""Whether a run may continue a checkpoint, and what has changed since; imported by a run that continues one."""

from pathlib import Path

from models.arch import ModelConfig
from models.folders import ADAPTER_CONFIG
from ulysses.check.run_folder import HELD_OUT, read_run_state
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError, error_context, flat
from ulysses.options import gradient_policies

# What a run may only change between a checkpoint and its continuation if run.resume_anyway says so.
ALLOWED_ANYWAY = ("stage", "batch.examples", "run.seed")
# Of a model's config.json, what may differ between a checkpoint and the run that continues it.
FREE_KEYS = (
    "initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def check_same_run(config: Config, shape: ModelConfig, checkpoint: Path) -> None:
    """Refuse a checkpoint of a run with another stage, model or chain of gradient policies; nothing is loaded yet."""
    state = read_run_state(checkpoint)
    own = {**flat(config.model_dump(mode="json")), **shape.to_hf()}
    theirs = {
        "model.lora.train": [],
        **flat(state["config"]),
        **ModelConfig.from_hf(state["shape"]).to_hf(),
    }
    fixed = [key for key in shape.to_hf() if key not in FREE_KEYS]
    adapted = ["model.quantize", "model.lora.rank"]
    if config.model.lora.rank:
        adapted += ["model.lora.targets", "model.lora.train"]
        if (Path(str(theirs["model.path"])) / ADAPTER_CONFIG).exists():
            adapted.append("model.path")  # it was merged
    for name in (*ALLOWED_ANYWAY, *fixed, *adapted):
        anyway = name in ALLOWED_ANYWAY
        if own[name] != theirs.get(name) and not (anyway and config.run.resume_anyway):
            more = ", or run.resume_anyway = true" if anyway else ""
            raise ConfigError(
                f"the run that wrote {checkpoint} had {name} {theirs.get(name)!r} but this run has {own[name]!r}; "
                f"set the same, or another run.output{more}",
                "run.resume",
            )
    with error_context("run.resume"):
        gradient_policies(config.gradients).load_state_dict(state["policies"])


def changes(config: Config, checkpoint: Path, inputs: dict[str, str]) -> list[str]:
    """Return what has changed since the checkpoint that the run continues, in words.

    Raises ConfigError if other training data would be taken for the rest of the old ones, or other weights for those
    that the run began with.
    """
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
        if value != before.get(key) and not key.startswith("run.resume")
    ]
