"""Checkpoints: complete or absent, rotated, and found again after any death.

    checkpoints/step-12/        run.json  rank-00000.json  rank-00000.master.safetensors ...  and a stage's own files
    checkpoints/.step-16.tmp/   what a killed save leaves behind: never read, and removed by the next save

Files and folders are on the disk before the rename, and the rename before the next step: a power cut, too, leaves a
complete checkpoint or none. run.json holds the run's id, the digest of every other file, which is compared before any
of them is read, and its own; each rank's index names the run, the step and the digests of its own slices.
"""

import json
import re
import shutil
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ulysses import environment
from ulysses.config.schema import RunSection
from ulysses.config.section import error_context
from ulysses.data.cache import digest_of_value
from ulysses.disk import (
    check_files,
    check_replaceable,
    digest_of,
    flush_to_disk,
    replace_folder,
    write_json,
    writing,
)
from ulysses.parallel.mesh import gather
from ulysses.zero.engine import TrainedEngine
from ulysses.zero.state import save_state

FORMAT = 6
CHECKPOINT = re.compile("step-(0|[1-9][0-9]*)")


def save_checkpoint(
    folder: Path,
    engine: TrainedEngine,
    state: dict[str, Any],
    more: Callable[[Path], None],
    *,
    keep: int = 0,
) -> None:
    """Write FOLDER/step-N and remove what rotation no longer keeps; all ranks call it together.

    Args:
        folder: RUN/checkpoints, on a file system that all ranks see.
        state: goes into run.json; its "step" names the checkpoint, and its "best" (step, loss), if there is one, stays.
        more: adds files of its own to the checkpoint, on rank 0.
        keep: how many of the newest checkpoints stay, in addition to the best one; 0 keeps all.
    """
    main = dist.get_rank() == 0
    final = folder / f"step-{state['step']}"
    temporary = final.with_name(f".{final.name}.tmp")
    with writing(temporary):
        if main:
            for leftover in folder.glob(".step-*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        own = save_state(engine, temporary, {key: state.get(key) for key in ("run", "step")})
        flush_to_disk(temporary / name for name in own)
        digests = gather(own)  # from here on no other process writes to the folder
        if main:
            more(temporary)
            files = dict(ChainMap(*digests))
            rest = [path for path in temporary.iterdir() if path.name not in files]
            files |= {path.name: digest_of(path) for path in rest}
            write_run_state(temporary, {**state, "files": files})
            flush_to_disk([*rest, temporary / "run.json", temporary])
            replace_folder(final, temporary, "run.json")
            flush_to_disk([folder])
            best, _ = state.get("best") or (None, None)
            for path in saved_checkpoints(folder)[:-keep] if keep else []:
                if path.name != f"step-{best}":
                    replace_folder(path, record="run.json")
    dist.barrier()


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


def check_share(checkpoint: Path, state: dict[str, Any]) -> None:
    """Compare a checkpoint's files with their digests, each on one rank; all ranks call it together.

    Raises DiskError on the rank that finds a file missing or changed.
    """
    # kind by kind: each rank gets as much, and if it can its own files
    files = sorted(state["files"].items(), key=lambda file: file[0].partition(".")[::-1])
    check_files(checkpoint, dict(files[dist.get_rank() :: dist.get_world_size()]))
    dist.barrier()  # no rank reads a file that another one is about to name


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
            f'run.output {folder.absolute().parent} already holds checkpoints; set run.resume = "auto" to continue the '
            f"newest, run.overwrite = true to delete {left}, or another run.output"
        )
    return chosen


def clear_run_folder(output: Path, resume_from: Path | None) -> list[Path]:
    """Delete what an earlier run left in its folder, or only what came after the checkpoint that is continued.

    Rank 0 calls it. Returns the deleted checkpoints.
    """
    gone = superseded(output / "checkpoints", resume_from)
    for path in gone:
        replace_folder(path, record="run.json")
    if resume_from is None:
        replace_folder(output / "export")
        for events in (output / "tensorboard").glob("events.out.tfevents.*"):
            events.unlink()
    return gone
