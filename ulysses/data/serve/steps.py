"""Decide which examples each optimizer step trains on, and pack them into micro-batches.

    order of an epoch    7 0 4 2 9 1 | 3 8 5 6              fixed by (seed, epoch); step k takes the next B examples
    tokens of one step   7 3 3 2 9 1                        an example is never cut, and a pair stays together
    data-parallel 0      [9 | 3 2 ]                         no micro-batch holds more than tokens_per_microbatch,
    data-parallel 1      [7 | 3 1 ]                         and all groups have the same number of micro-batches

The order does not depend on the topology; packing only rearranges the examples inside a step. The last step of an epoch
may be smaller and is trained too. The position in the data is (seed, epoch, k) and there is no other state, so every
rank computes the whole plan and takes its own part of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from ulysses.data.serve.dataset import Example, TokenizedDataset
from ulysses.parallel.layout import squares
from ulysses.parallel.random_keys import STEP, scatter_bits, wrapped

# At this many times the model's width attention costs as much as the rest of the model.
ATTENTION_WIDTHS = 12.0
ATTENTION_LENGTH = 50_000.0


@dataclass(eq=False)
class StepLoader:
    """Serve the micro-batches of every step to one data-parallel group.

    Args:
        examples_per_step: examples of one optimizer step, over all groups; at least 1.
        tokens_per_microbatch: the most tokens that one packed micro-batch may hold.
        shuffle: take the examples in the order of the epoch. False takes every example once, in the dataset's order,
            which is what evaluation needs.
        only: without shuffling, the named set whose examples are taken, "" for examples of none; None takes all.
        attention_length: number of tokens at which attention costs as much as the rest of the model.
        windows: the sliding window of every layer (parallel/layout.py).

    Attributes:
        examples_per_epoch: number of examples in an epoch, with the weights of the sources applied.
        steps_per_epoch: number of optimizer steps in an epoch.

    An example that no micro-batch holds, and data without examples, are refused before (check/input_files.py).
    """

    dataset: TokenizedDataset
    examples_per_step: int
    _: KW_ONLY
    tokens_per_microbatch: int
    seed: int = 0
    data_parallel_size: int = 1
    dp_rank: int = 0
    shuffle: bool = True
    only: str | None = None
    attention_length: float = ATTENTION_LENGTH
    windows: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        indices = np.arange(len(self.dataset))
        if self.only is not None:
            names = np.array(self.dataset.source_names)
            indices = np.flatnonzero(names[self.dataset.sources] == self.only)
        self._order, self._order_epoch = indices, -1  # the order made last, and its epoch
        self.examples_per_epoch = len(self.order(0))
        self.steps_per_epoch = math.ceil(self.examples_per_epoch / self.examples_per_step)

    def order(self, epoch: int) -> np.ndarray:
        """Return the dataset indices of an epoch in training order, int64 [examples_per_epoch]."""
        if self.shuffle and self._order_epoch != epoch:
            parts = []
            for source, taken in enumerate(examples_taken(self.dataset)):
                members = np.flatnonzero(self.dataset.sources == source)
                copies, rest = divmod(int(taken), max(1, len(members)))
                # one permutation goes on from epoch to epoch, so that every example has its turn
                order = shuffled(len(members), self.seed, 0, source + 1)
                extra = np.roll(order, -epoch * rest)[:rest]
                parts += [np.tile(members, copies), members[np.sort(extra)]]
            chosen = np.concatenate(parts)
            mixed = shuffled(len(chosen), self.seed, epoch, 0)
            self._order, self._order_epoch = chosen[mixed], epoch
        return self._order

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the dataset indices of all examples of step k, in the order of the epoch."""
        start = k * self.examples_per_step
        return self.order(epoch)[start : start + self.examples_per_step].tolist()

    def indices_at(self, step: int) -> list[int]:
        """Return the dataset indices of all examples of a step that is counted over all epochs."""
        return self.indices(*divmod(step, self.steps_per_epoch))

    def sets(self) -> dict[str, "StepLoader"]:
        """Return a loader for each named set, with "" for the examples of none; without named sets, {"": this one}."""
        names = sorted({*self.dataset.source_names})
        return {name: replace(self, only=name) for name in names} if any(names) else {"": self}

    def planned_steps(self) -> tuple[list[int], list[int]]:
        """Return the examples of two steps of the first epoch: with the median number of tokens, and with the most."""
        lengths = self.dataset.lengths[self.order(0)]
        starts = np.arange(0, len(lengths), self.examples_per_step)
        ranked = np.add.reduceat(lengths, starts).argsort().tolist()
        return self.indices(0, ranked[len(ranked) // 2]), self.indices(0, ranked[-1])

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k; a micro-batch may be empty."""
        return self.micro_batches(self.dataset, self.indices(epoch, k))

    def micro_batches(self, dataset: Any, indices: list[int]) -> list[list[Example]]:
        """Pack some examples of a dataset for all groups, and return this group's micro-batches.

        The dataset is a TokenizedDataset or a Rollout, both of which have sequence_lengths and prefix_lengths.
        A micro-batch without examples holds one without tokens, which gives it its columns.
        """
        lengths, prefixes = dataset.sequence_lengths[indices], dataset.prefix_lengths[indices]
        costs = sequence_cost(lengths, prefixes, self.attention_length, self.windows)
        groups = pack_step(
            lengths.sum(axis=1).tolist(),
            costs.sum(axis=1).tolist(),
            self.tokens_per_microbatch,
            self.data_parallel_size,
        )
        return [
            [dataset[indices[i]] for i in members] or [dataset[0].emptied]
            for members in groups[self.dp_rank]
        ]


def examples_taken(dataset: TokenizedDataset) -> np.ndarray:
    """Return how many examples of each source an epoch takes, float64 [sources]."""
    counts = np.bincount(dataset.sources, minlength=len(dataset.source_weights))
    # half an example counts as one, so that two epochs of 0.5 see all of an odd source
    return np.floor(counts * dataset.source_weights + 0.5)


def check_fits(longest: int, tokens_per_microbatch: int) -> None:
    """Raise ValueError if an example of `longest` tokens does not fit into a micro-batch."""
    if longest > tokens_per_microbatch:
        raise ValueError(
            f"the longest example has {longest} tokens but batch.tokens_per_microbatch is {tokens_per_microbatch}; "
            f"raise it to at least {longest}, or lower data.max_length"
        )


def sequence_cost(
    length: np.ndarray,
    prefix_length: np.ndarray | int = 0,
    attention_length: float = ATTENTION_LENGTH,
    windows: Sequence[int | None] = (),
) -> np.ndarray:
    """Estimate the relative work of sequences: linear in their tokens, and in the keys that each token attends to."""
    return length + squares(length, prefix_length, windows) / attention_length


def pack_step(
    tokens: list[int], costs: list[float], tokens_per_microbatch: int, groups: int
) -> list[list[list[int]]]:
    """Deal the examples of a step to data-parallel groups and micro-batches.

    Args:
        tokens: tokens of each example.
        costs: relative work of each example.
        tokens_per_microbatch: the most tokens in one micro-batch, unless the longest example has more.
        groups: number of data-parallel groups.

    Returns the micro-batches of each group as lists of positions in `tokens`. All groups get the same number of
    micro-batches, as few as packing finds; some are empty if there are fewer examples than groups. Micro-batches with
    the same index run at the same time on all groups, so they get similar costs.
    """
    tokens_per_microbatch = max([tokens_per_microbatch, *tokens])
    count = max(1, -(-sum(tokens) // (tokens_per_microbatch * groups)))
    bins = None
    while bins is None:
        room = [tokens_per_microbatch] * (count * groups)
        # balanced by cost, else tightly by length: the fullest bin with room wastes least
        bins = _fill(tokens, room, costs, min) or _fill(tokens, room, tokens, max)
        count += 1

    # heaviest first, so that neighbours, which run at the same time, have similar work
    bins.sort(key=lambda members: sum(costs[i] for i in members), reverse=True)
    return [[sorted(members) for members in bins[group::groups]] for group in range(groups)]


def _fill(
    tokens: list[int], room: list[int], sizes: Sequence[float], choose: Callable[..., int]
) -> list[list[int]] | None:
    """Put each example, the largest first, into a bin that has room for its tokens; None if one fits into none.

    Args:
        room: the tokens that each bin may hold.
        sizes: what the examples are measured by.
        choose: `min` takes the bin that holds least of `sizes`, `max` the one that holds most.
    """
    room = list(room)
    load = [0.0] * len(room)
    bins = [[] for _ in room]
    for i in sorted(range(len(tokens)), key=lambda i: sizes[i], reverse=True):
        open_bins = [b for b, left in enumerate(room) if left >= tokens[i]]
        if not open_bins:
            return None
        chosen = choose(open_bins, key=lambda b: load[b])
        bins[chosen].append(i)
        room[chosen] -= tokens[i]
        load[chosen] += sizes[i]
    return bins


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return a permutation of range(count) that depends on the key alone, and on no library's version."""
    state = STEP
    for part in key:
        state = int(scatter_bits(np.asarray([wrapped((part + state) * STEP)]))[0])
    numbers = scatter_bits(np.arange(count) * STEP + wrapped(state * STEP))
    return np.argsort(numbers.view(np.uint64), kind="stable")
