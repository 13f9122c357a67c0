"""A rollout as a dataset: trajectories in trees, what several of them share held once."""

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ulysses.data.serve.dataset import Example
from ulysses.disk import write_tensors
from ulysses.parallel.batch import Sequence
from ulysses.rl.trajectory import Trajectory, depth_first


@dataclass
class Rollout:
    """Trajectories and what training on them needs, as a dataset whose examples are trees of sequences.

    Each trajectory leaves out what it has in common with the one before it in its example; a token that several share
    has the sum of their weights. An example has the number of its first trajectory, which is held whole.

    Args:
        layout: four rows [N] for the trajectories: `lengths`, the tokens that are held of their sequences; `prefixes`,
            those that they leave out; `example_ids`, the numbers of their examples; `groups`, the places of their
            groups.
        columns: flat [T]: the tokens, their weights in the loss (0 where nothing is drawn) and, once the rollout is
            finished, float32 columns for the loss.
        trajectories: [N] in the order of the layout. A checkpoint leaves them out.

    Attributes:
        predicted_at: for each token that a trajectory has drawn, one trajectory after the other, the row of the columns
            that predicts it, [A]. Several trajectories may have the same rows.
        weights: those of the same tokens, float64 [A]. A checkpoint leaves out both.
        ends: where each trajectory's tokens end in the columns, [N].
        sequence_lengths, prefix_lengths: `lengths` and `prefixes` by example, [N, the most of one]; 0 where there is no
            sequence.
    """

    number: int
    layout: Tensor
    columns: dict[str, Tensor]
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    predicted_at: Tensor = field(init=False)
    weights: Tensor = field(init=False)

    @classmethod
    def of(
        cls,
        number: int,
        trajectories: list[Trajectory],
        *,
        tokens_per_microbatch: int = 0,
        by_length: bool = False,
        share_drawn: bool = True,
    ) -> "Rollout":
        """Lay out trajectories, one group after the other, those of a group depth first.

        Args:
            tokens_per_microbatch: the most tokens of an example, where what is shared counts once; 0 shares nothing.
            by_length: every trajectory weighs 1 in the loss, and not each of its tokens.
            share_drawn: trajectories may share tokens that each of them trains.
        """
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        ordered: list[Trajectory] = []
        tokens, predicted_at, weights, layout = [], [], [], []
        rows, example, room, end = np.empty(0, np.int64), 0, 0, 0
        for place, group in enumerate(groups.values()):
            for trajectory, in_common in depth_first(group, share_drawn):
                whole, drawn = trajectory.whole, trajectory.drawn
                # the last token in common predicts the first that differs
                prefix = max(0, in_common - 1)
                room -= len(whole) - prefix
                if in_common == 0 or room < 0:
                    example, prefix = len(ordered), 0
                    room = tokens_per_microbatch - len(whole)
                begin, end = end, end + len(whole) - prefix
                # where the columns have the rows of the whole sequence
                rows = np.append(rows[:prefix], np.arange(begin, end))
                ordered.append(trajectory)
                layout.append((end - begin, prefix, example, place))
                tokens.append(whole[prefix:])
                predicted_at.append(rows[drawn - 1])
                weights.append(np.full(len(drawn), 1 / len(drawn) if by_length else 1.0))
        columns = {"tokens": torch.from_numpy(np.concatenate(tokens))}
        rollout = cls(number, torch.tensor(layout).T.contiguous(), columns, ordered)
        rollout.predicted_at, rollout.weights = (
            torch.from_numpy(np.concatenate(x)) for x in (predicted_at, weights)
        )
        rollout.columns["weights"] = rollout.sums_at_rows(rollout.weights).roll(1).float()
        return rollout

    def __post_init__(self) -> None:
        self.lengths, self.prefixes, self.example_ids, self.groups = self.layout.numpy()
        self.ends = self.lengths.cumsum()
        within_example = np.arange(len(self.ends)) - self.example_ids
        tables = np.zeros((2, len(self.ends), within_example.max() + 1), np.int64)
        tables[:, self.example_ids, within_example] = self.lengths, self.prefixes
        self.sequence_lengths, self.prefix_lengths = tables

    def sums_at_rows(self, values: Tensor) -> Tensor:
        """Return the sums of drawn tokens' values [A], float64, at the rows that predict them, [T]."""
        rows = values.new_zeros(len(self.columns["tokens"]))
        return rows.index_add_(0, self.predicted_at, values)

    def examples(self, groups: list[int]) -> list[int]:
        """Return the numbers of the examples that hold these groups, by their places."""
        ids = (self.example_ids[self.groups == place].tolist() for place in groups)
        return [*dict.fromkeys(chain(*ids))]

    def __getitem__(self, i: int) -> Example:
        arrays = {name: column.numpy() for name, column in self.columns.items()}
        lengths, prefixes = self.sequence_lengths[i].tolist(), self.prefix_lengths[i].tolist()
        end = int(self.ends[i]) - lengths[0]
        sequences, before = [], arrays  # of which the first sequence takes nothing
        for length, prefix in zip(filter(None, lengths), prefixes):
            begin, end = end, end + length
            before = {
                name: np.concatenate([before[name][:prefix], column[begin:end]])
                for name, column in arrays.items()
            }
            per_token = dict(before)
            tokens, weights = per_token.pop("tokens"), per_token.pop("weights")
            sequences.append(Sequence(tokens, weights, per_token, {}, i, prefix + 1))
        return Example(i, tuple(sequences))

    def save(self, path: Path) -> None:
        """Write a finished rollout as safetensors."""
        fields = {"number": self.number, "metrics": self.metrics}
        write_tensors(path, {"layout": self.layout, **self.columns}, rollout=json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> "Rollout":
        """Read what `save` wrote."""
        with safe_open(path, "pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}
            fields = json.loads(file.metadata()["rollout"])
        return cls(layout=columns.pop("layout"), columns=columns, **fields)
