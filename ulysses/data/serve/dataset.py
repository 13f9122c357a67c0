"""Keep tokenised data on disk and read it through memory maps; it is written once and named by its content.

    index.json     kind, report                                  columns.npz    one number per example; _sequences:
    tokens.bin     int32, all sequences end to end                              tokens, shared tokens and rank of each
    weights.bin    float32, of every token; empty for kind text  rows.jsonl     the rows of prompts

Opening a dataset reads no token, and an example's arrays are views into the maps, so a rank reads only what it slices.
"""

import hashlib
import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import asdict
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ulysses.data import DataError
from ulysses.data.cache import build_once, check_once, digest_of_value, discard
from ulysses.data.read.chat import ChatTemplate, TextEncoder, tokenizer_digest
from ulysses.data.read.formats import Event, LocatedRow, Report, locate_rows, read_records
from ulysses.data.read.sources import Source, count_rows, in_batches, source_digest
from ulysses.data.serve.encode import (
    DataSettings,
    Example,
    cut_documents,
    encode_documents,
    encode_records,
)
from ulysses.data.serve.workers import in_order
from ulysses.disk import digest_of
from ulysses.parallel.batch import Sequence, common_prefix

FORMAT_VERSION = 7
DIGESTS = "digests.json"  # of the other files
BAR_AFTER_SECONDS = 2.0
CHARACTERS_AT_ONCE = 1 << 21  # of rows
GOLDEN_RATIO = (1 + 5**0.5) / 2


def open_dataset(
    sources: list[Source],
    kind: str,
    tokenizer: Any,
    settings: DataSettings,
    cache: str | Path,
    *,
    chat_template: str = "tokenizer",
    share_prompts: bool = False,
    workers: int | str = 1,
) -> "TokenizedDataset":
    """Open the tokenised sources; the first process to come tokenises them if `cache` does not hold them yet.

    Args:
        kind: text, sequence, pair, ranked, unpaired or prompt: what a stage needs.
        workers: processes that tokenise; "auto" is one for each core. What they write does not depend on it.

    Raises DataError: missing or broken data, named by file and row, in every process.
    """
    cache = Path(cache).expanduser()
    template = None if kind == "text" else ChatTemplate(tokenizer, chat_template)
    content = [
        FORMAT_VERSION,
        kind,
        asdict(settings),
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
            examples = encode_records(records, kind, template, settings, events)
            return pack_examples(kind, examples), events

        def encoded() -> Iterator[Any]:
            located = locate_rows(sources, report)
            bar = {"desc": "tokenising", "unit": " rows", "delay": BAR_AFTER_SECONDS}
            rows = part_of(tqdm(located, total=count_rows(sources), **bar), settings, report)
            batches = in_batches(rows, CHARACTERS_AT_ONCE)
            for found, events in in_order(encode, batches, workers):
                for event in events:
                    report.count(*event)
                yield found

        chunks = encoded()
        if template is None:
            examples = cut_documents(chain.from_iterable(chunks), encoder, settings.max_length)
            chunks = (pack_examples(kind, [example]) for example in examples)
        write_dataset(temporary, kind, chunks, report, [source.path for source in sources])

    damage = ""
    while True:
        if build_once(folder, build) and damage:
            print(f"the tokenised data were damaged ({damage}) and have been made again")
        try:
            check_once(folder / DIGESTS, cache)
            break
        except DataError as error:
            if damage:
                raise
            damage = str(error).partition(";")[0]
            discard(folder)
    weights = [source.weight for source in sources]
    return TokenizedDataset(folder, weights, settings.max_length, share_prompts)


def part_of(
    rows: Iterable[LocatedRow], settings: DataSettings, report: Report
) -> Iterator[LocatedRow]:
    """Yield the rows that are held out for evaluation, or the others; parts of a document stay together.

    Multiples of the golden ratio are spread evenly modulo 1: the same share is held out of any long run of rows, and of
    every second or third row.
    """
    for number, (where, parts) in enumerate(groupby(rows, key=itemgetter(1))):
        if (number * GOLDEN_RATIO % 1 < settings.eval_fraction) == settings.held_out:
            yield from parts
        else:
            report.count("notes", "in the other part of data.eval_fraction", where)


class Chunk(NamedTuple):
    """Examples as the files hold them, end to end, so that a process hands few objects to another.

    Attributes:
        counts: sequences of each example.
        sizes: tokens, shared tokens and rank of each sequence.
        tokens, weights: of all sequences, as the bytes of int32 and float32.
        columns: {name: one number per example}.
        prompts: a digest of each example's prompt, of unpaired answers and prompts.
        rows: each prompt's row as a line of JSON.
    """

    counts: list[int]
    sizes: list[int]
    tokens: bytearray
    weights: bytearray
    columns: dict[str, list[float]]
    prompts: list[bytes]
    rows: list[bytes]


def pack_examples(kind: str, examples: Iterable[Example]) -> Chunk:
    """Join what examples of one kind hold."""
    chunk = Chunk([], [], bytearray(), bytearray(), defaultdict(list), [], [])
    for example in examples:
        first = example.sequences[0]
        chunk.counts.append(len(example.sequences))
        for sequence in example.sequences:
            shared = 0 if sequence is first else common_prefix(first, sequence)
            chunk.sizes.extend((len(sequence.tokens), shared, sequence.columns.get("rank", 0)))
            chunk.tokens.extend(sequence.tokens.tobytes())
            if kind != "text":
                chunk.weights.extend(sequence.loss_weights.tobytes())
        for name, number in {**example.columns, "_source": example.source}.items():
            chunk.columns[name].append(number)
        if kind in ("unpaired", "prompt"):
            prompt = first.tokens[: int(example.columns["prompt_length"])]
            chunk.prompts.append(hashlib.sha256(prompt.tobytes()).digest())
        if kind == "prompt":
            row = json.dumps(example.row, ensure_ascii=False, default=str)
            chunk.rows.append(row.encode() + b"\n")
    return chunk


def write_dataset(
    folder: Path, kind: str, chunks: Iterable[Chunk], report: Report, sources: list[str]
) -> None:
    """Write chunks of examples into `folder` as they come; DataError if there are no examples."""
    counts, sizes = array("q"), array("q")
    columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
    prompts: dict[bytes, int] = {}
    with (
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "weights.bin").open("wb") as weights_file,
        (folder / "rows.jsonl").open("wb") as rows_file,
    ):
        for chunk in chunks:
            counts.extend(chunk.counts)
            sizes.extend(chunk.sizes)
            tokens_file.write(chunk.tokens)
            weights_file.write(chunk.weights)
            for name, numbers in chunk.columns.items():
                columns[name].extend(numbers)
            for digest in chunk.prompts:
                columns["prompt_id"].append(prompts.setdefault(digest, len(prompts)))
            for row in chunk.rows:
                columns["_row"].append(rows_file.tell())
                rows_file.write(row)
    if not counts:
        raise DataError(f"no example is left of {', '.join(sources)}: {report}")
    table = np.asarray(sizes).reshape(-1, 3).T
    report.kept, (report.tokens, report.shared, _) = len(counts), table.sum(1).tolist()
    exists = np.arange(max(counts)) < np.asarray(counts)[:, None]
    sequences = np.zeros((3, *exists.shape), np.int64)
    sequences[:, exists] = table
    np.savez(folder / "columns.npz", _sequences=sequences, **columns)
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
        mismatch_columns: {(index, other): columns} of mismatched sequences: those that can be asked for, or none.
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
        self.mismatch_columns: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.fingerprint = f"{self.folder.name} {share_prompts}"
        index = json.loads((self.folder / "index.json").read_text())
        self.kind: str = index["kind"]
        self.report = Report(**index["report"])
        self.source_weights = source_weights
        self.columns = dict(np.load(self.folder / "columns.npz"))
        whole, shared, ranks = self.columns.pop("_sequences")
        self.prefix_lengths: np.ndarray = shared * share_prompts
        self.sequence_lengths: np.ndarray = whole - self.prefix_lengths
        self.lengths: np.ndarray = self.sequence_lengths.sum(axis=1)
        self.sources: np.ndarray = self.columns.pop("_source")
        self._rows = self.columns.pop("_row", None)  # where each prompt's row begins
        tables = whole, self.sequence_lengths
        ends = (table.cumsum().reshape(table.shape) for table in tables)
        self._layout = np.stack([self.sequence_lengths, self.prefix_lengths, ranks, *ends])
        self._tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r")
        self._weights = np.broadcast_to(np.float32(1), len(self._tokens))
        if self.kind != "text":
            self._weights = np.memmap(self.folder / "weights.bin", np.float32, "r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Return example `index`; its arrays are views into the memory maps. IndexError ends an iteration."""
        index = range(len(self))[index]
        sequences = []
        for place, layout in enumerate(self._layout[:, index].T.tolist()):
            length, prefix, rank, end, row_end = layout
            if length:
                span, rows = slice(end - length, end), slice(row_end - length, row_end)
                arrays = self._tokens[span], self._weights[span]
                columns = {name: values[rows] for name, values in self.token_columns.items()}
                ranked = {"rank": rank} if self.kind == "ranked" else {}
                owner = place if prefix else 0
                sequences.append(Sequence(*arrays, columns, ranked, prefix, owner))
        numbers = {name: float(values[index]) for name, values in self.columns.items()}
        return Example(index, tuple(sequences), numbers)

    def with_column(
        self, name: str, values: np.ndarray, mismatched: dict[tuple[int, int], np.ndarray]
    ) -> "TokenizedDataset":
        """Return this dataset with one more column of its tokens and of its mismatched sequences."""
        extended = copy(self)
        extended.token_columns = {**self.token_columns, name: values}
        extended.mismatch_columns = {pair: {name: x} for pair, x in mismatched.items()}
        return extended

    def row(self, index: int) -> dict[str, Any]:
        """Return the row that a prompt came from; only prompts keep theirs."""
        with (self.folder / "rows.jsonl").open("rb") as file:
            file.seek(int(self._rows[index]))
            return json.loads(file.readline())

    def mismatch(self, index: int, other: int) -> Sequence:
        """Join the prompt of example `index` with the answer of `other` (KTO's baseline), cut at max_length."""
        (prompt,), (answer,) = self[index].sequences, self[other].sequences
        head, start = (int(self.columns["prompt_length"][i]) for i in (index, other))
        tokens = [prompt.tokens[:head], answer.tokens[start:]]
        weights = [prompt.loss_weights[:head], answer.loss_weights[start:]]
        joined = (np.concatenate(parts)[: self.max_length] for parts in (tokens, weights))
        found = self.mismatch_columns[index, other] if self.mismatch_columns else {}
        return Sequence(*joined, found)
