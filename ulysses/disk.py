"""Files and folders: held by one process, verified, written whole, and one sentence when a write fails.

RUN/.lock      locked as long as the run lasts        RUN/.holder    the run's id, its process and its machine
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, EFBIG, ENOENT, ENOSPC, EPERM
from math import inf
from pathlib import Path
from typing import Any

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

# Who holds a lock on a network file system and does not renew it for so long counts as dead.
LEASE_SECONDS = 60.0
# a process that was just killed may take so long to end and release its lock
NATIVE_SECONDS = 3.0
NETWORK = ("nfs", "lustre", "beegfs", "gpfs", "ceph", "cifs", "smb", "9p", "glusterfs", "fuse")
HOLDER = ".holder"
# Bytes that are written and then hashed while the processor's cache still holds them.
CHUNK = 1 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096


class DiskError(OSError):
    """A file cannot be written, or does not hold what was written; the text is one sentence with its path."""


# ---------------------------------------------------------------- locks


class Lease(SoftFileLease):
    """A lease that is taken over from a dead holder on every file system.

    filelock does so where two names can be exchanged in one step, which NFS, SMB and most of FUSE refuse. There it
    would leave the file of a dead holder for ever.
    """

    def acquire(self, timeout: float | None = None) -> Any:  # type: ignore[override]
        """Do what filelock does, and remove the file of a holder who has not renewed it for more than a lease."""
        timeout = self.timeout if timeout is None else timeout
        end = inf if timeout < 0 else time.monotonic() + timeout
        pause = self.lease_duration / 10
        seen, since = self._file(self.lock_file), time.monotonic()
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return super().acquire(min(left, pause))
            except Timeout:
                if left <= pause:
                    raise
            found = self._file(self.lock_file)
            if found != seen:
                seen, since = found, time.monotonic()
            elif found and time.monotonic() - since > self.lease_duration + pause:
                self._remove(found)

    @staticmethod
    def _file(path: str) -> tuple[int, int] | None:
        """Return which file it is and when it was renewed; opened, because NFS remembers what it told before."""
        with suppress(OSError), open(path) as file:
            status = os.fstat(file.fileno())
            return status.st_ino, status.st_mtime_ns
        return None

    def _remove(self, dead: tuple[int, int]) -> None:
        """Remove the lock file, unless a process that did so before has made another one, which is put back."""
        aside = f"{self.lock_file}.{os.uname().nodename}-{os.getpid()}"
        with suppress(OSError):
            os.rename(self.lock_file, aside)
            if self._file(aside) == dead:
                os.unlink(aside)
            else:
                os.rename(aside, self.lock_file)


def lock_file(path: Path) -> BaseFileLock:
    """Return a lock to be held in a `with` statement, by one process at a time; `path` is the lock file.

    On a local file system it is a native lock, which ends with its process. Other machines may not see a native lock on
    a network file system: there it is a lease that its holder renews, with one LEASE_SECONDS for all processes.
    """
    folder = path.parent.resolve()
    kinds = {
        mount.mountpoint: mount.fstype
        for mount in psutil.disk_partitions(all=True)
        if folder.is_relative_to(mount.mountpoint)
    }
    # the innermost mount holds the folder
    kind = kinds[max(kinds, key=len)] if kinds else ""
    if kind.startswith(NETWORK):
        return Lease(path, lease_duration=LEASE_SECONDS)
    return FileLock(path)


@contextmanager
def held(folder: Path, holder: str) -> Iterator[str]:
    """Hold a folder for one run, and yield the holder before that did not give it back, or "".

    Args:
        holder: who holds it now; other processes read this text in FOLDER/.holder.

    Raises DiskError if another process holds the folder.
    """
    file = folder / HOLDER
    with writing(folder):
        os.makedirs(os.path.realpath(folder), exist_ok=True)  # a link may lead nowhere yet
        lock = lock_file(folder / ".lock")
        patience = 1.5 * LEASE_SECONDS if isinstance(lock, Lease) else NATIVE_SECONDS
        with suppress(Timeout):
            lock.acquire(timeout=patience)
        before = file.read_text() if file.exists() else ""
        if not lock.is_locked:
            raise DiskError(
                f"{folder.absolute()} is in use by {before}; stop that run or choose another folder"
            )
        file.write_text(holder)
    try:
        yield before
    finally:
        with suppress(OSError):  # the run's own error tells what is wrong with the folder
            file.unlink()
        lock.release()


# ---------------------------------------------------------------- digests


def write_digested(path: Path, parts: Iterable[Any], size: int = 0) -> str:
    """Write buffers of at least one byte end to end, and return the file's digest.

    Args:
        size: bytes of the whole file; if given, the disk must have room for all of them before one is written.
    """
    digest = xxh3_128()
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
        for part in parts:
            raw = memoryview(part).cast("B")
            for start in range(0, len(raw), CHUNK):
                file.write(raw[start : start + CHUNK])
                digest.update(raw[start : start + CHUNK])
    return digest.hexdigest()


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Wait until files or folders are on the disk, and no longer in the system's memory alone."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()  # type: ignore[arg-type]


def sampled_digest(path: Path) -> str:
    """Return a digest of a file's size, its first megabyte and 64 blocks all over it."""
    size = path.stat().st_size
    digest = xxh3_128(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(CHUNK))
        for sample in range(SAMPLES):
            file.seek(sample * size // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_files(
    folder: Path, digests: Mapping[str, str], advice: str = "use another copy of the folder"
) -> None:
    """Compare files with the digests of what was written; DiskError names the first that is missing or differs."""
    for name, written in digests.items():
        path = folder.absolute() / name
        if not path.is_file() or digest_of(path) != written:
            raise DiskError(
                f"{path} is missing or does not hold what was written there: it was cut, changed or exchanged; "
                f"restore it, or {advice}"
            )


# ---------------------------------------------------------------- whole folders


@contextmanager
def whole_folder(folder: Path, when: str = "", *, replaces: bool = False) -> Iterator[Path]:
    """Yield a new folder that gets the name `folder` when the block ends without an error.

    One process at a time writes it, and others wait.

    Args:
        when: tells in a DiskError at what time the folder was written, such as " at step 8".
        replaces: a folder that has the name already is the caller's own, and is deleted at the end. Otherwise there is
            none, or an empty one.
    """
    folder = Path(os.path.realpath(folder))
    new, old, lock = (
        folder.with_name(f".{folder.name}.{end}") for end in ("new.tmp", "old.tmp", "lock")
    )
    with writing(folder, when), lock_file(lock):
        if old.exists() and not folder.exists():  # a process was killed between the two renames
            old.rename(folder)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            yield new
            if replaces and folder.exists():
                folder.rename(old)
            new.rename(folder)  # the system refuses this if the folder holds anything
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            lock.unlink(missing_ok=True)


def check_empty(folder: Path, what: str) -> None:
    """Raise ValueError for a folder that holds something, or a file in its place; `what` would be written there."""
    names = []
    if folder.is_dir():
        names = sorted(os.listdir(folder))
    elif folder.exists():
        names = [folder.name]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{folder.absolute()} holds {', '.join(names[:3])}{more}, but {what} needs a new or empty folder; choose "
            "another one, or delete it"
        )


def check_apart(key: str, out: Path, read: Iterable[tuple[str, Path]]) -> None:
    """Raise ValueError if the folder `out`, of the setting `key`, is, holds or lies in a place that is read.

    `read` has those places with the settings that name them.
    """
    for setting, path in read:
        inside = lies_in(out, path)
        around = lies_in(path, out)
        if inside or around:
            how = "holds"
            if inside:
                how = "is" if around else "lies in"
            raise ValueError(
                f"{key} {out.absolute()} {how} {path.absolute()}, which is {setting}; give a folder apart from it"
            )


def lies_in(inner: Path, outer: Path) -> bool:
    """Return whether `inner` is `outer` or lies in it, whatever links lead there."""
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))


# ---------------------------------------------------------------- files


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file with the modes of any new file; OSError if it cannot be written."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)  # save_file puts a file there that only its owner may read
    # save_file writes the metadata in any order; one order makes equal files equal to the byte
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = metadata
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file that takes its place whole; if the old one was a link, the file that it led to stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------- failures


@contextmanager
def writing(path: Path, when: str = "", advice: str = "use another disk") -> Iterator[None]:
    """Turn a failure to write a file or folder into one DiskError with its path and, if it is full, the free space."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        # an error with two names comes from a copy or a rename, which writes the second
        name = os.fsdecode(error.filename2 or error.filename or path.absolute())
        what = f"{name} cannot be written{when}: {error.strerror or error}"
        # safetensors raises errors without a number, which may mean a full disk
        if error.errno in (None, ENOSPC, EDQUOT, EFBIG):
            nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
            free = f"{shutil.disk_usage(nearest).free / 2**30:.1f} GiB"
            if not os.statvfs(nearest).f_favail:
                free = "no room for another file, but " + free
            what, advice = f"{what} ({free} are free there)", f"make room or {advice}"
        elif error.errno == ENOENT:
            what = f"{name} or its folder was moved or deleted while the run wrote there"
            advice = "put it back beside what has been written there since"
        elif error.errno in (EACCES, EPERM):
            advice = f"let this user write there, or {advice}"
        raise DiskError(f"{what}; {advice}") from None
