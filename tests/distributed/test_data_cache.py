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


def open_on_rank(tokenizer_folder, source, cache):
    time.sleep(0.3 * (os.environ["RANK"] == "1"))
    tokenizer = load_tokenizer(tokenizer_folder, eos_token="<|im_end|>")
    try:
        dataset = open_dataset(
            [Source(source)],
            "sequence",
            tokenizer,
            DataSection(max_length=256, cache=str(cache), chat_template="chatml"),
        )
    except DataError as error:
        return str(error)
    return (
        dataset.fingerprint,
        int(dataset.lengths.sum()),
        dataset[1].sequences[0].tokens.tolist(),
    )


def open_everywhere(folder, rows):
    source, tokenizer = (
        write_rows(folder / "x.jsonl", rows),
        write_tokenizer(folder / "tokenizer", CHATML),
    )
    return run_distributed(open_on_rank, 3, tokenizer, source, folder / "cache")


def test_all_ranks_see_what_one_wrote(tmp_path):
    results = open_everywhere(
        tmp_path, [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(50)]
    )
    assert results[0] == results[1] == results[2]
    assert [p.suffix for p in (tmp_path / "cache" / "tokenized").iterdir()] == [""]


def test_the_writers_error_reaches_every_rank(tmp_path):
    results = open_everywhere(tmp_path, [{"prompt": "q", "completion": "a"}, {"prompt": "q"}])
    assert len(set(results)) == 1 and "x.jsonl row 2 has no answer" in results[0]


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
    assert os.listdir(tmp_path / "data") == ["whole"] and sorted(os.listdir(tmp_path)) == [
        "calls",
        "data",
    ]


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
    assert results[0] == "gone" and sorted(results[1:]) == [
        (False, ["whole"]),
        (True, ["whole"]),
    ]
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
    assert sorted(run_distributed(slow_writer, 2, tmp_path / "data")) == [
        (False, ["whole"]),
        (True, ["whole"]),
    ]
