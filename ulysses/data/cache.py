"""Build a folder in one process while the others wait for it, on one machine or on a shared file system.

    first process    holds  NAME.lock  and writes  NAME.HOST-PID.tmp/ ,  which it renames to  NAME/  at the end
    other processes  wait for the lock, then find  NAME/ ,  or the reason of the failure in  NAME.failed

Renaming is atomic, so a folder that exists is complete. A process that dies gives up its lock, and the next one builds.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import Timeout

from ulysses.data import DataError
from ulysses.disk import DiskError, check_files, digest_of, flush_to_disk, lock_file, writing

# two changes of a file that are so far apart have different times on every file system
SETTLED_SECONDS = 2.0


def build_once(folder: Path, build: Callable[[Path], object]) -> None:
    """Make sure that `folder` exists: the first process to come calls build(temporary folder), the others wait.

    This is no collective: processes may come at different times, and one that never comes holds up nobody.

    Raises DataError: the folder cannot be written. An error of `build` is raised in the process that called it, and as
    a DataError in those that waited for it.
    """
    if folder.is_dir():
        return
    failed, lock = (folder.with_name(f"{folder.name}.{end}") for end in ("failed", "lock"))
    temporary = folder.with_name(f"{folder.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    disk = partial(writing, folder.parent, advice="set data.cache to another folder")
    try:
        with disk():
            folder.parent.mkdir(parents=True, exist_ok=True)
            earlier = failed.read_text() if failed.exists() else ""
        with disk(), lock_file(lock):
            if folder.is_dir():
                return
            failure = failed.read_text() if failed.exists() else ""
            if failure != earlier:  # the process that we waited for has failed
                raise DataError(failure.partition(" ")[2])
            _remove_abandoned(folder)
            try:
                with disk():
                    temporary.mkdir()
                    build(temporary)
                    flush_to_disk(temporary.iterdir())
                    try:
                        temporary.rename(folder)
                    except OSError:
                        # a process that took this one for dead has built the same content
                        if not folder.is_dir():
                            raise
            except BaseException as error:
                failed.write_text(f"{time.time()} {str(error) or type(error).__name__}")
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            failed.unlink(missing_ok=True)
    except DiskError as error:
        raise DataError(f"the data cache {error}") from None
    finally:
        # The lock may go: processes that still wait for it look for the folder first.
        if folder.is_dir():
            lock.unlink(missing_ok=True)


def check_once(seal: Path, cache: Path, made: Path) -> None:
    """Compare files with their digests, unless they were compared before and have kept their sizes and times.

    Args:
        seal: a JSON file of digests by name, in the folder of the files.
        cache: data.cache, which remembers what was compared.
        made: the file or folder without which all of them are made again.

    Raises DataError naming the first file that is missing or differs.
    """
    advice = f"delete {made} so that all of them are made again"
    try:
        digests = json.loads(seal.read_text())
    except (OSError, ValueError):
        raise DataError(f"{seal} is missing or not what was written there; {advice}") from None
    build_once(
        known_files([seal, *(seal.with_name(name) for name in digests)], cache),
        lambda _: check_files(seal.parent, digests, advice),
    )


def known_files(files: Iterable[Path], cache: Path) -> Path:
    """Return the folder that holds what is known of files with these names, sizes and times."""
    stats = [(str(path.absolute()), path.stat()) for path in files if path.exists()]
    states = [(n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in stats]
    return cache / "digests" / digest_of_value(states)


def content_digest(files: Sequence[Path], cache: Path) -> str:
    """Return a digest of all that files hold, and of their suffixes, of which .csv.gz has two.

    One process of the node reads the bytes. The others, and later runs, find the digest in the cache under the names,
    sizes and times of the files. Files that changed a moment ago are always read.
    """

    def read() -> str:
        return digest_of_value([[path.suffixes, digest_of(path)] for path in files])

    if time.time() - max(path.stat().st_ctime for path in files) < SETTLED_SECONDS:
        return read()
    remembered = known_files(files, cache)
    build_once(remembered, lambda folder: (folder / "digest").write_text(read()))
    return (remembered / "digest").read_text()


def digest_of_value(value: object) -> str:
    """Return the SHA-256 of a value as JSON, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that died left, of the folder itself and of others that nobody builds at the moment."""
    # only folders of a cache have such names
    for abandoned in folder.parent.glob(f"{'[0-9a-f]' * 32}*-*.tmp"):
        name = abandoned.name.partition(".")[0]
        if name == folder.name:
            shutil.rmtree(abandoned, ignore_errors=True)
            continue
        lock = folder.with_name(f"{name}.lock")
        with suppress(Timeout), lock_file(lock).acquire(timeout=0):
            shutil.rmtree(abandoned, ignore_errors=True)
            lock.unlink(missing_ok=True)
