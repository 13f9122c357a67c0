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

DIGESTS = "digests.json"  # has the digests of a folder's other files


@dataclass(frozen=True)
class Example:
    """One training example.

    Attributes:
        index: its place in the dataset.
        sequences: of a pair chosen and rejected; of turns that are trained separately the last turn first.
        columns: its numbers: prompt_length (all kinds but sequence); margin (ranked, whose sequences have the column
            rank); label, 1 or 0 (unpaired); prompt_id, which is the same for equal prompts (unpaired, prompt).
    """

    index: int
    sequences: tuple[Sequence, ...]
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def emptied(self) -> "Example":
        """The example without its tokens, which gives a micro-batch without examples its columns."""
        return replace(self, sequences=tuple(sequence.emptied for sequence in self.sequences))


class TokenizedDataset:
    """Tokenised examples in a folder that `Tokenising` wrote (tokenise.py).

    Attributes:
        kind: text, sequence, pair, ranked, unpaired, prompt or trajectory.
        fingerprint: the folder's name, a digest of sources, settings, tokenizer and template; equal on all ranks.
        report: what happened to the rows.
        sequence_lengths: the tokens of every sequence, int64 [examples, most sequences of one], 0 where there is none.
        prefix_lengths: in the same form, the first tokens of a sequence that a pack holds once, because the sequence
            before it has them too; `sequence_lengths` do not count them.
        lengths: int64 [examples], the sums of `sequence_lengths`.
        share_prompts: whether the examples say which sequences have a prompt in common; else all prefixes are 0.
        columns: {name: [examples]}, the numbers of the examples.
        sources: [examples], the index of each example's source.
        source_weights: how often the examples of each source are taken in an epoch.
        source_paths: the paths of the sources.
        source_names: the held-out sets that the sources belong to; "" for none.
        max_length: where a mismatched sequence is cut.
        token_columns: {name: [tokens]}, a number for each token that `lengths` count, all examples end to end.
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
        self.fingerprint = f"{self.folder.name} {share_prompts}"
        index = json.loads((self.folder / "index.json").read_text())
        self.kind = index["kind"]
        self.report = Report(**index["report"])
        arrays = {
            path.stem: np.memmap(path, path.suffix[1:], "r")
            for path in self.folder.iterdir()
            if path.suffix != ".json"
        }
        self._tokens = arrays.pop("tokens")
        ones = np.broadcast_to(np.float32(1), len(self._tokens))
        self._weights = arrays.pop("weights", ones)
        sizes = np.array(arrays["_sizes"]).reshape(-1, 3)  # as tokenise.py writes them
        if not share_prompts:
            sizes[:, 1] = 0
        whole, prefixes, _ = sizes.T
        counted = whole - prefixes  # the tokens that a pack holds
        # of each sequence: where it begins in the tokens and in token_columns, its tokens, its prefix and its rank
        self._sequences = np.column_stack(
            [whole.cumsum() - whole, counted.cumsum() - counted, sizes]
        )
        self._counts = arrays["_counts"]
        self._ends = self._counts.cumsum()
        # tables with a row for each example, which its sequences fill from the left
        exists = np.arange(self._counts.max()) < self._counts[:, None]
        self.sequence_lengths, self.prefix_lengths = np.zeros((2, *exists.shape), np.int64)
        self.sequence_lengths[exists] = counted
        self.prefix_lengths[exists] = prefixes
        self.lengths = self.sequence_lengths.sum(axis=1)
        self.sources = arrays["_source"]
        sources = sources or [Source(str(folder))]
        self.source_paths = [source.path for source in sources]
        self.source_names = [source.name for source in sources]
        examples = np.bincount(self.sources, minlength=len(sources)).tolist()
        self._note_unused(sources, examples)
        self.source_weights = source_weights(sources, examples, stopping_strategy)
        self.token_columns = {
            name: array for name, array in arrays.items() if name.startswith("token_")
        }
        self.columns = {
            name: array
            for name, array in arrays.items()
            if not name.startswith(("_", "token_"))
        }
        if "_prompt" in arrays:  # prompts are numbered in the order of the examples
            _, first, ids = np.unique(arrays["_prompt"], return_index=True, return_inverse=True)
            self.columns["prompt_id"] = first.argsort().argsort()[ids]
        if self.kind == "prompt":
            self._rows, self._row_ends = arrays["_rows"], arrays["_row_size"].cumsum()

    def _note_unused(self, sources: list[Source], examples: list[int]) -> None:
        """Note the sources without an example; DataError for a source with a probability or a name."""
        for source, count in zip(sources, examples):
            if count:
                continue
            if source.probability or source.name:
                reasons = str(self.report).replace("\n ", ";")
                raise DataError(
                    f"no example is left of {source.path}, which has a probability or a name; remove it, or mend its "
                    f"rows ({reasons})"
                )
            self.report.note("sources of which no example is left", source.path)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Return example `index`; its arrays are views into the memory maps. IndexError ends an iteration."""
        index = range(len(self))[index]
        numbers = {name: float(values[index]) for name, values in self.columns.items()}
        prompt = int(numbers.get("prompt_id", index)) if self.share_prompts else None
        end = self._ends[index]
        of_example = self._sequences[end - self._counts[index] : end].tolist()
        sequences = []
        for start, column_start, whole, prefix, rank in of_example:
            per_token = {}
            for name, values in self.token_columns.items():
                per_token[name] = values[column_start : column_start + whole - prefix]
                if prefix:
                    before = sequences[-1].token_columns[name]
                    per_token[name] = np.append(before[:prefix], per_token[name])
            # of a turn that is trained separately, the last shared token is not left out
            prompt_length = int(numbers.get("prompt_length", prefix + 1))
            sequences.append(
                Sequence(
                    self._tokens[start : start + whole],
                    self._weights[start : start + whole],
                    per_token,
                    {"rank": rank} if self.kind == "ranked" else {},
                    prompt,
                    prompt_length,
                )
            )
        return Example(index, tuple(sequences), numbers)

    @property
    def apart(self) -> "TokenizedDataset":
        """The same data whose sequences share no prompt: a pack repeats it in each of them."""
        apart = copy(self)
        apart.sequence_lengths = self.sequence_lengths + self.prefix_lengths
        apart.prefix_lengths = np.zeros_like(self.prefix_lengths)
        apart.lengths = apart.sequence_lengths.sum(axis=1)
        apart.share_prompts = False
        return apart

    def with_column(self, name: str, values: np.ndarray) -> "TokenizedDataset":
        """Return this dataset with one more of its `token_columns`."""
        extended = copy(self)
        extended.token_columns = {**self.token_columns, name: values}
        return extended

    def row(self, index: int) -> Row:
        """Return the row that example `index` was read from; only datasets of prompts keep their rows."""
        start = self._row_ends[index - 1] if index else 0
        return json.loads(bytes(self._rows[start : self._row_ends[index]]))

    def mismatch(self, index: int, other: int) -> Sequence:
        """Join the prompt of example `index` with the answer of `other` (KTO's baseline), cut at max_length."""
        (prompt,), (answer,) = self[index].sequences, self[other].sequences
        end, start = prompt.prompt_length, answer.prompt_length
        tokens = np.append(prompt.tokens[:end], answer.tokens[start:])
        weights = np.append(prompt.loss_weights[:end], answer.loss_weights[start:])
        return Sequence(
            tokens[: self.max_length],
            weights[: self.max_length],
            prompt=prompt.prompt,
            prompt_length=end,
        )


def source_weights(
    sources: list[Source], examples: list[int], stopping_strategy: str
) -> list[float]:
    """Return how often the examples of each source are taken in an epoch.

    Where the sources have probabilities, these are their shares of the epoch.
    """
    if not all(source.probability for source in sources):
        return [source.weight for source in sources]
    # how long an epoch is that takes every example of this source once
    lengths = [count / source.probability for source, count in zip(sources, examples)]
    epoch = min(lengths) if stopping_strategy == "first_exhausted" else max(lengths)
    return [epoch / length for length in lengths]


def preview_examples(
    dataset: TokenizedDataset, tokenizer: PreTrainedTokenizerFast, count: int
) -> None:
    """Print the first `count` examples decoded, with the trained tokens between [[ and ]]."""
    for example in islice(dataset, count):
        shared = shared_prompts(example.sequences)
        for number, (sequence, (_, left_out)) in enumerate(
            zip(example.sequences, shared), start=1
        ):
            name = f"{dataset.kind} {number}"
            if dataset.kind == "pair":
                name = "chosen" if number == 1 else "rejected"
            after = f" after {left_out} of the sequence before it" if left_out else ""
            is_trained = np.not_equal(sequence.loss_weights[left_out:], 0)
            is_trained[0] = False  # nothing predicts the first token
            tokens = sequence.tokens[left_out:]
            edges = np.flatnonzero(np.diff(is_trained)) + 1
            parts = map(tokenizer.decode, np.split(tokens, edges))
            text = "".join(f"[[{part}]]" if i % 2 else part for i, part in enumerate(parts))
            numbers = {**example.columns, **sequence.columns}.items()
            print(
                f"example {example.index} ({name}): {len(tokens)} tokens{after}, {is_trained.sum()} trained",
                *(f"{key} {value:g}" for key, value in numbers),
                sep=", ",
            )
            print(visible(text, lines=True))
    print(dataset.report)
