"""Tokenised data on disk, memory-mapped: written once per node, keyed by content, read lazily.

    index.json     kind, counts, report, fingerprint             starts.npy, lengths.npy  [examples, sequences each]
    tokens.bin     int32, all sequences end to end               columns.npz              one number per example
    weights.bin    uint8 codes into index.json "weights"         raw.bin, raw.npy         JSON rows (prompts only)
                   (absent when every weight is 1)

Opening reads no token; an example's arrays are views into the maps, so a rank touches only what it slices.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ulysses.data.cache import build_once
from ulysses.data.chat import ChatTemplate, TextEncoder, tokenizer_digest
from ulysses.data.encode import DataSettings, EncodedExample, encode_documents, encode_records
from ulysses.data.records import KINDS, DataError, Report
from ulysses.data.sources import Source, read_records, source_digest
from ulysses.parallel.batch import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 2
SEQUENCES = {"text": 1, "sequence": 1, "pair": 2, "unpaired": 1, "prompt": 1}


@dataclass(frozen=True)
class Example:
    """One training example: its sequences (pair: chosen, rejected) and its numbers.

    columns: pair: margin, prompt_length; unpaired: label (1 or 0), prompt_length, prompt_id; prompt: prompt_length,
    prompt_id. prompt_id is equal for equal prompts.
    """

    index: int
    sequences: tuple[Sequence, ...]
    columns: dict[str, float] = field(default_factory=dict)


def open_dataset(
    sources: list[Source],
    kind: str,
    tokenizer: "PreTrainedTokenizerFast",
    settings: DataSettings,
    cache: str | Path,
    *,
    chat_template: str = "tokenizer",
    writer: bool | None = None,
) -> "TokenizedDataset":
    """Open the tokenised sources, tokenising them first if the cache does not hold them.

    Every process calls it; LOCAL_RANK 0 (or `writer`) writes and the others on its node watch a file.

    Raises DataError: missing or broken data, named by file and row, in every process.
    """
    if kind not in KINDS:
        raise DataError(f"data kind {kind!r} is unknown; it is one of {', '.join(KINDS)}")
    if not sources:
        raise DataError(
            "no data: set data.train to a file, a folder, a hub dataset or a list of them"
        )
    template = None if kind == "text" else ChatTemplate(tokenizer, chat_template)
    key = {
        "version": FORMAT_VERSION, "kind": kind, "settings": asdict(settings),
        "sources": [source_digest(source) for source in sources],
        "tokenizer": tokenizer_digest(tokenizer), "template": template.text if template else None,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(cache).expanduser() / "tokenized" / name

    def build(temporary: Path) -> None:
        report = Report()
        records = read_records(sources, kind, report, bad_rows=settings.bad_rows)
        if template is None:
            examples = encode_documents(records, TextEncoder(tokenizer), settings, report)
        else:
            examples = encode_records(records, kind, template, settings, report)
        write_dataset(temporary, kind, examples, report, [s.path for s in sources])

    build_once(folder, build, writer=writer)
    return TokenizedDataset(folder, [source.weight for source in sources])


def write_dataset(
    folder: Path, kind: str, examples: Iterable[EncodedExample], report: Report, names: list[str]
) -> None:
    """Write examples as they come into `folder`; DataError if there are none."""
    starts, lengths, sources, raw_ends = array("q"), array("q"), array("l"), array("q", [0])
    columns: dict[str, array[float]] = {}
    codes: dict[float, int] = {0.0: 0, 1.0: 1}
    prompts: dict[bytes, int] = {}
    seen: set[bytes] = set()
    fingerprint = hashlib.sha256(kind.encode())
    at = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "weights.bin").open("wb") as weights_file,
        (folder / "raw.bin").open("wb") as raw_file,
    ):
        for example in examples:
            for tokens, weights in zip(example.tokens, example.weights):
                tokens_file.write(tokens.tobytes())
                coded = _codes(weights, codes)
                if kind != "text":
                    weights_file.write(coded.tobytes())
                for data in (
                    len(tokens).to_bytes(8, "little"),
                    tokens.tobytes(),
                    weights.tobytes(),
                ):
                    fingerprint.update(data)
                starts.append(at)
                lengths.append(len(tokens))
                at += len(tokens)
            sources.append(example.source)
            numbers = dict(example.columns)
            if kind in ("unpaired", "prompt"):
                head = example.tokens[0][: int(numbers["prompt_length"])].tobytes()
                numbers["prompt_id"] = prompts.setdefault(
                    hashlib.sha256(head).digest(), len(prompts)
                )
            for name, value in numbers.items():
                columns.setdefault(name, array("d")).append(value)
            if kind == "prompt":
                raw_file.write(json.dumps(example.raw, ensure_ascii=False, default=str).encode())
                raw_ends.append(raw_file.tell())
            if kind != "text":
                digest = hashlib.sha256(b"|".join(t.tobytes() for t in example.tokens)).digest()[
                    :12
                ]
                report.duplicates += digest in seen
                seen.add(digest)
    if not sources:
        raise DataError(f"no example is left of {', '.join(names)}: {report}")
    np.save(folder / "starts.npy", np.asarray(starts, np.int64).reshape(-1, SEQUENCES[kind]))
    np.save(folder / "lengths.npy", np.asarray(lengths, np.int64).reshape(-1, SEQUENCES[kind]))
    numbers_of: dict[str, Any] = {name: np.asarray(values) for name, values in columns.items()}
    np.savez(folder / "columns.npz", **numbers_of, _source=np.asarray(sources, np.int32))
    np.save(folder / "raw.npy", np.asarray(raw_ends, np.int64))
    index = {
        "version": FORMAT_VERSION, "kind": kind, "tokens": at, "fingerprint": fingerprint.hexdigest(), "sources": names,
        "weights": list(codes), "report": vars(report),
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _codes(weights: np.ndarray, codes: dict[float, int]) -> np.ndarray:
    """Weights as numbers of entries of `codes`, which grows."""
    values, inverse = np.unique(weights, return_inverse=True)
    numbers = [codes.setdefault(float(value), len(codes)) for value in values]
    if len(codes) > 256:
        raise DataError("the data uses more than 256 different loss weights; round them")
    return np.asarray(numbers, np.uint8)[inverse]


class TokenizedDataset:
    """Tokenised examples in a folder written by write_dataset.

    Attributes:
        kind: text, sequence, pair, unpaired or prompt.
        sequence_lengths: [examples, sequences each] int64 tokens; `lengths` [examples] are their sums.
        columns: {name: [examples]}; sources: [examples] which source an example came from.
        source_weights: how often a source's examples are taken per epoch.
        fingerprint: hash of all tokens and weights; report: what happened to the rows.
    """

    def __init__(self, folder: str | Path, source_weights: list[float] | None = None) -> None:
        self.folder = Path(folder)
        index = json.loads((self.folder / "index.json").read_text())
        self.kind: str = index["kind"]
        self.fingerprint: str = index["fingerprint"]
        self.report = Report(**index["report"])
        self.source_weights = source_weights or [1.0] * len(index["sources"])
        self.sequence_lengths: np.ndarray = np.load(self.folder / "lengths.npy", mmap_mode="r")
        self.lengths: np.ndarray = self.sequence_lengths.sum(axis=1)
        self._starts = np.load(self.folder / "starts.npy", mmap_mode="r")
        with np.load(self.folder / "columns.npz") as columns:
            self.columns = {name: columns[name] for name in columns.files if name != "_source"}
            self.sources: np.ndarray = columns["_source"]
        self._tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r")
        self._codes = (
            None if self.kind == "text" else np.memmap(self.folder / "weights.bin", np.uint8, "r")
        )
        self._weight_values = np.asarray(index["weights"], np.float32)
        self._raw_ends = np.load(self.folder / "raw.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Return example `index`; its arrays are views into the memory maps."""
        index = range(len(self))[index]
        sequences = tuple(self._sequence(index, j) for j in range(self.sequence_lengths.shape[1]))
        return Example(
            index, sequences, {name: float(values[index]) for name, values in self.columns.items()}
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def row(self, index: int) -> dict[str, Any]:
        """Return the raw row a prompt came from."""
        if self.kind != "prompt":
            raise ValueError(
                f"only prompts keep their rows; this dataset holds {self.kind} examples"
            )
        with (self.folder / "raw.bin").open("rb") as file:
            start, stop = int(self._raw_ends[index]), int(self._raw_ends[index + 1])
            file.seek(start)
            return json.loads(file.read(stop - start))

    def mismatch(self, index: int, other: int, max_length: int) -> Sequence:
        """Join the prompt of example `index` with the completion of `other` (KTO's baseline), cut at max_length."""
        first, second = self._sequence(index, 0), self._sequence(other, 0)
        head, start = (
            int(self.columns["prompt_length"][index]),
            int(self.columns["prompt_length"][other]),
        )
        tokens = np.concatenate([first.tokens[:head], second.tokens[start:]])[:max_length]
        weights = np.concatenate([np.zeros(head, np.float32), second.loss_weights[start:]])[
            :max_length
        ]
        return Sequence(tokens, weights)

    def _sequence(self, index: int, j: int) -> Sequence:
        start, length = int(self._starts[index, j]), int(self.sequence_lengths[index, j])
        tokens = self._tokens[start : start + length]
        if self._codes is None:
            return Sequence(tokens, np.broadcast_to(np.uint8(1), length))
        codes = self._codes[start : start + length]
        return Sequence(
            tokens, codes if len(self._weight_values) == 2 else self._weight_values[codes]
        )
