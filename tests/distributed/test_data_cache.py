"""One process per node writes the tokenised data; the others watch files and never hang."""

import os
import time

import pytest

from tests.harness import run_distributed
from tests.tiny_tokenizer import CHATML, write_rows, write_tokenizer
from ulysses.data.cache import build_once
from ulysses.data.chat import load_tokenizer
from ulysses.data.dataset import open_dataset
from ulysses.data.encode import DataSettings
from ulysses.data.records import DataError
from ulysses.data.sources import Source


def open_on_rank(tokenizer_folder, source, cache, late_rank):
    rank = int(os.environ["RANK"])
    if rank == late_rank:
        time.sleep(0.5)
    tokenizer = load_tokenizer(tokenizer_folder, eos_token="<|im_end|>")
    try:
        dataset = open_dataset(
            [Source(source)], "sequence", tokenizer, DataSettings(256), cache, chat_template="chatml"
        )
    except DataError as error:
        return str(error)
    return dataset.fingerprint, int(dataset.lengths.sum()), dataset[1].sequences[0].tokens.tolist()


@pytest.mark.parametrize("late_rank", [0, 1])
def test_all_ranks_see_what_rank_0_wrote(tmp_path, late_rank):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    source = write_rows(tmp_path / "x.jsonl", [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(50)])
    results = run_distributed(open_on_rank, 3, folder, source, tmp_path / "cache", late_rank)
    assert results[0] == results[1] == results[2]
    assert [p.suffix for p in (tmp_path / "cache" / "tokenized").iterdir()] == [""]


def test_the_writers_error_reaches_every_rank(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    source = write_rows(tmp_path / "x.jsonl", [{"prompt": "q", "completion": "a"}, {"prompt": "q"}])
    results = run_distributed(open_on_rank, 3, folder, source, tmp_path / "cache", 0)
    assert len(set(results)) == 1 and "x.jsonl row 2 has no answer" in results[0]


def wait_for_a_writer_that_dies(folder, how):
    """Rank 0 is killed in the middle of writing, or never comes."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        child = os.fork()
        if child == 0:
            if how == "killed":
                os.environ["LOCAL_RANK"] = "0"

                def build(temporary):
                    (temporary / "half").write_text("half")
                    os.kill(os.getpid(), 9)

                build_once(folder, build)
            os._exit(0)
        os.waitpid(child, 0)
        return "gone"
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"LOCAL_RANK 0.*has been silent"):
        build_once(folder, lambda _: None, silence=1.0, start=1.0)
    return time.monotonic() - begun < 10 and not folder.exists()


@pytest.mark.parametrize("how", ["killed", "absent"])
def test_a_dead_writer_hangs_nobody(tmp_path, how):
    assert run_distributed(wait_for_a_writer_that_dies, 2, tmp_path / "data", how) == ["gone", True]
    assert build_once(tmp_path / "data", lambda folder: (folder / "whole").write_text("x"))  # the next start repairs
    assert os.listdir(tmp_path / "data") == ["whole"]


def slow_writer(folder):
    def build(temporary):
        time.sleep(2.5)  # longer than `silence`: the heartbeat keeps the others waiting
        (temporary / "whole").write_text("x")

    built = build_once(folder, build, silence=2.0)
    return built, os.listdir(folder)


def test_a_slow_writer_is_waited_for(tmp_path):
    assert run_distributed(slow_writer, 2, tmp_path / "data") == [(True, ["whole"]), (False, ["whole"])]
