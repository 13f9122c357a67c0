"""Keep tokenised data on disk and read it through memory maps; it is written once and named by its content.

    index.json        kind, report                       _sizes.int64   tokens, shared tokens and rank of each sequence
    tokens.int32      of all sequences, end to end       _counts.int64  the sequences of each example
    weights.float32   of every token; none of documents  NAME.TYPE      a number of each example (_rows: prompts' JSON)

Opening a dataset reads no token, and an example's arrays are views into the maps, so a rank reads only what it slices.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from copy import copy
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ulysses.config.schema import DataSection
from ulysses.data import DataError
from ulysses.data.cache import build_once, check_once, digest_of_value, discard, known_files
from ulysses.data.read.chat import ChatTemplate, TextEncoder, tokenizer_digest
from ulysses.data.read.counts import Event, Report, note_sources
from ulysses.data.read.formats import LocatedRow, locate_rows, read_records
from ulysses.data.read.sources import (
    Source,
    count_rows,
    in_batches,
    pinned,
    source_digest,
    source_files,
)
from ulysses.data.serve.encode import (
    Columns,
    Example,
    cut_documents,
    encode_documents,
    encode_records,
)
from ulysses.data.serve.workers import in_order
from ulysses.disk import digest_of
from ulysses.parallel.batch import Sequence
from ulysses.progress import progress

FORMAT_VERSION = 10
DIGESTS = "digests.json"  # of the other files
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
) -> "TokenizedDataset":
    """Open the tokenised sources; the first process to come tokenises them if data.cache does not hold them yet.

    Args:
        kind: text, sequence, pair, ranked, unpaired or prompt: what a stage needs.
        settings: the [data] table, whose own sources are not read here.
        held_out: take the share of the rows that is held out for evaluation, and not the others.

    Raises DataError: missing or broken data, named by file and row, in every process.
    """
    cache = Path(settings.cache)
    sources = [pinned(source) for source in sources]
    template = None if kind == "text" else ChatTemplate(tokenizer, settings.chat_template)

    def state() -> Path:
        local = (source_files(source)[0] for source in sources if not source.is_on_hub)
        return known_files(chain.from_iterable(local), cache)

    before = state()
    content = [
        FORMAT_VERSION,
        kind,
        {name: getattr(settings, name) for name in DECIDING} | {"held_out": held_out},
        [source_digest(source, cache) for source in sources],
        tokenizer_digest(tokenizer),
        template.text if template else None,
    ]
    folder = cache / "tokenized" / digest_of_value(content)[:32]

    def build(temporary: Path) -> None:
        report = Report()
        encoder = template.encoder if template else TextEncoder(tokenizer)

        def encode(batch: list[LocatedRow]) -> tuple[list[Any], list[Event]]:
            events: list[Event] = []
            records = read_records(batch, sources, kind, events, bad_rows=settings.bad_rows)
            if template is None:
                return encode_documents(records, encoder), events
            return joined(encode_records(records, kind, template, settings, events)), events

        def encoded() -> Iterator[Any]:
            located = locate_rows(sources, report)
            bar = {"desc": "tokenising", "unit": "rows", "delay": BAR_AFTER_SECONDS}
            rows = progress(located, total=count_rows(sources), **bar)
            rows = part_of(rows, settings.eval_fraction, held_out, report)
            batches = in_batches(rows, CHARACTERS_AT_ONCE)
            for found, events in in_order(encode, batches, settings.workers):
                for event in events:
                    report.count(*event)
                yield found

        chunks = encoded()
        if template is None:
            chunks = cut_documents(chain.from_iterable(chunks), encoder, settings.max_length)
        write_dataset(temporary, kind, chunks, report, [source.path for source in sources])
        if state() != before:
            raise DataError(
                f"{', '.join(source.path for source in sources)} changed while it was read; start again when nothing "
                "writes there any more"
            )

    build_once(folder, build)
    try:
        check_once(folder / DIGESTS, cache)
    except DataError as error:
        discard(folder)
        if build_once(folder, build):
            damage = str(error).partition(";")[0]
            print(f"the tokenised data were damaged ({damage}) and have been made again")
        check_once(folder / DIGESTS, cache)
    weights = [source.weight for source in sources]
    dataset = TokenizedDataset(folder, weights, settings.max_length, share_prompts)
    note_sources(sources, dataset.report)
    return dataset


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


def joined(examples: Iterable[Columns]) -> Columns:
    """Lay the columns of examples end to end, so that a process hands few objects to another."""
    found: dict[str, list[Any]] = defaultdict(list)
    for example in examples:
        for name, value in example.items():
            found[name].append(value)
    return {name: np.hstack(values) for name, values in found.items()}


def write_dataset(
    folder: Path,
    kind: str,
    chunks: Iterable[Columns],
    report: Report,
    sources: list[str],
) -> None:
    """Write chunks of examples into `folder` as they come; DataError if there are no examples."""
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
    if not report.kept:
        raise DataError(f"no example is left of {', '.join(sources)}: {report}")
    sizes = np.fromfile(folder / "_sizes.int64", np.int64).reshape(-1, 3)
    report.tokens, report.shared, _ = sizes.sum(0).tolist()
    index = json.dumps({"kind": kind, "report": vars(report)}, indent=1)
    (folder / "index.json").write_text(index)
    digests = {path.name: digest_of(path) for path in folder.iterdir()}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1))


class TokenizedDataset:
    """Tokenised examples in a folder written by write_dataset.

    Attributes:
        kind: text, sequence, pair, ranked, unpaired or prompt.
        fingerprint: the folder's name, a digest of sources, settings, tokenizer and template; equal on all ranks.
        report: what happened to the rows.
        sequence_lengths: tokens [examples, sequences each], int64, 0 for none; `lengths` [examples] are their sums.
        prefix_lengths: in the same form, the tokens that sequences leave out because the example's first one has them.
        columns: {name: [examples]}; sources: [examples], the index of each example's source.
        source_weights: how often the examples of each source are taken per epoch.
        max_length: where a mismatched sequence is cut.
        token_columns: {name: [tokens of all examples, end to end]}: further columns of the sequences.
        mismatched: {name: {(index, other): column}}: the same columns of the mismatched sequences that are asked for.
    """

    def __init__(
        self,
        folder: str | Path,
        source_weights: Iterable[float] = (1.0,),
        max_length: int | None = None,
        share_prompts: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.max_length = max_length
        self.token_columns: dict[str, np.ndarray] = {}
        self.mismatched: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        self.fingerprint = f"{self.folder.name} {share_prompts}"
        index = json.loads((self.folder / "index.json").read_text())
        self.kind: str = index["kind"]
        self.report = Report(**index["report"])
        self.source_weights = source_weights
        arrays: dict[str, np.ndarray] = {
            path.stem: np.memmap(path, path.suffix[1:], "r")
            for path in self.folder.iterdir()
            if path.suffix != ".json"
        }
        self._tokens = arrays.pop("tokens")
        ones = np.broadcast_to(np.float32(1), len(self._tokens))
        self._weights = arrays.pop("weights", ones)
        counts = arrays["_counts"]
        whole, shared, ranks = arrays["_sizes"].reshape(-1, 3).T
        prefixes = shared * share_prompts
        own = whole - prefixes
        self._layout = np.stack([own, prefixes, ranks, whole.cumsum(), own.cumsum()], axis=1)
        self._firsts = counts.cumsum() - counts
        exists = np.arange(counts.max()) < counts[:, None]
        self.sequence_lengths, self.prefix_lengths = np.zeros((2, *exists.shape), np.int64)
        self.sequence_lengths[exists], self.prefix_lengths[exists] = own, prefixes
        self.lengths: np.ndarray = self.sequence_lengths.sum(axis=1)
        self.sources: np.ndarray = arrays["_source"]
        self.columns = {name: array for name, array in arrays.items() if name[0] != "_"}
        if "_prompt" in arrays:  # digests become numbers in the order of the examples
            _, first, ids = np.unique(arrays["_prompt"], return_index=True, return_inverse=True)
            self.columns["prompt_id"] = first.argsort().argsort()[ids]
        if self.kind == "prompt":
            self._rows = arrays["_rows"], arrays["_row_size"].cumsum()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Return example `index`; its arrays are views into the memory maps. IndexError ends an iteration."""
        index = range(len(self))[index]
        sequences = []
        first = self._firsts[index]
        count = np.count_nonzero(self.sequence_lengths[index])
        for place, layout in enumerate(self._layout[first : first + count].tolist()):
            length, prefix, rank, end, row_end = layout
            span, rows = slice(end - length, end), slice(row_end - length, row_end)
            arrays = self._tokens[span], self._weights[span]
            columns = {name: values[rows] for name, values in self.token_columns.items()}
            ranked = {"rank": rank} if self.kind == "ranked" else {}
            sequences.append(Sequence(*arrays, columns, ranked, prefix, place if prefix else 0))
        numbers = {name: float(values[index]) for name, values in self.columns.items()}
        return Example(index, tuple(sequences), numbers)

    def with_column(
        self, name: str, values: np.ndarray, mismatched: dict[tuple[int, int], np.ndarray]
    ) -> "TokenizedDataset":
        """Return this dataset with one more column of its tokens and of its mismatched sequences."""
        extended = copy(self)
        extended.token_columns = {**self.token_columns, name: values}
        extended.mismatched = {**self.mismatched, name: mismatched}
        return extended

    def row(self, index: int) -> dict[str, Any]:
        """Return the row that a prompt came from; only prompts keep theirs."""
        rows, ends = self._rows
        return json.loads(bytes(rows[ends[index - 1] if index else 0 : ends[index]]))

    def mismatch(self, index: int, other: int) -> Sequence:
        """Join the prompt of example `index` with the answer of `other` (KTO's baseline), cut at max_length."""
        (prompt,), (answer,) = self[index].sequences, self[other].sequences
        head, start = (int(self.columns["prompt_length"][i]) for i in (index, other))
        tokens = [prompt.tokens[:head], answer.tokens[start:]]
        weights = [prompt.loss_weights[:head], answer.loss_weights[start:]]
        joined = (np.concatenate(parts)[: self.max_length] for parts in (tokens, weights))
        columns = {name: found[index, other] for name, found in self.mismatched.items()}
        return Sequence(*joined, columns)
