"""The digest of a part of a file, which stands for a whole model's, and the sentences about what cannot be written."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from tests import rows_of
from ulysses.disk import CHUNK, DiskError, held, sampled_digest, writing


def test_sampled_digest_sees_the_header_the_size_and_blocks_everywhere(tmp_path):
    path, size = tmp_path / "weights", 8 << 20
    found = set()
    for place in (None, 10, CHUNK - 1, size // 2 + 100, size - size // 64 + 100):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        found.add(sampled_digest(path))
    path.write_bytes(bytes(size - 1))
    assert len(found | {sampled_digest(path)}) == 6


ADVICE = r"""
ENOSPC => GiB are free there\); make room or use another disk$
EDQUOT => make room or use another disk$
EXDEV => cross-device link; use another disk$
EIO => error; use another disk$
EROFS => system; use another disk$
ENOENT => /file or its folder was moved or deleted while the run wrote there; put it back beside what has been
EACCES => denied; let this user write there, or use another disk$
"""


@pytest.mark.parametrize("name, advice", rows_of(ADVICE))
def test_only_a_full_disk_needs_room(name, advice, tmp_path):
    number = getattr(errno, name)
    with pytest.raises(DiskError, match=f"(?i)^/.*{advice}"), writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number), os.fsencode(tmp_path / "file"))


def test_of_two_files_the_one_that_is_written_is_named(tmp_path):
    """shutil names both where a copy meets a limit of the size of files, and so does a rename."""
    with (
        pytest.raises(DiskError, match="^target cannot be written: too large"),
        writing(tmp_path),
    ):
        raise OSError(errno.EFBIG, "too large", "source", None, "target")
    with pytest.raises(DiskError, match="^[^ ]*/target or its folder"), writing(tmp_path):
        (tmp_path / "source").rename(tmp_path / "target")


def test_who_may_no_longer_write_into_its_folder_tells_what_it_could_not_write(tmp_path):
    denied = mock.patch.object(Path, "unlink", side_effect=PermissionError)
    with pytest.raises(DiskError, match="the export"), denied, held(tmp_path, "run 1"):
        raise DiskError("the export")
    with held(tmp_path, "run 2") as before:
        assert before == "run 1"
