"""Tokenising in several processes: the same bytes, report and error as in one, and no process is left."""

import os
import signal
from multiprocessing import active_children

import pytest

from ulysses.data import DataError
from ulysses.data.read import sources
from ulysses.data.serve import dataset, workers
from ulysses.data.serve.workers import in_order

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS = {
    "sequence": [{"messages": TURNS * (1 + i % 7)} for i in range(100)]
    + [{"messages": TURNS[:1]}] * 9,
    "pair": [
        {"prompt": f"q{i}", "chosen": "yes " * i, "rejected": f"no{i}"} for i in range(60)
    ],
    "prompt": [{"prompt": f"q{i % 20}", "answer": i} for i in range(60)],
    "text": [{"text": "word " * (i % 5) * 100 + "."} for i in range(60)] + [{"text": ""}] * 8,
}


@pytest.fixture
def open_with(open_rows, monkeypatch):
    monkeypatch.setattr(workers, "BATCHES_AT_FIRST", 1)
    monkeypatch.setattr(sources, "ITEMS_AT_ONCE", 4)
    monkeypatch.setattr(dataset, "CHARACTERS_AT_ONCE", 1500)

    def open_with(rows, kind, count, **settings):
        return open_rows(rows, kind, 64, cache=f"cache{count}", workers=count, **settings)

    return open_with


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_written_does_not_depend_on_the_number_of_processes(open_with, kind):
    one, *others = (open_with(ROWS[kind], kind, count) for count in (1, 2, 3, "auto"))
    assert len(one) > 40 and (kind not in ("sequence", "text") or one.report.dropped)
    for path in one.folder.iterdir():
        for other in others:
            assert path.read_bytes() == (other.folder / path.name).read_bytes(), path.name
    assert not active_children()


def test_the_first_bad_row_stops_the_run(open_with):
    for row in ({"messages": 3}, "a text"):
        rows = [*ROWS["sequence"][:50], row, *ROWS["sequence"][:20], {"messages": 4}]
        with pytest.raises(DataError, match="rows.jsonl row 51 ") as found:
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


def test_a_killed_process_ends_the_run(monkeypatch):
    monkeypatch.setattr(workers, "BATCHES_AT_FIRST", 2)
    found = in_order(die_at_seven, range(100), 2)
    assert [next(found) for _ in range(7)] == list(range(7))
    with pytest.raises(
        DataError, match="was killed, perhaps for want of memory; set data.workers"
    ):
        list(found)
    assert not active_children()


def test_few_batches_at_a_time_are_read_ahead(monkeypatch):
    """And a consumer that stops early leaves no process."""
    monkeypatch.setattr(workers, "BATCHES_AT_FIRST", 0)
    read = []
    found = in_order(str, (read.append(i) or i for i in range(1000)), 3)
    assert [next(found), next(found)] == ["0", "1"] and len(read) <= 6
    found.close()
    assert not active_children()
