"""Files are proven by digests, and a failed write is one sentence."""

from pathlib import Path

import pytest

import ulysses.disk as disk
from ulysses.disk import (
    DiskError,
    check_files,
    digest_of,
    sampled_digest,
    write_digested,
    writing,
)


def test_digest_is_that_of_the_file_and_follows_every_byte(tmp_path):
    parts = [b"head", bytes(3 * disk.CHUNK + 5), memoryview(b"tail")]
    written = write_digested(tmp_path / "a", parts)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    assert written == digest_of(tmp_path / "a")
    check_files(tmp_path, {"a": written})
    content = bytearray((tmp_path / "a").read_bytes())
    content[-7] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(
        DiskError, match=r"/a \(\d+ bytes\) does not hold what was written there: it was cut, changed or"
    ):
        check_files(tmp_path, {"a": written})
    with pytest.raises(DiskError, match=r"/b is missing; restore it"):
        check_files(tmp_path, {"b": written})


def test_sampled_digest_sees_the_header_the_size_and_blocks_everywhere(tmp_path):
    path, size = tmp_path / "weights", 8 << 20
    found = set()
    for place in (None, 10, disk.CHUNK - 1, size // 2 + 100, size - size // 64 + 100):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        found.add(sampled_digest(path))
    path.write_bytes(bytes(size - 1))
    assert len(found | {sampled_digest(path)}) == 6


def test_failed_write_names_path_step_and_free_space(tmp_path):
    with pytest.raises(
        DiskError, match=r"^/dev/full cannot be written at step 7: No space left on device \(.* GiB are free"
    ):
        with writing(Path("/dev/full"), " at step 7"):
            Path("/dev/full").write_text("x" * 10)
    with pytest.raises(
        DiskError, match=r"none/x cannot be written: No such file or directory .*; make room or go home"
    ):
        with writing(tmp_path, advice="go home"):
            (tmp_path / "none/x").write_text("")
