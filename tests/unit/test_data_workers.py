"""Tokenising in several processes: the same bytes, report and error as in one, and no process is left."""

import os
import signal
from multiprocessing import active_children

import pytest

from ulysses.data import DataError
from ulysses.data.serve.tokenise import Tokenising
from ulysses.data.serve.workers import in_order

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
# several times as many as one batch holds
ROWS = {
    "sequence": [{"messages": TURNS * (1 + i % 7)} for i in range(1300)]
    + [{"messages": TURNS[:1]}] * 9,
    "pair": [
        {"prompt": f"q{i}", "chosen": "yes " * (i % 9), "rejected": f"no{i}"}
        for i in range(1300)
    ],
    "prompt": [{"prompt": f"q{i % 20}", "answer": i} for i in range(1300)],
    "text": [{"text": "word " * (i % 5) * 100 + "."} for i in range(1300)] + [{"text": ""}] * 8,
}


@pytest.fixture
def open_with(open_rows):
    def open_with(rows, kind, count, **settings):
        return open_rows(rows, kind, 64, cache=f"cache{count}", workers=count, **settings)

    return open_with


def test_a_long_document_is_tokenised_in_batches_of_its_parts(open_rows, monkeypatch):
    """Of bounded size, so that the run's watch sees them come and go; the pieces are those of the whole document."""
    text, encode, sizes = (
        "".join(f"word {i % 97}\n" for i in range(2000)),
        Tokenising.encode,
        [],
    )

    def counted(self, rows):
        sizes.append(sum(len(row.value["text"]) for row in rows))
        return encode(self, rows)

    whole = open_rows([{"text": text}], "text", 64, cache="whole")
    monkeypatch.setattr("ulysses.data.read.sources.CHUNK_CHARACTERS", 50)
    monkeypatch.setattr("ulysses.data.serve.tokenise.CHARACTERS_AT_ONCE", 400)
    monkeypatch.setattr(Tokenising, "encode", counted)
    for workers in (1, 3):
        data = open_rows(
            text, "text", 64, name="a.txt", cache=f"cache{workers}", workers=workers
        )
        assert data.report.read == 1 and len(data) == len(whole) > 50
        for path in whole.folder.glob("*.int*"):
            assert path.read_bytes() == (data.folder / path.name).read_bytes(), path.name
        assert max(sizes) < 600
    assert len(sizes) > len(text) // 600


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_written_does_not_depend_on_the_number_of_processes(open_with, kind):
    one, other = (open_with(ROWS[kind], kind, count) for count in (1, 3))
    assert len(one) > 900 and (kind == "prompt" or one.report.dropped)
    for path in one.folder.iterdir():
        assert path.read_bytes() == (other.folder / path.name).read_bytes(), path.name
    assert not active_children()


def test_the_first_bad_row_stops_the_run(open_with):
    for row in ({"messages": 3}, "a text"):
        rows = [*ROWS["sequence"][:1000], row, *ROWS["sequence"][:20], {"messages": 4}]
        with pytest.raises(DataError, match="rows.jsonl row 1001 ") as found:
            open_with(rows, "sequence", 3)
        with pytest.raises(DataError) as alone:
            open_with(rows, "sequence", 1)
        assert str(found.value) == str(alone.value)
        assert sum(open_with(rows, "sequence", 2, bad_rows="drop").report.dropped.values()) == 2
    assert not active_children()


def die_at_seven(number):
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_process_ends_the_run():
    found = in_order(die_at_seven, range(100), 2)
    assert [next(found) for _ in range(7)] == list(range(7))
    with pytest.raises(
        DataError, match="was killed, perhaps for want of memory; set data.workers"
    ):
        list(found)
    assert not active_children()


def test_few_batches_at_a_time_are_read_ahead():
    """And a consumer that stops early leaves no process."""
    read = []
    found = in_order(str, (read.append(i) or i for i in range(1000)), 3)
    assert [next(found) for _ in range(9)] == [*"012345678"] and len(read) <= 9 + 2 * 3
    assert active_children()
    found.close()
    assert not active_children()
