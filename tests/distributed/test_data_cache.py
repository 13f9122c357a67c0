"""One process writes the tokenised data; the others wait for it, hear of its failure, and never hang."""

import os
import time

import pytest

from tests.harness import run_distributed
from tests.tiny_tokenizer import CHATML, write_rows, write_tokenizer
from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.cache import build_once
from ulysses.data.read.chat import load_tokenizer
from ulysses.data.read.sources import Source
from ulysses.data.serve.dataset import open_dataset
from ulysses.disk import file_system


def refusal(tokenizer_folder, source, cache):
    time.sleep(0.3 * (os.environ["RANK"] == "1"))
    tokenizer = load_tokenizer(tokenizer_folder, eos_token="<|im_end|>")
    data = DataSection(max_length=256, cache=str(cache), chat_template="chatml")
    with pytest.raises(DataError) as error:
        open_dataset([Source(source)], "sequence", tokenizer, data)
    return str(error.value)


def test_the_writers_error_reaches_every_rank(tmp_path):
    rows = write_rows(
        tmp_path / "x.jsonl", [{"prompt": "q", "completion": "a"}, {"prompt": "q"}]
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    said = run_distributed(refusal, 3, tokenizer, rows, tmp_path / "cache")
    assert len(set(said)) == 1 and "x.jsonl row 2 has no answer" in said[0]


@pytest.fixture(params=[False, True])
def network(request, monkeypatch):
    """Every file system counts as one of a network, or as what it is."""
    if request.param:
        monkeypatch.setattr("ulysses.disk.NETWORK", "")
        monkeypatch.setattr("ulysses.disk.LEASE_SECONDS", 1.5)


def fail_once(folder, calls):
    def build(temporary):
        with calls.open("a") as file:
            file.write("x")
        time.sleep(1.0)  # all ranks are waiting by now
        raise DataError("row 3 is odd")

    with pytest.raises(DataError, match="row 3 is odd"):
        build_once(folder, build)


def test_those_who_wait_do_not_repeat_a_failure_but_the_next_start_does(tmp_path, network):
    run_distributed(fail_once, 3, tmp_path / "data", tmp_path / "calls")
    assert (tmp_path / "calls").read_text() == "x"
    assert build_once(tmp_path / "data", lambda folder: (folder / "whole").write_text("x"))
    assert os.listdir(tmp_path / "data") == ["whole"]
    assert sorted(os.listdir(tmp_path)) == ["calls", "data"]


def build_after_a_death(folder):
    """Rank 0 is killed in the middle of writing while the others wait; one of them takes over."""

    def build(temporary):
        if os.environ["RANK"] == "0":
            (temporary / "half").write_text("half")
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
        (temporary / "whole").write_text("x")

    if os.environ["RANK"] == "0":
        child = os.fork()
        if child == 0:
            build_once(folder, build)
        os.waitpid(child, 0)
        return "gone"
    time.sleep(0.3)
    built = build_once(folder, build)
    return built, os.listdir(folder)


def test_a_dead_writer_hangs_nobody(tmp_path, network):
    begun = time.monotonic()
    results = run_distributed(build_after_a_death, 3, tmp_path / "data")
    assert results[0] == "gone"
    assert sorted(results[1:]) == [(False, ["whole"]), (True, ["whole"])]
    assert time.monotonic() - begun < 20


def slow_writer(folder):
    def build(temporary):
        time.sleep(2.5)  # longer than the lease: its holder renews it
        (temporary / "whole").write_text("x")

    return build_once(folder, build), os.listdir(folder)


def test_a_slow_writer_on_a_network_is_waited_for(tmp_path, monkeypatch):
    assert file_system(tmp_path / "not" / "there") == file_system(tmp_path) != ""
    monkeypatch.setattr("ulysses.disk.NETWORK", "")
    monkeypatch.setattr("ulysses.disk.LEASE_SECONDS", 1.0)
    results = run_distributed(slow_writer, 2, tmp_path / "data")
    assert sorted(results) == [(False, ["whole"]), (True, ["whole"])]
