"""Checkpoints: complete or absent, rotated, and found again after any death.

    checkpoints/step-12/   run.json  rank-00000.json  rank-00000.master.safetensors ...
    checkpoints/.step-16.tmp/        what a killed save leaves; never read, removed by the next run

Files and folders are on the disk before the rename, and the rename before the next step: a power cut, too, leaves a
complete checkpoint or none.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ulysses.zero.engine import ZeroEngine
from ulysses.zero.state import load_state, save_state

FORMAT = 1


class Checkpoints:
    """The checkpoint folder of one run. All ranks see the same file system and call every method together.

    Args:
        folder: RUN/checkpoints.
        keep: how many of the newest stay, besides the best; 0 keeps all.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        step: int,
        engines: dict[str, ZeroEngine],
        state: dict[str, Any],
        *,
        best: int | None,
        more: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write checkpoints/step-N atomically and remove what rotation no longer keeps.

        `more` adds files of its own to the folder, on rank 0.
        """
        rank = dist.get_rank()
        main = rank == 0
        temporary, final = self.folder / f".step-{step}.tmp", self.folder / f"step-{step}"
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            for name in engines:
                (temporary / name).mkdir(parents=True)
        dist.barrier()
        for name, engine in engines.items():
            save_state(engine, temporary / name)
            _to_disk((temporary / name).glob(f"rank-{rank:05d}.*"))
        if main and more is not None:
            more(temporary)
        if main:
            (temporary / "run.json").write_text(
                json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
            )
            _to_disk(path for path in temporary.iterdir() if path.is_file())
        dist.barrier()
        if main:
            _to_disk([*(temporary / name for name in engines), temporary])
            if final.exists():
                remove_folder(final)
            os.rename(temporary, final)
            _to_disk([self.folder])
            self._rotate(best)
        dist.barrier()
        return final

    def load(self, path: Path, engines: dict[str, ZeroEngine]) -> dict[str, Any]:
        """Restore the engines and return the saved run state.

        Raises ValueError for a folder that is not a complete checkpoint of this engine.
        """
        state = read_run_state(path)
        for name, engine in engines.items():
            load_state(engine, path / name)
        return state

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, if there is one."""
        steps = sorted(_steps(self.folder))
        return self.folder / f"step-{steps[-1]}" if steps else None

    def not_before(self, chosen: Path, step: int) -> list[Path]:
        """Return the checkpoints that are neither `chosen`, which is at `step`, nor on the way to it; the oldest first."""
        own = chosen.resolve().parent == self.folder.resolve()
        return [
            self.folder / f"step-{s}" for s in sorted(_steps(self.folder)) if s > step or not own
        ]

    def _rotate(self, best: int | None) -> None:
        if self.keep:
            for step in sorted(_steps(self.folder))[: -self.keep]:
                if step != best:
                    remove_folder(self.folder / f"step-{step}")
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def resume_point(
    folder: Path, resume: str, *, overwrite: bool
) -> tuple[Path, dict[str, Any]] | None:
    """Decide which checkpoint a run continues, and return it with its state; None starts afresh.

    Raises:
        ValueError: for checkpoints that the run would bury or leave to be mistaken for its own, unless `overwrite` lets
            them be deleted; or for a folder that is no complete checkpoint.
    """
    checkpoints = Checkpoints(folder, 0)
    newest = checkpoints.newest()
    if resume == "never":
        if newest is not None and not overwrite:
            raise ValueError(
                f'run.output {folder.absolute().parent} already holds checkpoints; set run.resume = "auto" to continue, '
                "run.overwrite = true to delete them, or another folder"
            )
        return None
    if resume == "auto" and newest is None:
        return None
    chosen = Path(resume) if resume != "auto" or newest is None else newest
    try:
        state = read_run_state(chosen)
    except ValueError as error:
        raise ValueError(f"run.resume: {error}") from None
    left = [] if resume == "auto" else checkpoints.not_before(chosen, state["step"])
    if left and not overwrite:
        raise ValueError(
            f'run.resume is {chosen} but run.output also holds {left[-1].name}, which run.resume = "auto" would continue next '
            f"time; set run.overwrite = true to delete {', '.join(p.name for p in left)}, or another run.output"
        )
    return chosen, state


def _to_disk(paths: Iterable[Path]) -> None:
    """Wait until files or folders have left the system's memory."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_folder(path: Path) -> None:
    """Remove a folder that is renamed first: a kill in the middle of the removal leaves nothing that looks complete."""
    doomed = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    return [
        int(p.name.removeprefix("step-"))
        for p in folder.glob("step-*")
        if p.name.removeprefix("step-").isdigit() and (p / "run.json").exists()
    ]


def read_run_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's run.json.

    Raises ValueError if the folder is not a complete checkpoint, or of another format.
    """
    try:
        state = json.loads((path / "run.json").read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{path.absolute()} is not a complete checkpoint; give a folder RUN/checkpoints/step-N"
        ) from None
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}"
        )
    return state
