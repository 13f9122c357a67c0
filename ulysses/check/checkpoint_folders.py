"""A run's checkpoints: which are there, which one a run continues, and whether it may.

RUN/checkpoints/step-12/run.json holds the run's id and settings, the digest of every other file, and its own. Data, the
base of adapters and frozen models are told by digests of their content in it.
"""

import json
import re
from pathlib import Path
from typing import Any

from models.arch import ModelConfig
from ulysses import environment
from ulysses.check.agreement import HELD_OUT
from ulysses.config.schema import Config, RunSection
from ulysses.config.section import ConfigError, error_context, flat
from ulysses.data.cache import digest_of_value
from ulysses.disk import check_replaceable, write_json
from ulysses.registry import gradient_policies

FORMAT = 6
FIELDS = {"step", "files", "config", "shape", "policies", "inputs"}  # of run.json, at least
CHECKPOINT = re.compile("step-(0|[1-9][0-9]*)")
# What a run may only change between a checkpoint and its continuation if run.resume_anyway says so.
ALLOWED_ANYWAY = ("stage", "batch.examples", "run.seed")
# Of a model's config.json, what may differ between a checkpoint and the run that continues it.
FREE_KEYS = (
    "initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in RUN/checkpoints, oldest first."""
    found = (CHECKPOINT.fullmatch(f.parent.name) for f in folder.glob("step-*/run.json"))
    steps = sorted(int(name[1]) for name in found if name)
    return [folder / f"step-{step}" for step in steps]


def superseded(folder: Path, chosen: Path | None) -> list[Path]:
    """Return the checkpoints in RUN/checkpoints that are neither `chosen` nor on the way to it, oldest first."""
    saved = saved_checkpoints(folder)
    kept = [n for n, path in enumerate(saved, 1) if chosen and path.samefile(chosen)]
    return saved[max(kept, default=0) :]


def read_run_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's run.json, and see that it is what was written there, of the files next to it.

    Raises ValueError if the folder is not a complete checkpoint, has another format, or disagrees with itself.
    """
    file = path.absolute() / "run.json"
    try:
        state = json.loads(file.read_text())
        number = state["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(
            f"{path.absolute()} is not a complete checkpoint; give a folder RUN/checkpoints/step-N"
        ) from None
    if number != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {number}, but this version reads format {FORMAT}; continue it with the "
            "version that wrote it"
        )
    if state.pop("digest", "") != digest_of_value(state) or FIELDS - state.keys():
        wrong = "does not hold what was written there: it was cut or changed"
    elif unnamed := {f.name for f in path.glob("rank-*")} - state["files"].keys():
        wrong = f"does not name {min(unnamed)} among its files"
    elif CHECKPOINT.fullmatch(file.parent.name) and file.parent.name != f"step-{state['step']}":
        wrong = f"is of step {state['step']}, and not of the one that its folder is named after"
    else:
        return state
    raise ValueError(f"{file} {wrong}; restore it, or use another copy of the folder")


def write_run_state(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint's run.json, with a digest of all that it says."""
    state = json.loads(json.dumps({"format": FORMAT, **state}))  # as it will be read
    write_json(path / "run.json", state | {"digest": digest_of_value(state)})


def restarts(run: RunSection) -> bool:
    """Return whether torchrun may restart the run, which continues its newest checkpoint then."""
    return run.resume == "never" and environment.may_restart()


def resume_point(run: RunSection) -> Path | None:
    """Return the checkpoint that a run continues; None starts afresh.

    Raises ValueError for a folder that is not a complete checkpoint, and for checkpoints in the run folder that could
    later be mistaken for this run's own, unless run.overwrite allows their deletion.
    """
    folder, chosen, again = Path(run.output) / "checkpoints", None, restarts(run)
    if again and run.overwrite:
        raise ValueError(
            "run.overwrite would delete the checkpoints that a restart continues; leave it out, or start torchrun with "
            "--max-restarts 0"
        )
    if again or run.resume == "auto":
        chosen = next(reversed(saved_checkpoints(folder)), None)
    elif run.resume != "never":
        chosen = Path(run.resume)
        with error_context("run.resume"):
            read_run_state(chosen)
    gone = superseded(folder, chosen)
    if gone and not run.overwrite:
        left = ", ".join(path.name for path in gone)
        raise ValueError(
            f'run.output {run.output} already holds checkpoints; set run.resume = "auto" to continue the '
            f"newest, run.overwrite = true to delete {left}, or another run.output"
        )
    with error_context("run.overwrite"):
        for path in gone:
            check_replaceable(path, "run.json")
    return chosen


def find_checkpoint(config: Config, strict: bool) -> Path | None:
    """Return the checkpoint that a run continues; a dry run that continues none only says that the folder is taken."""
    return resume_point(config.run) if strict or config.run.resume != "never" else None


# ---------------------------------------------------------------- what the run must have in common with it


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
    adapted = "model.quantize", "model.lora.rank", "model.lora.targets", "model.lora.train"
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
        if value != before.get(key) and not key.startswith(("run.resume", "run.overwrite"))
    ]
