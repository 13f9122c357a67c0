"""A run's checkpoints as folders: which are there, which one a run continues, and whether run.json is what was written.

RUN/checkpoints/step-12/run.json holds the run's id and settings, the digest of every other file, and its own.
"""

import json
import re
from pathlib import Path
from typing import Any

from ulysses import environment
from ulysses.config.schema import Config, RunSection
from ulysses.config.section import error_context
from ulysses.data.cache import digest_of_value
from ulysses.disk import check_replaceable, write_json

FORMAT = 6
CHECKPOINT = re.compile("step-(0|[1-9][0-9]*)")


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in RUN/checkpoints, oldest first."""
    found = (file.parent for file in folder.glob("step-*/run.json"))
    named = [path for path in found if CHECKPOINT.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


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
    if state.pop("digest", "") != digest_of_value(state):
        wrong = "does not hold what was written there: it was cut or changed"
    elif unnamed := {f.name for f in path.glob("rank-*")} - state["files"].keys():
        wrong = f"does not name {min(unnamed)} among its files"
    elif CHECKPOINT.fullmatch(file.parent.name) and file.parent.name != f"step-{state['step']}":
        wrong = f"is of step {state['step']}, and not of the one that its folder is named after"
    else:
        return state
    raise ValueError(f"{file} {wrong}; restore it, or use another copy of the folder")


def write_run_state(path: Path, state: dict[str, Any]) -> None:
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
    left = ", ".join(path.name for path in gone)
    for path in gone if run.overwrite else ():
        with error_context("run.overwrite"):
            check_replaceable(path, "run.json")
    if left and not run.overwrite:
        raise ValueError(
            f'run.output {run.output} already holds checkpoints; set run.resume = "auto" to continue the '
            f"newest, run.overwrite = true to delete {left}, or another run.output"
        )
    return chosen


def find_checkpoint(config: Config, strict: bool) -> Path | None:
    """Return the checkpoint that a run continues; a dry run that continues none only says that the folder is taken."""
    return resume_point(config.run) if strict or config.run.resume != "never" else None
