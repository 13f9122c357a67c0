"""What a dataset gives to the steps: one training example."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ulysses.parallel.batch import Sequence


@dataclass(frozen=True)
class Example:
    """One training example: its sequences (pair: chosen, rejected; separate turns: the last one first) and its numbers.

    columns: prompt_length, but not of a sequence; margin (ranked, whose sequences have the column rank); label, 1 or 0
    (unpaired); prompt_id (unpaired, prompt), the same for equal prompts. index: its place in the dataset.
    """

    index: int
    sequences: tuple[Sequence, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def apart(self) -> "Example":
        """The same example whose sequences share no prompt."""
        alone = (replace(sequence, prompt=None) for sequence in self.sequences)
        return replace(self, sequences=tuple(alone))

    @property
    def emptied(self) -> "Example":
        """The same without tokens, which stands for the columns of a micro-batch without examples."""
        return replace(self, sequences=tuple(sequence.emptied for sequence in self.sequences))
