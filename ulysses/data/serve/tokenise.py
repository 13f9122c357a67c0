"""Tokenise the rows of sources into a folder that is named by all that decides its content, once per machine.

rows  --batches, in several processes (workers.py)-->  columns of examples (encode.py)  -->  one file for each column

    index.json        kind, report                       _sizes.int64   tokens, shared tokens and rank of each sequence
    tokens.int32      of all sequences, end to end       _counts.int64  the sequences of each example
    weights.float32   of every token; none of documents  NAME.TYPE      a number of each example (_rows: prompts' JSON)
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.cache import build_once, check_once, digest_of_value, discard, known_files
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.counts import Report, note_sources
from ulysses.data.read.formats import LocatedRow, locate_rows
from ulysses.data.read.sources import (
    Source,
    count_rows,
    in_batches,
    pinned,
    source_digest,
    source_files,
)
from ulysses.data.read.tokenizer import TextEncoder, tokenizer_digest
from ulysses.data.serve.dataset import DIGESTS, TokenizedDataset
from ulysses.data.serve.encode import Columns, RowEncoder, cut_documents
from ulysses.data.serve.workers import in_order
from ulysses.disk import digest_of
from ulysses.progress import progress

FORMAT_VERSION = 10
BAR_AFTER_SECONDS = 2.0
CHARACTERS_AT_ONCE = 1 << 21  # of rows
# of the [data] table, what decides tokens besides sources, tokenizer and template
DECIDING = ("max_length", "truncation", "train_on", "bad_rows", "turns", "eval_fraction")
GOLDEN_RATIO = (1 + 5**0.5) / 2


def open_dataset(
    sources: list[Source],
    kind: str,
    tokenizer: Any,
    settings: DataSection,
    *,
    held_out: bool = False,
    share_prompts: bool = False,
) -> TokenizedDataset:
    """Open the tokenised sources; the first process to come tokenises them if data.cache does not hold them yet.

    Args:
        kind: text, sequence, pair, ranked, unpaired or prompt: what a stage needs.
        settings: the [data] table, whose own sources are not read here.
        held_out: take the share of the rows that is held out for evaluation, and not the others.
        share_prompts: let the examples say which sequences begin with the same prompt.

    Raises DataError: missing or broken data, named by file and row, in every process.
    """
    sources = [pinned(source) for source in sources]
    template = None if kind == "text" else ChatTemplate(tokenizer, settings.chat_template)
    encoder = template.encoder if template else TextEncoder(tokenizer)
    job = Tokenising(RowEncoder(sources, kind, settings, encoder, template), held_out)
    cache = job.cache
    content = [
        FORMAT_VERSION,
        kind,
        {name: getattr(settings, name) for name in DECIDING} | {"held_out": held_out},
        [source_digest(source, cache) for source in sources],
        tokenizer_digest(tokenizer),
        template.text if template else None,
    ]
    folder = cache / "tokenized" / digest_of_value(content)[:32]
    build_once(folder, job.build)
    try:
        check_once(folder / DIGESTS, cache)
    except DataError as error:
        discard(folder)
        if build_once(folder, job.build):
            damage = str(error).partition(";")[0]
            print(f"the tokenised data were damaged ({damage}) and have been made again")
        check_once(folder / DIGESTS, cache)
    weights = [source.weight for source in sources]
    dataset = TokenizedDataset(folder, weights, settings.max_length, share_prompts)
    note_sources(sources, dataset.report)
    return dataset


@dataclass
class Tokenising:
    """The work that makes a folder of tokens out of rows; its files must stay as they are when it is created."""

    rows: RowEncoder
    held_out: bool

    def __post_init__(self) -> None:
        self.sources, self.settings = self.rows.sources, self.rows.settings
        self.cache = Path(self.settings.cache)
        self._state = self._files()

    def _files(self) -> Path:
        """Return what stands for the sizes and times of the files, and changes with them."""
        local = (source_files(source)[0] for source in self.sources if not source.is_on_hub)
        return known_files(chain.from_iterable(local), self.cache)

    def build(self, folder: Path) -> None:
        """Write all examples into `folder`; DataError if there are none, or if a file changes meanwhile."""
        report = Report()
        names = ", ".join(source.path for source in self.sources)
        chunks = self._encoded(report)
        if self.rows.template is None:
            parts = chain.from_iterable(chunks)
            chunks = cut_documents(parts, self.rows.encoder, self.settings.max_length)
        _write_columns(folder, chunks, report)
        if not report.kept:
            raise DataError(f"no example is left of {names}: {report}")
        sizes = np.fromfile(folder / "_sizes.int64", np.int64).reshape(-1, 3)
        report.tokens, report.shared, _ = sizes.sum(0).tolist()
        index = {"kind": self.rows.kind, "report": vars(report)}
        (folder / "index.json").write_text(json.dumps(index, indent=1))
        digests = {path.name: digest_of(path) for path in folder.iterdir()}
        (folder / DIGESTS).write_text(json.dumps(digests, indent=1))
        if self._files() != self._state:
            raise DataError(
                f"{names} changed while it was read; start again when nothing writes there any more"
            )

    def _encoded(self, report: Report) -> Iterator[Any]:
        """Yield what batches of rows become, in the order of the rows, and count in `report` what happens to these."""
        bar = {"desc": "tokenising", "unit": "rows", "delay": BAR_AFTER_SECONDS}
        rows: Iterable[LocatedRow] = locate_rows(self.sources, report)
        rows = progress(rows, total=count_rows(self.sources), **bar)
        rows = part_of(rows, self.settings.eval_fraction, self.held_out, report)
        batches = in_batches(rows, CHARACTERS_AT_ONCE)
        for found, events in in_order(self.rows.encode, batches, self.settings.workers):
            for event in events:
                report.count(*event)
            yield found


def part_of(
    rows: Iterable[LocatedRow], share: float, held_out: bool, report: Report
) -> Iterator[LocatedRow]:
    """Yield the rows that are held out for evaluation, or the others; parts of a document stay together.

    Multiples of the golden ratio are spread evenly modulo 1: the same share is held out of any long run of rows, and of
    every second or third row.
    """
    for number, (where, parts) in enumerate(groupby(rows, key=itemgetter(1))):
        if (number * GOLDEN_RATIO % 1 < share) == held_out:
            yield from parts
        else:
            report.count("notes", "in the other part of data.eval_fraction", where)


def _write_columns(folder: Path, chunks: Iterable[Columns], report: Report) -> None:
    """Write chunks of examples as they come, a file for each column, and count the examples."""
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for chunk in chunks:
            for name, values in chunk.items():
                array = np.asarray(values)
                if name not in files:
                    file = folder / f"{name}.{array.dtype}"
                    files[name] = stack.enter_context(file.open("wb"))
                files[name].write(array)
            report.kept += len(chunk.get("_counts", ()))
