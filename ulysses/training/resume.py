"""What a run continues from, and whether the checkpoint is of this run's kind; nothing is loaded yet."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.arch import ModelConfig as Shape
from ulysses.training.checkpoint import resume_point
from ulysses.training.config import Config
from ulysses.training.section import ConfigError


def find_checkpoint(config: Config, shape: Shape) -> Path | None:
    """Decide what to resume from.

    Raises ConfigError: what ulysses.training.checkpoint.resume_point refuses, or a checkpoint that this run cannot continue.
    """
    try:
        found = resume_point(
            config.output / "checkpoints", config.run.resume, overwrite=config.run.overwrite
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found is None:
        return None
    _check_same_model(*found, config, shape)
    try:
        config.gradients.chain().load_state_dict(found[1]["policies"])
    except ValueError as error:
        raise ConfigError(f"run.resume: {error}, or another run.output") from None
    return found[0]


def _check_same_model(
    checkpoint: Path, saved: dict[str, Any], config: Config, shape: Shape
) -> None:
    """Refuse to continue a checkpoint of another stage, of other adapters or of a model that computes something else."""
    if saved["config"]["stage"] != config.stage:
        raise ConfigError(
            f"run.resume: {checkpoint} is of stage {saved['config']['stage']!r} but this run is {config.stage!r}; use "
            f"its stage or another run.output"
        )
    was, now = asdict(Shape.from_hf(saved["shape"])), asdict(shape)
    free = (
        "initializer_range",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    lora = config.model.lora.model_dump(mode="json")
    for name in (
        ("rank", "targets") if lora["rank"] or saved["config"]["model"]["lora"]["rank"] else ()
    ):
        was[f"lora.{name}"], now[f"lora.{name}"] = (
            saved["config"]["model"]["lora"][name],
            lora[name],
        )
    other = [name for name in now if was[name] != now[name] and name not in free]
    if other:
        raise ConfigError(
            f"run.resume: {checkpoint} is of another model: its {other[0]} is {was[other[0]]!r} and this run's is {now[other[0]]!r}; "
            "use the same model or another run.output"
        )
