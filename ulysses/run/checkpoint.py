"""Checkpoints: complete or absent, rotated, and found again after any death.

    checkpoints/step-12/        run.json  rank-00000.json  rank-00000.master.safetensors ...  and a stage's own files
    checkpoints/.step-16.tmp/   what a killed save leaves behind: never read, and removed by the next save

Files and folders are on the disk before the rename, and the rename before the next step: a power cut, too, leaves a
complete checkpoint or none. run.json holds the run's id, the digest of every other file, which is compared before any
of them is read, and its own; each rank's index names the run, the step and the digests of its own slices.
"""

import shutil
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ulysses.check.run_folder import saved_checkpoints, write_run_state
from ulysses.disk import check_files, digest_of, flush_to_disk, writing
from ulysses.parallel.mesh import gather
from ulysses.zero.engine import TrainedEngine
from ulysses.zero.resident import ResidentWeights
from ulysses.zero.state import save_state


def save_checkpoint(
    folder: Path,
    engine: TrainedEngine,
    state: dict[str, object],
    save_stage: Callable[[Path], None],
    *,
    keep: int = 0,
) -> None:
    """Write FOLDER/step-N and remove what rotation no longer keeps; all ranks call it together.

    Args:
        folder: RUN/checkpoints, on a file system that all ranks see.
        state: goes into run.json; its "step" names the checkpoint, and its "best" (step, loss), if there is one, stays.
        save_stage: adds the stage's files to the checkpoint, on rank 0.
        keep: how many of the newest checkpoints stay, in addition to the best one; 0 keeps all.

    Raises FloatingPointError, before anything is written, if a rank's copy of weights that stay whole is another one.
    """
    if isinstance(engine.weights, ResidentWeights):
        engine.weights.check_copies()
    main = dist.get_rank() == 0
    final = folder / f"step-{state['step']}"
    temporary = final.with_name(f".{final.name}.tmp")
    with writing(temporary):
        if main:
            for leftover in folder.glob(".step-*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        record = {"run": state.get("run"), "step": state["step"]}
        digests = save_state(engine, temporary, record)
        flush_to_disk(temporary / name for name in digests)
        # from here on no other process writes to the folder
        files = dict(ChainMap(*gather(digests)))
        if main:
            save_stage(temporary)
            rest = [path for path in temporary.iterdir() if path.name not in files]
            files |= {path.name: digest_of(path) for path in rest}
            write_run_state(temporary, {**state, "files": files})
            flush_to_disk([*rest, temporary / "run.json", temporary])
            temporary.rename(final)
            flush_to_disk([folder])
            best, _ = state.get("best") or (None, None)
            for path in saved_checkpoints(folder)[:-keep] if keep else []:
                if path.name != f"step-{best}":
                    _delete(path)
    dist.barrier()


def _delete(checkpoint: Path) -> None:
    """Delete one of the run's checkpoints: it is gone with one rename. Of a link only the link is deleted."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        away = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old.tmp"))
        shutil.rmtree(away, ignore_errors=True)


def check_share(checkpoint: Path, digests: dict[str, str]) -> None:
    """Compare a checkpoint's files with their digests, each on one rank; all ranks call it together.

    Raises DiskError on the rank that finds a file missing or changed.
    """
    # kind by kind: each rank gets as much, and if it can its own files
    files = sorted(digests.items(), key=lambda file: file[0].partition(".")[::-1])
    check_files(checkpoint, dict(files[dist.get_rank() :: dist.get_world_size()]))
    dist.barrier()  # no rank reads a file that another one is about to name
