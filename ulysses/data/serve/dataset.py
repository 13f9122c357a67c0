"""Read tokenised data through memory maps: opening a dataset reads no token, and a rank reads only what it slices."""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from ulysses.config.section import visible
from ulysses.data import DataError
from ulysses.data.read.messages import Row
from ulysses.data.read.sources import Report, Source
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.parallel.batch import Sequence, shared_prompts

DIGESTS = "digests.json"  # of the other files


@dataclass(frozen=True)
class Example:
    """One training example: its sequences (pair: chosen, rejected; separate turns: the last one first) and its numbers.

    columns: prompt_length, but not of a sequence; margin (ranked, whose sequences have the column rank); label, 1 or 0
    (unpaired); prompt_id (unpaired, prompt), the same for equal prompts. index: its place in the dataset.
    """

    index: int
    sequences: tuple[Sequence, ...]
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def emptied(self) -> "Example":
        """The same without tokens, which stands for the columns of a micro-batch without examples."""
        return replace(self, sequences=tuple(sequence.emptied for sequence in self.sequences))


class TokenizedDataset:
    """Tokenised examples in a folder that `Tokenising` wrote (tokenise.py).

    Attributes:
        kind: text, sequence, pair, ranked, unpaired or prompt.
        fingerprint: the folder's name, a digest of sources, settings, tokenizer and template; equal on all ranks.
        report: what happened to the rows.
        sequence_lengths: tokens [examples, sequences each], int64, 0 for none; `lengths` [examples] are their sums.
        prefix_lengths: in the same form, the tokens of a sequence, not counted there, that the example's first one has.
        share_prompts: whether examples say so, so that packs hold them once.
        columns: {name: [examples]}; sources: [examples], the index of each example's source.
        source_weights: how often the examples of each source are taken per epoch.
        source_paths: their paths.
        source_names: the held-out sets that the sources belong to; "" for none.
        max_length: where a mismatched sequence is cut.
        token_columns: {name: [tokens of all examples as `lengths` count them, end to end]}: further columns.
    """

    def __init__(
        self,
        folder: str | Path,
        sources: list[Source] | None = None,
        stopping_strategy: str = "first_exhausted",
        *,
        max_length: int | None = None,
        share_prompts: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.max_length = max_length
        self.share_prompts = share_prompts
        self.token_columns: dict[str, np.ndarray] = {}
        self.fingerprint = f"{self.folder.name} {share_prompts}"
        index = json.loads((self.folder / "index.json").read_text())
        self.kind: str = index["kind"]
        self.report = Report(**index["report"])
        arrays: dict[str, np.ndarray] = {
            path.stem: np.memmap(path, path.suffix[1:], "r")
            for path in self.folder.iterdir()
            if path.suffix != ".json"
        }
        self._tokens = arrays.pop("tokens")
        ones = np.broadcast_to(np.float32(1), len(self._tokens))
        self._weights = arrays.pop("weights", ones)
        counts = arrays["_counts"]
        self._firsts = counts.cumsum() - counts
        self._sizes = arrays["_sizes"].reshape(-1, 3) * [1, share_prompts, 1]
        whole, prefixes, _ = self._sizes.T
        # where the tokens of each sequence begin, and its values in token_columns
        kept = np.stack([whole, whole - prefixes], axis=1)
        self._starts = kept.cumsum(axis=0) - kept
        exists = np.arange(counts.max()) < counts[:, None]
        self.sequence_lengths, self.prefix_lengths = np.zeros((2, *exists.shape), np.int64)
        self.sequence_lengths[exists], self.prefix_lengths[exists] = kept[:, 1], prefixes
        self.lengths: np.ndarray = self.sequence_lengths.sum(axis=1)
        self.sources: np.ndarray = arrays["_source"]
        sources = sources or [Source(str(folder))]
        self.source_paths = [source.path for source in sources]
        self.source_names = [source.name for source in sources]
        examples = np.bincount(self.sources, minlength=len(sources)).tolist()
        for source, count in zip(sources, examples):
            if not count and (source.probability or source.name):
                why = str(self.report).replace("\n ", ";")
                raise DataError(
                    f"no example is left of {source.path}, which has a probability or a name; remove it, or mend its "
                    f"rows ({why})"
                )
            if not count:
                self.report.count("notes", "sources of which no example is left", source.path)
        self.source_weights = source_weights(sources, examples, stopping_strategy)
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
        numbers = {name: float(values[index]) for name, values in self.columns.items()}
        prompt = int(numbers.get("prompt_id", index)) if self.share_prompts else None
        first = self._firsts[index]
        places = slice(first, first + np.count_nonzero(self.sequence_lengths[index]))
        # of the values of the first sequence, which others share
        begin = self._starts[first, 1]
        sequences: list[Sequence] = []
        for (start, row), (whole, prefix, rank) in zip(
            self._starts[places].tolist(), self._sizes[places].tolist()
        ):
            columns = {}
            for name, values in self.token_columns.items():
                columns[name] = values[row : row + whole - prefix]
                if prefix:
                    columns[name] = np.append(values[begin : begin + prefix], columns[name])
            ranked = {"rank": rank} if self.kind == "ranked" else {}
            arrays = (values[start : start + whole] for values in (self._tokens, self._weights))
            # of separate turns each has another part of its conversation in common with the first one
            head = int(numbers.get("prompt_length", prefix + 1 if sequences else whole))
            sequences.append(Sequence(*arrays, columns, ranked, prompt, head))
        return Example(index, tuple(sequences), numbers)

    @property
    def apart(self) -> "TokenizedDataset":
        """The same data whose sequences share no prompt: each one has its own in a pack."""
        whole = copy(self)
        whole.sequence_lengths = self.sequence_lengths + self.prefix_lengths
        whole.prefix_lengths = np.zeros_like(self.prefix_lengths)
        whole.lengths = whole.sequence_lengths.sum(axis=1)
        whole.share_prompts = False
        return whole

    def with_column(self, name: str, values: np.ndarray) -> "TokenizedDataset":
        """Return this dataset with one more column of its tokens."""
        extended = copy(self)
        extended.token_columns = {**self.token_columns, name: values}
        return extended

    def row(self, index: int) -> Row:
        """Return the row that a prompt came from; only prompts keep theirs."""
        rows, ends = self._rows
        return json.loads(bytes(rows[ends[index - 1] if index else 0 : ends[index]]))

    def mismatch(self, index: int, other: int) -> Sequence:
        """Join the prompt of example `index` with the answer of `other` (KTO's baseline), cut at max_length."""
        (prompt,), (answer,) = self[index].sequences, self[other].sequences
        head, start = prompt.prompt_length, answer.prompt_length
        tokens = np.append(prompt.tokens[:head], answer.tokens[start:])
        weights = np.append(prompt.loss_weights[:head], answer.loss_weights[start:])
        both = tokens[: self.max_length], weights[: self.max_length]
        return Sequence(*both, prompt=prompt.prompt, prompt_length=head)


def source_weights(
    sources: list[Source], examples: list[int], stopping_strategy: str
) -> list[float]:
    """Return how often each source's examples are taken in an epoch, which has the shares that probabilities ask."""
    if not all(source.probability for source in sources):
        return [source.weight for source in sources]
    # the lengths of an epoch that takes every example of a source once
    lengths = [count / source.probability for source, count in zip(sources, examples)]
    length = min(lengths) if stopping_strategy == "first_exhausted" else max(lengths)
    return [length / own for own in lengths]


def preview_examples(
    dataset: TokenizedDataset, tokenizer: PreTrainedTokenizerFast, count: int
) -> None:
    """Print the first `count` examples decoded, with the trained tokens between [[ and ]]."""
    for example in islice(dataset, count):
        shared = shared_prompts(example.sequences)
        for place, (sequence, (_, left_out)) in enumerate(zip(example.sequences, shared)):
            name = f"{dataset.kind} {place + 1}"
            if dataset.kind == "pair":
                name = "rejected" if place else "chosen"
            after = f" after {left_out} of the first sequence" if left_out else ""
            is_trained = np.not_equal(sequence.loss_weights[left_out:], 0)
            is_trained[0] = False  # nothing predicts the first token
            tokens, ends = sequence.tokens[left_out:], np.flatnonzero(np.diff(is_trained)) + 1
            parts = map(tokenizer.decode, np.split(tokens, ends))
            text = "".join(f"[[{part}]]" if i % 2 else part for i, part in enumerate(parts))
            numbers = {**example.columns, **sequence.columns}.items()
            print(
                f"example {example.index} ({name}): {len(tokens)} tokens{after}, {is_trained.sum()} trained",
                *(f"{key} {value:g}" for key, value in numbers),
                sep=", ",
            )
            print(visible(text, lines=True))
    print(dataset.report)
