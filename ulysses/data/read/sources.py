"""Stream rows from where the data are, and count how many were read, kept and dropped, and why.

json, jsonl, csv and txt files (also as .gz) are read here, so that errors name the exact row. Parquet, saved folders
and the Hugging Face hub go through `datasets` (library.py). Only .json arrays are held in memory as a whole.
"""

import csv
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import partial
from io import TextIOWrapper
from itertools import groupby, islice
from operator import itemgetter
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ulysses.config.section import Values
from ulysses.data import BadRowError, DataError
from ulysses.data.cache import content_digest, digest_of_value
from ulysses.data.read.library import files_by_split, hub_commit, load_rows, written_rows
from ulysses.data.read.messages import unique_keys
from ulysses.environment import rank

PROMPT_KEYS = ("prompt", "question", "query")
ANSWER_KEYS = ("completion", "response", "answer", "output")
# For each format the keys of which a row has one; the formats are recognised in this order.
FORMATS = {
    "messages": ("messages", "conversations", "conversation"),
    "alpaca": ("instruction",),
    "preference": ("rejected",),
    "prompt_completion": PROMPT_KEYS + ANSWER_KEYS,
    "text": ("text", "content"),
}
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
NOT_UNPACKED = (".zst", ".bz2", ".xz", ".zip", ".lz4", ".7z")
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$|^[\w-]+$")
CHUNK_CHARACTERS = 1 << 16  # a text longer than twice this is tokenised in parts
MOST_UNCUT = 1 << 24  # characters without a place where they could be cut
SAFE_CUT = re.compile(r"\S\n(?=\S)|\w(?= \w)")  # no tokenizer joins what stands on both sides
ROUNDING = 1e-6  # of a sum of probabilities
# The fractional parts of its multiples are spread evenly, so that the same share is held out of any long run of rows,
# and also of every second row.
GOLDEN_RATIO = (1 + 5**0.5) / 2
EXAMPLES_PER_REASON = 5


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Source:
    """One entry of data.train or data.eval.

    Args:
        path: a file, a folder of files, a folder saved by `datasets`, or the id of a dataset on the hub.
        format: one of FORMATS, or "auto" to detect that of each row from its keys.
        weight: how often each example is taken in an epoch; 0.5 takes half of them, then the other half.
        columns: maps our key to the key that the file uses.
        split: the split that is read, of a hub dataset, of a folder saved by `datasets`, or of one whose files or
            folders are named by splits.
        subset: what `datasets` calls the configuration of a hub dataset.
        revision: the branch, tag or commit of a hub dataset.
        separator: the text between two documents of a .txt file; without it the file is one document.
        max_examples: use only this many of the first rows; 0 uses all.
        probability: the share of an epoch's examples that this source gives; all sources of a list have one, or none.
        system: the system prompt of conversations that have none.
        chat_template_kwargs: variables of the chat template for rows that do not set them.
        name: the held-out set that the source belongs to, which is in the names of that set's metrics.

    Raises pydantic's ValidationError, which parse_sources turns into a DataError.
    """

    path: str = Field(min_length=1)
    format: Literal["auto", *FORMATS, "sharegpt"] = "auto"  # type: ignore[valid-type]
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    columns: dict[str, str] = field(default_factory=dict)
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    separator: str | None = None
    max_examples: int = Field(0, ge=0, le=sys.maxsize)
    probability: float | None = Field(None, gt=0, le=1)
    system: str | None = None
    chat_template_kwargs: Values = field(default_factory=dict)
    name: str = Field("", pattern=r"^[\w.-]*$")

    @property
    def local_path(self) -> Path:
        """The file or folder, which does not exist if the path is the id of a dataset on the hub."""
        return Path(expanduser(self.path))

    @property
    def is_on_hub(self) -> bool:
        """True if the path is not a local file or folder but looks like the id of a dataset on the hub."""
        is_id = bool(HUB_ID.match(self.path)) and self.local_path.suffix not in (
            *SUFFIXES,
            ".gz",
        )
        return is_id and not self.local_path.exists()

    @property
    def is_saved(self) -> bool:
        """True for a folder saved by `datasets`."""
        names = ("state.json", "dataset_dict.json")
        return any((self.local_path / name).exists() for name in names)

    @property
    def is_dataset(self) -> bool:
        """True if `datasets` reads the source as a whole, and not file by file."""
        return self.is_on_hub or self.is_saved


def parse_sources(value: object) -> list[Source]:
    """Read a path, a table {path, format, weight, columns, split, ...}, or a list of both."""
    sources = []
    for item in value if isinstance(value, list | tuple) else [value]:
        table = item if isinstance(item, Mapping) else {"path": str(item)}
        try:
            sources.append(Source(**{key: v for key, v in table.items() if v is not None}))
        except ValidationError as error:
            first = error.errors()[0]
            keys = ", ".join(each.name for each in fields(Source))
            raise DataError(
                f"data source {table.get('path', table)}: {first['loc'][0]}: {first['msg']}; its keys are {keys}"
            ) from None
    shares = [source.probability or 0 for source in sources]
    is_mixture = (
        all(shares) and abs(sum(shares) - 1) < ROUNDING and {s.weight for s in sources} == {1}
    )
    if any(shares) and not is_mixture:
        raise DataError(
            f"data sources have the probabilities {shares}; give each of them one, with the sum 1 and no weight"
        )
    return sources


def pinned(source: Source) -> Source:
    """Return a dataset of the hub with the commit that its revision names now, so that a later commit is other data.

    Raises DataError: the hub does not answer or has no such dataset, and the hub's cache has no copy of it.
    """
    if not rank():
        print(f"asking the Hugging Face hub for the dataset {source.path}", flush=True)
    try:
        return replace(source, revision=hub_commit(source.path, source.revision))
    except Exception as error:
        raise _unreadable(source, source.local_path, 0, error) from None


def repeated_data(train: Iterable[Source], evaluation: Iterable[Source]) -> list[str]:
    """Return the files, and the splits of saved folders and hub datasets, that training and evaluation both read."""
    return sorted(_places(train) & _places(evaluation))


def _places(sources: Iterable[Source]) -> set[str]:
    places = set()
    for source in sources:
        if source.is_dataset:
            places.add(" ".join(filter(None, (source.path, source.subset, source.split))))
        else:
            places.update(str(file.resolve()) for file in source_files(source)[0])
    return places


def missing_sources(sources: Iterable[Source]) -> list[str]:
    """Return one sentence for every source whose file or folder does not exist; hub ids are not looked up."""
    return [
        _absent(source)
        for source in sources
        if not source.is_on_hub and not source.local_path.exists()
    ]


def source_files(source: Source) -> tuple[list[Path], list[Path]]:
    """Return the files of a source in reading order, and the files of its folder that are not read.

    Of a folder the files of the source's split are read. A hub dataset has no files here.

    Raises DataError if a local source has no file to read, or no such split.
    """
    path = source.local_path
    if source.is_on_hub:
        return [], []
    if not path.exists():
        raise DataError(_absent(source))
    # Links to folders are not followed; they are among the files that the report names as left out.
    listed = [p for p in (path, *path.rglob("[!.]*")) if p.is_file() or p.is_symlink()]
    if packed := [
        p for p in listed if p.suffix in NOT_UNPACKED and Path(p.stem).suffix in SUFFIXES
    ]:
        raise DataError(
            f"{min(packed).absolute()} is compressed in a way that is not read; unpack it, compress it as .gz, or "
            "move it away"
        )
    files = sorted(p for p in listed if source.is_saved or _suffix(p) in SUFFIXES)
    if not files:
        raise DataError(
            f"{path.absolute()} is none of {', '.join(SUFFIXES)} (or .gz of one), nor a folder of them; "
            "convert or rename it"
        )
    if absent := [p for p in files if not p.is_file()]:
        raise DataError(f"{absent[0].absolute()} is a link to no file; mend it or remove it")
    if not source.is_saved:
        splits = {"train": files} if path.is_file() else files_by_split(path, files)
        files = _split_of(source, splits)
    return files, sorted({*listed} - {*files})


def _split_of(source: Source, splits: Mapping[str, Any]) -> Any:
    """Return the split that the source names; DataError if there is none of that name."""
    if source.split not in splits:
        raise DataError(
            f"{source.local_path.absolute()} has no split {source.split!r}, only {', '.join(splits)}; set split to one "
            "of them, or name the files themselves"
        )
    return splits[source.split]


def source_digest(source: Source, cache: Path) -> str:
    """Hash what a source holds: the bytes of its files, or the id, subset, split and commit of a pinned hub dataset.

    The bytes are read as `content_digest` says.
    """
    files, _ = source_files(source)
    content = content_digest(files, cache) if files else source.path
    # what says only how often the examples are taken, and what they are called, decides nothing that is cached
    return digest_of_value(
        vars(source) | {"path": content, "weight": 1, "probability": None, "name": ""}
    )


def text_parts(blocks: Iterable[str], separator: str | None) -> Iterator[tuple[int, str]]:
    """Yield (document number, text) from blocks of text; a very long document comes in parts of the same number."""
    buffer, number = "", 1
    for block in blocks:
        buffer += block
        if separator:
            *complete, buffer = buffer.split(separator)
            for text in complete:
                if text.strip():
                    yield number, text
                number += 1
        *parts, buffer = safe_parts(buffer, len(buffer) - len(separator or ""))
        yield from ((number, part) for part in parts)
    if buffer.strip():
        yield number, buffer


def safe_parts(text: str, stop: int = sys.maxsize) -> Iterator[str]:
    """Cut a very long text into parts whose tokens are those of the text; nothing is cut from `stop` on."""
    start = 0
    while len(text) - start > 2 * CHUNK_CHARACTERS and (
        cut := SAFE_CUT.search(text, start + CHUNK_CHARACTERS, stop)
    ):
        yield text[start : cut.end()]
        start = cut.end()
    if len(text) - start > MOST_UNCUT:
        raise BadRowError(
            f"holds {len(text) - start:,} characters without a space or line break between them; that is no text"
        )
    yield text[start:]


def read_rows(source: Source) -> Iterator[tuple[str, object]]:
    """Yield each row with its file and its number, from 1; the parts of a long .txt document have the same number.

    A row of a jsonl file is the bytes of its line, and has the number of this line.

    Raises DataError: a file that does not exist or cannot be read.
    """
    is_dataset = source.is_dataset
    for file in [source.local_path] if is_dataset else source_files(source)[0]:
        read = _library_rows if is_dataset or _suffix(file) == ".parquet" else _file_rows
        number = 0
        try:
            for number, row in read(source, file):
                yield f"{source.path if is_dataset else file} row {number}", row
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(source, file, number, error) from None


def _unreadable(source: Source, file: Path, row: int, error: Exception) -> DataError:
    """Return the DataError for any error of reading, for every format and library has its own classes.

    Args:
        row: the number of the last row that could be read; 0 for none.
    """
    problem = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, csv.Error):
        problem += ": close every quotation mark, and write those inside of a text twice"
    if isinstance(error, KeyError):
        problem = f"there is no {problem} in it"
    if file.exists():
        after = f" after row {row}" if row else ""
        return DataError(f"{file.absolute()} cannot be read{after}: {problem}")
    return DataError(
        f"{_absent(source)}, and no hub dataset of that name could be loaded: {problem}"
    )


def _file_rows(source: Source, path: Path) -> Iterator[tuple[int, object]]:
    suffix = _suffix(path)
    delimiter = {".csv": ",", ".tsv": "\t"}.get(suffix)
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        # Bytes that are not UTF-8 become surrogates, for which formats.py refuses their row by its number.
        newline = "" if delimiter else None
        text = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline)
        if suffix == ".txt":
            blocks = iter(partial(text.read, CHUNK_CHARACTERS), "")
            for number, part in text_parts(blocks, source.separator):
                yield number, {"text": part}
        elif delimiter:
            csv.field_size_limit(sys.maxsize)
            rows = csv.DictReader(text, delimiter=delimiter, strict=True)
            names = rows.fieldnames or []
            if twice := [name for name in names if names.count(name) > 1]:
                raise DataError(
                    f"{path.absolute()} has two columns of the name {twice[0]!r}; rename one of them"
                )
            for number, row in enumerate(rows, 1):
                if None in row.values():
                    row = BadRowError(
                        "has fewer fields than the first line names columns; write texts with line breaks in quotation "
                        "marks, and a delimiter for each empty column"
                    )
                yield number, row
        elif suffix == ".json" and text.read(1024).lstrip().startswith("["):
            text.seek(0)
            yield from enumerate(json.load(text, object_pairs_hook=unique_keys), 1)
        else:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line


def _library_rows(source: Source, path: Path) -> Iterator[tuple[int, object]]:
    rows = load_rows(path, source.subset, source.split, source.revision)
    if source.is_saved:
        splits = rows
        if not isinstance(rows, dict):  # it may still say of which split it was
            splits = {"train": rows, str(rows.split or "train"): rows}
        rows = _split_of(source, splits)
    yield from written_rows(rows)


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _absent(source: Source) -> str:
    return f"data file or folder {source.path} does not exist ({source.local_path.absolute()})"


# ---------------------------------------------------------------- the rows of all sources


@dataclass
class Report:
    """Counts of what happened to the rows, with examples that name file and row; vars() of it is JSON data."""

    read: int = 0
    kept: int = 0
    tokens: int = 0
    shared: int = 0  # how many of the tokens are prompts that a further answer need not repeat
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count a row that is left out."""
        self.dropped[reason] += 1
        self._show(reason, [where])

    def note(self, what: str, where: str) -> None:
        """Count what the user should know of a row or a source."""
        self.notes[what] += 1
        self._show(what, [where])

    def add(self, later: "Report") -> None:
        """Add the rows that a later report dropped and noted."""
        self.dropped.update(later.dropped)
        self.notes.update(later.notes)
        for what, places in later.examples.items():
            self._show(what, places)

    def _show(self, what: str, places: list[str]) -> None:
        examples = self.examples.setdefault(what, [])
        examples += places[: EXAMPLES_PER_REASON - len(examples)]

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        lines = [f"read {self.read} rows, kept {self.kept} examples, dropped {dropped} rows"]
        if self.shared:
            lines.append(
                f"  {self.shared / self.tokens:.1%} of the tokens are prompts that another answer has"
            )
        for title, counts in (("dropped, ", self.dropped), ("", self.notes)):
            for reason, number in counts.most_common():
                examples = ", ".join(self.examples[reason])
                more = ", ..." if number > EXAMPLES_PER_REASON else ""
                lines.append(f"  {title}{reason}: {number} ({examples}{more})")
        return "\n".join(lines)


class RawRow(NamedTuple):
    """A row, or a part of a long document, before it is parsed.

    Attributes:
        source: the index of its source.
        where: its file and number.
        value: bytes of JSON, an object, or the error in its place.
        continues: whether it is a further part of the document that the row before it began.
    """

    source: int
    where: str
    value: object
    continues: bool = False


def locate_rows(
    sources: Sequence[Source], report: Report, share: float = 0.0, held_out: bool = False
) -> Iterator[RawRow]:
    """Stream the wanted rows of all sources in order, and count all rows in a new report.

    A file that cannot be read comes as a DataError in the place of its next row.

    Args:
        share: the share of the rows that is held out for evaluation.
        held_out: whether the held-out rows are wanted, or the others.
    """
    for index, source in enumerate(sources):
        where = source.path
        try:
            documents = groupby(read_rows(source), key=itemgetter(0))
            for where, parts in islice(documents, source.max_examples or None):
                is_held_out = report.read * GOLDEN_RATIO % 1 < share
                report.read += 1
                if is_held_out == held_out:
                    for place, (_, row) in enumerate(parts):
                        yield RawRow(index, where, row, place > 0)
                else:
                    report.note("in the other part of data.eval_fraction", where)
        except DataError as error:
            yield RawRow(index, where, error)


def note_sources(sources: Iterable[Source], report: Report) -> None:
    """Note in `report` the commits and the files left out, which are not kept with cached tokens."""
    for source in sources:
        if source.is_on_hub:
            report.note(f"data of the hub's commit {source.revision}", source.path)
        for file in source_files(source)[1]:
            report.note(f"files left out, not data of split {source.split}", str(file))
