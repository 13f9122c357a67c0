"""Where rows come from: files, folders and hub datasets -> a stream of records, mistakes named by file and row.

    sources --read_rows--> (file, row number, row) --parse_row--> records     never a whole file but .json in memory

json, jsonl, csv and txt (also .gz) are read here, so that errors carry exact rows; parquet, arrow folders and hub
datasets go through `datasets`, which nothing else imports.
"""

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ulysses.data.formats import FORMATS, detect_format, parse_row
from ulysses.data.records import BadRowError, DataError, DropRowError, Record, Report

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$|^[\w-]+$")
CHUNK_CHARACTERS = (
    1 << 20
)  # a longer text is tokenised in parts, cut where no tokenizer joins across
SAFE_CUT = re.compile(r"\S\n(?=\S)|\w(?= \w)")


@dataclass(frozen=True)
class Source:
    """One entry of data.train or data.eval.

    Args:
        path: a file, a folder of files, a folder saved by `datasets`, or a hub dataset id.
        format: one of formats.FORMATS, or "auto" to detect it from the first row.
        weight: how many times each example is taken per epoch; 0.5 takes another random half each epoch.
        columns: our key = the file's key.
        split: of a hub dataset; "train" without it.
        subset: of a hub dataset (its configuration name).
        revision: of a hub dataset.
        separator: what stands between the documents of a .txt file; without it the file is one document.
        max_examples: use only the first so many rows; 0 uses all.
    """

    path: str
    format: str = "auto"
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    separator: str | None = None
    max_examples: int = 0

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            known = ", ".join(FORMATS)
            raise DataError(
                f"data format {self.format!r} of {self.path} is unknown; use one of auto, {known}"
            )
        for name, kind in (
            ("path", str),
            ("weight", int | float),
            ("columns", Mapping),
            ("max_examples", int),
        ):
            if not isinstance(getattr(self, name), kind):
                value = getattr(self, name)
                raise DataError(
                    f"{name} of data source {self.path} is {value!r}, which is the wrong type"
                )
        if not self.weight > 0:
            raise DataError(
                f"the weight of {self.path} is {self.weight:g} but must be positive; or leave the file out"
            )


def parse_sources(value: Any) -> list[Source]:
    """Read a path, a table {path, format, weight, columns, split, ...}, or a list of both."""
    items = value if isinstance(value, list | tuple) else [value]
    sources = []
    for item in items:
        if isinstance(item, Source):
            sources.append(item)
        elif isinstance(item, Mapping):
            unknown = sorted(set(item) - set(Source.__dataclass_fields__))
            if unknown or "path" not in item:
                problem = f"unknown key {unknown[0]!r}" if unknown else "no path"
                raise DataError(
                    f"a data source has {problem}; its keys are {', '.join(Source.__dataclass_fields__)}"
                )
            sources.append(
                Source(**{key: entry for key, entry in item.items() if entry is not None})
            )
        else:
            sources.append(Source(str(item)))
    return sources


def missing_sources(sources: Iterable[Source]) -> list[str]:
    """Name every source whose file or folder is absent (hub ids are taken on trust), one sentence each."""
    return [
        _absent(s) for s in sources if not is_hub_id(s) and not Path(s.path).expanduser().exists()
    ]


def is_hub_id(source: Source) -> bool:
    """True if the path is no local file or folder but looks like a dataset id."""
    path = Path(source.path).expanduser()
    return (
        not path.exists()
        and path.suffix not in (*SUFFIXES, ".gz")
        and HUB_ID.match(source.path) is not None
    )


def source_files(source: Source) -> list[Path]:
    """List the files of a source in reading order; DataError if there are none."""
    path = Path(source.path).expanduser()
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise DataError(
                f"{path.absolute()} is none of {', '.join(SUFFIXES)} (or .gz of one); convert or rename it"
            )
        return [path]
    if path.is_dir():
        if _is_saved_dataset(path):
            return sorted(p for p in path.rglob("*") if p.is_file())
        files = sorted(p for p in path.rglob("[!.]*") if p.is_file() and _suffix(p) in SUFFIXES)
        if not files:
            raise DataError(f"the folder {path.absolute()} holds no {', '.join(SUFFIXES)} file")
        return files
    raise DataError(_absent(source))


def source_digest(source: Source) -> str:
    """Hash what a source holds: the bytes of its files, or the id, subset, split and revision of a hub dataset."""
    digest = hashlib.sha256()
    if is_hub_id(source):
        digest.update(json.dumps([source.path, source.subset, source.revision]).encode())
    else:
        for path in source_files(source):
            digest.update(path.suffix.encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    columns = sorted(source.columns.items())
    digest.update(
        json.dumps(
            [source.format, columns, source.split, source.separator, source.max_examples]
        ).encode()
    )
    return digest.hexdigest()


def read_records(
    sources: Iterable[Source], kind: str, report: Report, *, bad_rows: str = "error"
) -> Iterator[Record]:
    """Stream the records of all sources in order; what is left out is counted in `report`.

    Args:
        bad_rows: "error" stops at a row that breaks its format, "drop" counts it.

    Raises DataError: a missing or broken file, or (bad_rows="error") a bad row, named.
    """
    for index, source in enumerate(sources):
        row_format, previous = source.format, ""
        rows = _limit(read_rows(source, kind, report, bad_rows), source.max_examples)
        for file, number, row in rows:
            where = f"{file} row {number}"
            report.read += where != previous  # a long document comes in several parts
            previous = where
            try:
                if not isinstance(row, Mapping):
                    raise BadRowError(f"is {type(row).__name__}, not an object with keys")
                renamed = _rename(row, source.columns)
                if row_format == "auto":
                    row_format = "text" if kind == "text" else detect_format(renamed)
                records = parse_row(renamed, row_format, kind, file, number)
            except (BadRowError, DropRowError) as error:
                if isinstance(error, BadRowError) and bad_rows != "drop":
                    raise DataError(f"{where} {error}") from None
                report.drop(str(error), where)
                continue
            if len(records) > 1:
                report.note("rows that gave several examples", where)
            for record in records:
                yield from _text_parts(
                    replace(record, source=index, raw=row if kind == "prompt" else None)
                )


def _rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return row
    absent = [theirs for theirs in columns.values() if theirs not in row]
    if absent:
        raise BadRowError(
            f"has no column {absent[0]!r} named in columns (it has {sorted(map(str, row))})"
        )
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    return renamed | {ours: row[theirs] for ours, theirs in columns.items()}


def _text_parts(record: Record) -> Iterator[Record]:
    """Cut a very long text at newlines or between words, where no tokenizer joins across, to bound memory."""
    text, start = record.text, 0
    while len(text) - start > 2 * CHUNK_CHARACTERS and (
        cut := SAFE_CUT.search(text, start + CHUNK_CHARACTERS)
    ):
        yield replace(record, text=text[start : cut.end()])
        start = cut.end()
    yield replace(record, text=text[start:]) if start else record


# ------------------------------------------------------------------------------------------------------- files


def read_rows(
    source: Source, kind: str, report: Report, bad_rows: str = "error"
) -> Iterator[tuple[str, int, Any]]:
    """Yield (file name, row number from 1, row) of one source; a jsonl row number is its line."""
    path = Path(source.path).expanduser()
    if is_hub_id(source):
        yield from _numbered(source.path, _hub_rows(source))
    elif path.is_dir() and _is_saved_dataset(path):
        yield from _numbered(source.path, _saved_rows(path, source.split))
    else:
        for file in source_files(source):
            yield from _read_file(file, source, kind, report, bad_rows)


def _read_file(
    path: Path, source: Source, kind: str, report: Report, bad_rows: str
) -> Iterator[tuple[str, int, Any]]:
    suffix, name = _suffix(path), str(path)
    if suffix == ".parquet":
        yield from _numbered(name, _parquet_rows(path))
        return
    try:
        with _open(path) as file:
            if suffix == ".txt":
                if kind != "text":
                    raise DataError(
                        f"{name} is plain text, which only stage pt trains on; use json, jsonl or parquet"
                    )
                for number, text in _documents(
                    io.TextIOWrapper(file, "utf-8-sig"), source.separator
                ):
                    yield name, number, {"text": text}
            elif suffix in (".csv", ".tsv"):
                csv.field_size_limit(sys.maxsize)
                table = io.TextIOWrapper(file, "utf-8-sig", newline="")
                yield from _numbered(
                    name, csv.DictReader(table, delimiter="\t" if suffix == ".tsv" else ",")
                )
            elif suffix == ".json" and _first_character(file) == b"[":
                yield from _numbered(name, _json_array(file, name))
            else:
                yield from _json_lines(file, name, report, bad_rows)
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{name} cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be read: {error.strerror or error}") from None


def _json_lines(
    file: BinaryIO, name: str, report: Report, bad_rows: str
) -> Iterator[tuple[str, int, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield name, number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except ValueError as error:
            problem = (
                "is not valid UTF-8"
                if isinstance(error, UnicodeDecodeError)
                else f"is not valid JSON: {error}"
            )
            if bad_rows != "drop":
                raise DataError(f"{name} row {number} {problem}") from None
            report.read += 1
            report.drop("broken JSON line", f"{name} row {number}")


def _json_array(file: BinaryIO, name: str) -> list[Any]:
    try:
        return json.loads(file.read().decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{name} is not valid JSON: {error}") from None


def _documents(file: io.TextIOWrapper, separator: str | None) -> Iterator[tuple[int, str]]:
    """Yield (document number, text); parts of one long document share its number."""
    buffer, number = "", 1
    while block := file.read(CHUNK_CHARACTERS):
        buffer += block
        if separator:
            *whole, buffer = buffer.split(separator)
            for text in whole:
                if text.strip():
                    yield number, text
                number += 1
        if len(buffer) > 2 * CHUNK_CHARACTERS:
            cut = SAFE_CUT.search(buffer, CHUNK_CHARACTERS, len(buffer) - len(separator or ""))
            if cut is not None:
                yield number, buffer[: cut.end()]
                buffer = buffer[cut.end() :]
    if buffer.strip():
        yield number, buffer


def _parquet_rows(path: Path) -> Iterator[Any]:
    from datasets import load_dataset

    try:
        yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise DataError(
            f"{path.absolute()} cannot be read as parquet: {_one_line(error)}"
        ) from None


def _saved_rows(path: Path, split: str) -> Iterator[Any]:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(
                f"{path.absolute()} has no split {split!r}; it has {', '.join(map(str, dataset))}"
            )
        dataset = dataset[split]
    yield from dataset


def _hub_rows(source: Source) -> Iterator[Any]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision
        )
    except (
        Exception
    ) as error:  # offline, unknown id, no such split: every library layer has its own class
        problem = f"no hub dataset of that name could be loaded: {_one_line(error)}"
        raise DataError(f"{_absent(source)}, and {problem}") from None
    yield from dataset


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, int, Any]]:
    for number, row in enumerate(rows, 1):
        yield name, number, row


def _limit(rows: Iterator[Any], count: int) -> Iterator[Any]:
    return itertools.islice(rows, count) if count else rows


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _first_character(file: BinaryIO) -> bytes:
    head = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    file.seek(0)
    return head


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _absent(source: Source) -> str:
    return f"data file or folder {source.path} does not exist ({Path(source.path).expanduser().absolute()})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
