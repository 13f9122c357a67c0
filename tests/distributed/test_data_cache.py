"""One process writes the tokenised data; the others wait for it, hear of its failure, and never hang."""

import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from filelock import FileLock

from tests.data_case import open_data
from tests.harness import run_distributed, until
from tests.tiny_tokenizer import CHATML, write_rows, write_tokenizer
from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.cache import build_once
from ulysses.data.read.sources import Source
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.disk import Lease, lock_file


def refusal(tokenizer_folder, source, cache):
    tokenizer = load_tokenizer(tokenizer_folder, eos_token="<|im_end|>")
    data = DataSection(max_length=256, cache=str(cache), chat_template="chatml")
    with pytest.raises(DataError) as error:
        open_data([Source(source)], "sequence", tokenizer, data)
    return str(error.value)


def test_the_writers_error_reaches_every_rank(tmp_path):
    rows = write_rows(
        tmp_path / "x.jsonl", [{"prompt": "q", "completion": "a"}, {"prompt": "q"}]
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    said = run_distributed(refusal, 3, tokenizer, rows, tmp_path / "cache")
    assert len(set(said)) == 1 and "x.jsonl row 2 has no 'completion'" in said[0]


@pytest.fixture(params=["local", "network", "NFS"])
def network(request, monkeypatch):
    """Every file system counts as what it is, or as one of a network, which may be unable to exchange two names."""
    if request.param != "local":
        monkeypatch.setattr("ulysses.disk.NETWORK", "")
        monkeypatch.setattr("ulysses.disk.LEASE_SECONDS", 4.0)
    if request.param == "NFS":
        monkeypatch.setattr("filelock._soft.exchange_names", lambda *names: False)


def build_noted(folder, build):
    """Write a word for each rank that is about to wait for the lock, and build."""

    def noted(path):
        note(folder, "w")
        return lock_file(path)

    with mock.patch("ulysses.data.cache.lock_file", noted):
        return build_once(folder, build)


def note(folder, word):
    with folder.with_name("calls").open("a") as file:
        file.write(word)


def await_ranks(folder):
    assert until(lambda: folder.with_name("calls").read_text().count("w") == 3)


def fail_once(folder):
    def build(temporary):
        note(folder, "x")
        await_ranks(folder)
        raise DataError("row 3 is odd")

    with pytest.raises(DataError, match="row 3 is odd"):
        build_noted(folder, build)


def test_those_who_wait_do_not_repeat_a_failure_but_the_next_start_does(tmp_path, network):
    run_distributed(fail_once, 3, tmp_path / "data")
    assert sorted((tmp_path / "calls").read_text()) == [*"wwwx"]
    build_once(tmp_path / "data", lambda folder: (folder / "whole").write_text("x"))
    assert os.listdir(tmp_path / "data") == ["whole"]
    assert sorted(os.listdir(tmp_path)) == ["calls", "data"]


def build_after_a_death(folder):
    """Rank 0 is killed in the middle of writing while the others wait; one of them takes over."""
    built = []

    def build(temporary):
        if os.environ["RANK"] == "0":
            (temporary / "half").write_text("half")
            await_ranks(folder)
            os.kill(os.getpid(), 9)
        built.append((temporary / "whole").write_text("x"))

    if os.environ["RANK"] == "0":
        child = os.fork()
        if child == 0:
            build_noted(folder, build)
        os.waitpid(child, 0)
        return "gone"
    assert until(lambda: [*folder.parent.glob("*/half")])
    build_noted(folder, build)
    return len(built), os.listdir(folder)


def test_a_dead_writer_hangs_nobody(tmp_path, network):
    results = run_distributed(build_after_a_death, 3, tmp_path / "data")
    assert results[0] == "gone"
    assert sorted(results[1:]) == [(0, ["whole"]), (1, ["whole"])]


def test_a_lock_is_a_lease_where_the_innermost_mount_is_a_network_file_system(tmp_path):
    kinds = {"": "nfs4", "disk": "xfs", "bucket": "fuse", "disk/bucket": "fuse.gcsfuse"}
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4")]
    mounts += [
        SimpleNamespace(mountpoint=str(tmp_path / place), fstype=kind)
        for place, kind in kinds.items()
    ]
    with mock.patch("psutil.disk_partitions", lambda all: mounts):
        locks = [type(lock_file(tmp_path / place / "lock")) for place in ("not/there", *kinds)]
    assert locks == [Lease, Lease, FileLock, Lease, Lease]


def slow_writer(folder):
    built = []

    def build(temporary):
        time.sleep(7)  # longer than the lease: its holder renews it
        built.append((temporary / "whole").write_text("x"))

    build_once(folder, build)
    return len(built), os.listdir(folder)


def test_a_slow_writer_on_a_network_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("ulysses.disk.NETWORK", "")
    monkeypatch.setattr("ulysses.disk.LEASE_SECONDS", 3.0)
    results = run_distributed(slow_writer, 2, tmp_path / "data")
    assert sorted(results) == [(0, ["whole"]), (1, ["whole"])]
