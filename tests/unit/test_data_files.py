"""Files that are read are those that were named, whole, and as their digest says."""

import gzip
import json
from functools import partialmethod

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from tests import rows_of
from tests.tiny_tokenizer import write_rows
from tests.unit.test_data_formats import load, refused, texts
from ulysses.config.command_line import check, put
from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.read import sources
from ulysses.data.read.sources import Source, missing_sources, parse_sources, source_digest
from ulysses.data.serve.tokenise import Tokenising


@pytest.fixture
def opened(open_sources):
    """A function from a path to its tokenised documents."""
    return lambda path: open_sources(str(path), "text")


ODD = ["set[1]", "set*", "q?", "{a,b}", "50%20#", "hf:", "~", "a b", "[!a]"]


@pytest.mark.parametrize("name", ODD)
def test_a_path_that_exists_is_that_path(tmp_path, name):
    """Whatever its name means elsewhere: the folder beside it is what it would mean as a pattern."""
    for other in (name, "set1", "setx", "qx", "a", "b"):
        folder = tmp_path / other
        folder.mkdir(exist_ok=True)
        table = pyarrow.table({"text": [other]})
        parquet.write_table(table, folder / "train.parquet")
        parquet.write_table(table, folder / f"{other}.parquet")
        datasets.Dataset(table).save_to_disk(folder / "saved")
    for path in ("train.parquet", f"{name}.parquet", "saved"):
        assert texts(tmp_path / name / path) == [name]


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, opened, monkeypatch):
    """Also if it is restored before the end."""
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"text": f"row {i}"} for i in range(6)])
    before = file.read_bytes()
    real = Tokenising.encode

    def appended(*arguments, restored):
        file.write_bytes(before + b'{"text": "late"}\n')
        if restored:
            file.write_bytes(before)
        return real(*arguments)

    sentence = r"rows.jsonl changed while it was read; start again when nothing"
    for restored in (False, True):
        changing = partialmethod(appended, restored=restored)
        monkeypatch.setattr(Tokenising, "encode", changing)
        with pytest.raises(DataError, match=sentence):
            opened(file)
        monkeypatch.setattr(Tokenising, "encode", real)
        file.write_bytes(before)
    assert len(opened(file)) == 6


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_a_quotation_mark_that_is_not_closed_swallows_no_rows(tmp_path, name):
    comma = "\t" if "tsv" in name else ","
    good = [f'{i}{comma}"text, {i}"' for i in range(9)]

    def write(rows):
        text = f"id{comma}text\n" + "\n".join(rows) + "\n"
        (tmp_path / name).write_bytes(
            gzip.compress(text.encode()) if "gz" in name else text.encode()
        )

    for place, bad in ((2, f'2{comma}"open'), (8, f'8{comma}"open'), (4, f'4{comma}"a" b')):
        write([*good[:place], bad, *good[place + 1 :]])
        refused(
            rf"{name} cannot be read after row {place}: .*: close every quotation mark, and",
            tmp_path / name,
        )
        with pytest.raises(DataError, match="cannot be read after row"):
            load(tmp_path / name, bad_rows="drop")
    write([f'1{comma}"line\nbreak and ""quoted"""', f'2{comma}in "the" middle'])
    assert texts(tmp_path / name) == ['line\nbreak and "quoted"', 'in "the" middle']


@pytest.mark.parametrize("held_out", [False, True])
def test_a_file_that_breaks_off_is_told_whichever_part_its_last_row_is_of(
    tmp_path, open_rows, held_out
):
    for place in range(1, 9):
        rows = [f'"{i}"' if i != place else '"open' for i in range(9)]
        text = "\n".join(("text", *rows))
        with pytest.raises(DataError, match=f"a{place}.csv cannot be read after row {place}"):
            open_rows(text, "text", name=f"a{place}.csv", eval_fraction=0.4, held_out=held_out)


def test_a_long_document_counts_as_one_example(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 100_000 + "---second")
    found = texts(tmp_path / "a.txt", separator="---", max_examples=1)
    assert len(found) > 2 and "".join(found) == "word " * 100_000


def test_what_a_cached_folder_leaves_out_is_told_each_time(tmp_path, opened):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "a.jsonl", [{"text": "a"}])
    first = opened(tmp_path / "one")
    assert not first.report.notes
    late = tmp_path / "one/b.JSONL", tmp_path / "two/c.JSONL"
    for file in late:
        file.write_text('{"text": "late"}\n')
        again = opened(file.parent)
        assert again.folder == first.folder and str(file) in str(again.report)
        assert again.report.notes == {"files left out, not data of split train": 1}


def test_a_linked_folder_is_named_and_a_linked_file_is_read(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    for place in (folder, other):
        place.mkdir()
        write_rows(place / "a.jsonl", [{"text": place.name}])
    (folder / "b.jsonl").symlink_to(other / "a.jsonl")
    (folder / "linked").symlink_to(other)
    records, report = load(folder)
    assert [record.text for record in records] == ["folder", "other"]
    assert report.examples == {
        "files left out, not data of split train": [str(folder / "linked")]
    }
    (folder / "gone.jsonl").symlink_to(other / "gone.jsonl")
    with pytest.raises(DataError, match=r"folder/gone.jsonl is a link to no file; mend it or"):
        source_digest(Source(str(folder)), tmp_path)


# a row, in which DEEP is a list in so many others, and what is said
BROKEN = """
{"text": "a", "text": "b"} => an object has the key 'text' twice
{"text": "a", "meta": [{"k": 1, "k": 1}]} => an object has the key 'k' twice
{"text": "a", "answer": NaN} => NaN is not a finite number|Out of range float values
{"text": "a", "answer": [1e999]} => 1e999 is not a finite number|Out of range float values
{"text": DEEP} => maximum recursion depth exceeded
"""


@pytest.mark.parametrize("row, sentence", rows_of(BROKEN))
def test_json_that_says_two_things_or_no_number_is_refused(tmp_path, row, sentence):
    row = row.replace("DEEP", "[" * 100_000 + "]" * 100_000)
    good = '{"text": "a", "list": [{"k": 1}, {"k": 1.5e3}], "k": -0.0}'
    write_rows(tmp_path / "a.jsonl", f"{good}\n{row}\n")
    refused(f"a.jsonl row 2 is not valid JSON: ({sentence})", tmp_path / "a.jsonl")
    records, report = load(tmp_path / "a.jsonl", bad_rows="drop")
    assert len(records) == 1 and report.dropped == {"is not valid JSON": 1}
    write_rows(tmp_path / "a.json", f"[{good},\n{row}]")
    refused(
        rf"a.json (row 2 is not valid JSON|cannot be read): ({sentence})", tmp_path / "a.json"
    )


def test_parquet_without_rows_or_with_numbers_that_are_none(tmp_path, opened):
    (tmp_path / "empty.parquet").write_bytes(b"")
    refused(
        r"^/.*/empty.parquet cannot be read: Parquet file size is 0 bytes$",
        tmp_path / "empty.parquet",
    )
    for name, table in (
        ("zero", pyarrow.table({"text": pyarrow.array([], pyarrow.string())})),
        ("none", pyarrow.table({})),
    ):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(
            DataError, match=rf"no example is left of .*/{name}.parquet: read 0 rows"
        ):
            opened(tmp_path / f"{name}.parquet")
    parquet.write_table(
        pyarrow.table({"text": ["a"], "answer": [float("nan")]}), tmp_path / "nan.parquet"
    )
    refused(
        "nan.parquet row 1 is not valid JSON: Out of range float values",
        tmp_path / "nan.parquet",
    )


@pytest.mark.parametrize("kind", ["text", "sequence"])
def test_text_that_cannot_be_cut_is_named(open_rows, tmp_path, opened, monkeypatch, kind):
    monkeypatch.setattr(sources, "MOST_UNCUT", 300_000)
    row = {"text": "a", "prompt": "q", "completion": "a"}
    long = {"text": "x" * 400_000, "prompt": "q", "completion": "x" * 400_000}
    with pytest.raises(
        DataError, match="rows.jsonl row 2 holds 400,0.. characters without a space"
    ):
        open_rows([row, long, row], kind)
    (tmp_path / "a.txt").write_text("x" * 400_000)
    with pytest.raises(
        DataError, match=r"a.txt cannot be read: holds 3..,... characters without a space"
    ):
        opened(tmp_path / "a.txt")


@pytest.mark.parametrize("key", ["train", "eval", "cache", "chat_template"])
def test_a_path_with_a_nul_is_refused(key):
    with pytest.raises(
        ValueError, match="this holds a NUL character, which no path or name has"
    ):
        DataSection(**{key: "a\0b"})
    assert "does not exist" in missing_sources([Source("a\0b.jsonl")])[0]


NO_UNICODE = r"""
model.add_tokens => ["\ud800"]
run.output => "\udcff"
data.train => [{"path": "a\ud800"}]
data.chat_template_kwargs => {"a": {"b": ["\ud800"]}}
model.lora.targets => ["\ud800"]
"""


@pytest.mark.parametrize("key, value", rows_of(NO_UNICODE))
def test_a_setting_that_is_no_unicode_is_refused_by_its_name(key, value):
    put(given := {"stage": "sft"}, key, json.loads(value))
    with pytest.raises(ValueError, match=rf"^{key} is .*: this holds an unpaired surrogate"):
        check(given)


def test_more_examples_than_can_be_counted_are_refused():
    with pytest.raises(DataError, match="max_examples: Input should be less than or equal to"):
        parse_sources({"path": "a.jsonl", "max_examples": 10**30})
