"""Build a folder once per node while the other processes watch files, not a collective.

    LOCAL_RANK 0     writes  <name>.<pid>.tmp/ ...  and touches  <name>.<launch>.writing  every second
                     then renames the folder to  <name>/          (or leaves the sentence in  <name>.<launch>.failed)
    other processes  wait for  <name>/ ; raise that sentence; or give up when the writer is silent

Renaming is atomic, so a folder that exists is whole; a killed writer leaves only a .tmp folder.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ulysses.data.records import DataError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 60.0  # a writer that has not touched its file for so long is dead
ABANDONED_SECONDS = 86400.0
START_SECONDS = 600.0  # and one that has not begun by then never will


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    writer: bool | None = None,
    silence: float = SILENCE_SECONDS,
    start: float = START_SECONDS,
) -> bool:
    """Make sure that `folder` exists, calling build(temporary folder) in one process of the node if it does not.

    Not a collective: processes may come at different times. True if this process built it.

    Args:
        writer: whether this process builds; by default the one with LOCAL_RANK 0 (or without LOCAL_RANK).
        silence: seconds without a sign of life after which the writer counts as dead.
        start: seconds to wait for its first sign of life.

    Raises DataError: the writer's own error, in every process; or the writer died.
    """
    if folder.is_dir():
        return False
    writer = os.environ.get("LOCAL_RANK", "0") == "0" if writer is None else writer
    launch = _launch()
    beat = folder.with_name(f"{folder.name}.{launch}.writing")
    failure = folder.with_name(f"{folder.name}.{launch}.failed")
    if not writer:
        _watch(folder, failure, silence, start)
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        beat.touch()
        _remove_abandoned(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    stop = threading.Event()
    thread = threading.Thread(target=_keep_touching, args=(beat, stop), daemon=True)
    thread.start()
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        build(temporary)
        _publish(temporary, folder)
    except BaseException as error:
        if isinstance(error, OSError):
            error = _unwritable(folder, error)
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            _write_atomically(failure, json.dumps({"error": str(error) or type(error).__name__}))
        raise error from None
    finally:
        stop.set()
        thread.join()
        beat.unlink(missing_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _watch(folder: Path, failure: Path, silence: float, start: float) -> None:
    last_beat, seen = 0.0, time.monotonic()
    pause = 0.02
    while not folder.is_dir():
        if failure.exists():
            raise DataError(json.loads(failure.read_text())["error"])
        beat = max(map(_modified, folder.parent.glob(f"{folder.name}.*.writing")), default=0.0)
        if (
            beat != last_beat and time.time() - beat < silence
        ):  # an older one was left by a killed run
            last_beat, seen = beat, time.monotonic()
        limit = silence if last_beat else start
        if time.monotonic() - seen > limit and not folder.is_dir():
            raise DataError(
                f"the process with LOCAL_RANK 0, which should write {folder}, has been silent for "
                f"{limit:g} s; look for its error and start again"
            )
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _unwritable(folder: Path, error: OSError) -> DataError:
    problem = error.strerror or error
    return DataError(
        f"the data cache {folder.parent} cannot be written: {problem}; set data.cache to another folder"
    )


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed writers of the same content left more than a day ago."""
    for old in folder.parent.glob(f"{folder.name}.*.tmp"):
        newest = max((p.stat().st_mtime for p in [old, *old.iterdir()]), default=0.0)
        if time.time() - newest > ABANDONED_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


def _keep_touching(path: Path, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        path.touch()


def _publish(temporary: Path, folder: Path) -> None:
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # another run built the same content first: use that
            raise


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _launch() -> str:
    """Name what the processes of one launch on this node share: their parent and its rendezvous."""
    parts = (
        os.getppid(),
        os.environ.get("MASTER_PORT", "0"),
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return "-".join(map(str, parts))
