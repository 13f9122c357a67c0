"""Decide which examples each optimizer step trains on, and pack them into micro-batches.

    order of an epoch    7 0 4 2 9 1 | 3 8 5 6              fixed by (seed, epoch); step k takes the next B examples
    tokens of one step   7 3 3 2 9 1                        an example is never cut, and a pair stays together
    data-parallel 0      [9 | 3 2 ]                         every micro-batch holds at most the budget of tokens,
    data-parallel 1      [7 | 3 1 ]                         and all groups have the same number of micro-batches

The order does not depend on the topology; packing only rearranges the examples inside a step. The last step of an epoch
may be smaller and is trained too. The position in the data is (seed, epoch, k) and there is no other state, so every
rank computes the whole plan and takes its own part of it.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from ulysses.data.dataset import Example, TokenizedDataset
from ulysses.parallel.random_keys import STEP, scatter_bits, wrapped

# At this many tokens attention costs as much as the rest of the model; it is about 12 times the model's width.
ATTENTION_LENGTH = 50_000.0


@dataclass(eq=False)
class StepLoader:
    """Serve the micro-batches of every step to one data-parallel group.

    Args:
        examples_per_step: examples of one optimizer step, over all groups; at least 1.
        tokens_per_microbatch: the most tokens that one packed micro-batch may hold.
        shuffle: False takes every example once, in the dataset's order, which is what evaluation needs.
        attention_length: number of tokens at which attention costs as much as the rest of the model.

    Raises ValueError: the longest example does not fit into a micro-batch, or there is nothing to train on.
    """

    dataset: TokenizedDataset
    examples_per_step: int
    _: KW_ONLY
    tokens_per_microbatch: int
    seed: int = 0
    data_parallel_size: int = 1
    dp_rank: int = 0
    shuffle: bool = True
    attention_length: float = ATTENTION_LENGTH

    def __post_init__(self) -> None:
        self._cached: tuple[int, np.ndarray] | None = None  # an epoch and its order
        if not self.examples_per_epoch:
            raise ValueError("the weights of the data sources leave no example; raise them")
        check_fits(int(self.dataset.lengths.max()), self.tokens_per_microbatch)

    @property
    def examples_per_epoch(self) -> int:
        """Number of examples in an epoch, with the weights of the sources applied."""
        if not self.shuffle:
            return len(self.dataset)
        return sum(count for _, count in self._members_and_counts())

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples_per_epoch / self.examples_per_step)

    def order(self, epoch: int) -> np.ndarray:
        """Return the dataset indices of an epoch in training order, int64 [examples_per_epoch]."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        if self._cached is None or self._cached[0] != epoch:
            chosen = []
            for source, (members, count) in enumerate(self._members_and_counts()):
                copies, rest = divmod(count, max(1, len(members)))
                part = members[shuffled(len(members), self.seed, epoch, source + 1)[:rest]]
                chosen += [np.tile(members, copies), np.sort(part)]
            everything = np.concatenate(chosen)
            order = everything[shuffled(len(everything), self.seed, epoch, 0)]
            self._cached = (epoch, order)
        return self._cached[1]

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the dataset indices of all examples of step k, in the order of the epoch."""
        if not 0 <= k < self.steps_per_epoch:
            raise IndexError(f"step {k} is not in an epoch of {self.steps_per_epoch} steps")
        start = k * self.examples_per_step
        return self.order(epoch)[start : start + self.examples_per_step].tolist()

    def plan(self, epoch: int, k: int) -> list[list[list[int]]]:
        """Return, for every group and micro-batch, positions in indices(epoch, k)."""
        lengths = self.dataset.sequence_lengths[self.indices(epoch, k)].tolist()
        return self.pack(lengths, self.tokens_per_microbatch)

    def pack(self, sequence_lengths: list[list[int]], budget: int) -> list[list[list[int]]]:
        """Pack examples, each given by the lengths of its sequences, for every group; see pack_step."""
        costs = [example_cost(lengths, self.attention_length) for lengths in sequence_lengths]
        totals = [sum(lengths) for lengths in sequence_lengths]
        return pack_step(totals, budget, self.data_parallel_size, costs=costs)

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k; a micro-batch may be empty."""
        indices = self.indices(epoch, k)
        plan = self.plan(epoch, k)[self.dp_rank]
        return [[self.dataset[indices[position]] for position in part] for part in plan]

    def mismatched_pairs(self, indices: list[int]) -> list[tuple[int, int]]:
        """Pair each example of a step with the one whose completion it takes for KTO's baseline.

        That is the next example of the step, cyclically, that has another prompt. Examples without one are left out.
        """
        prompts, count, pairs = self.dataset.columns["prompt_id"], len(indices), []
        for position, i in enumerate(indices):
            others = (indices[(position + distance) % count] for distance in range(1, count))
            partner = next((j for j in others if prompts[j] != prompts[i]), None)
            if partner is not None:
                pairs.append((i, partner))
        return pairs

    def _members_and_counts(self) -> list[tuple[np.ndarray, int]]:
        """For every source, the indices of its examples and how many of them an epoch takes."""
        found = []
        for source, weight in enumerate(self.dataset.source_weights):
            members = np.flatnonzero(self.dataset.sources == source)
            found.append((members, round(len(members) * weight)))
        return found


def example_cost(
    sequence_lengths: Sequence[int], attention_length: float = ATTENTION_LENGTH
) -> float:
    """Estimate the relative work of one example: linear in its tokens, and quadratic in each sequence's length."""
    return sum(length + length * length / attention_length for length in sequence_lengths)


def check_fits(longest: int, budget: int) -> None:
    """Raise ValueError if an example of `longest` tokens does not fit into a micro-batch of `budget` tokens."""
    if longest > budget:
        raise ValueError(
            f"the longest example has {longest} tokens but batch.tokens_per_microbatch is {budget}; "
            f"raise it to at least {longest}, or lower data.max_length"
        )


def pack_step(
    lengths: Sequence[int], budget: int, groups: int, *, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Deal the examples of a step to data-parallel groups and micro-batches.

    Args:
        lengths: tokens of each example, all its sequences together.
        budget: the most tokens in one micro-batch.
        groups: number of data-parallel groups.
        costs: relative work of each example; by default that of one sequence of its length.

    Returns the micro-batches of each group as lists of positions in `lengths`. All groups get the same number of
    micro-batches, as few as packing finds; some are empty if there are fewer examples than groups. Micro-batches with
    the same index run at the same time on all groups, so they get similar costs.

    Raises ValueError: an example is longer than the budget.
    """
    check_fits(max(lengths, default=0), budget)
    work = [example_cost([n]) for n in lengths] if costs is None else list(costs)
    count = max(1, -(-sum(lengths) // (budget * groups)))
    while (bins := _fill(lengths, work, budget, count * groups)) is None:
        count += 1
    return _deal(bins, work, groups)


def _fill(
    lengths: Sequence[int], work: list[float], budget: int, bins: int
) -> list[list[int]] | None:
    """Put every example into a bin: balanced by work if that fits, else tightly by length, else return None."""
    for balanced in (True, False):
        filled: list[list[int]] = [[] for _ in range(bins)]
        tokens, loads = [0] * bins, [0.0] * bins
        size = work if balanced else lengths
        for i in sorted(range(len(lengths)), key=lambda i: (-size[i], i)):
            open_bins = [b for b in range(bins) if tokens[b] + lengths[i] <= budget]
            if not open_bins:
                break
            best = min(open_bins, key=lambda b: (loads[b] if balanced else -tokens[b], b))
            filled[best].append(i)
            tokens[best] += lengths[i]
            loads[best] += work[i]
        else:
            return filled
    return None


def _deal(bins: list[list[int]], work: list[float], groups: int) -> list[list[list[int]]]:
    """Give bins of similar work to the groups at the same index, the heaviest to the group with the least so far."""
    load = [sum(work[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    dealt: list[list[list[int]]] = [[] for _ in range(groups)]
    totals = [0.0] * groups
    for first in range(0, len(order), groups):
        lightest_first = sorted(range(groups), key=lambda g: (totals[g], g))
        for b, g in zip(order[first : first + groups], lightest_first):
            dealt[g].append(sorted(bins[b]))
            totals[g] += load[b]
    return dealt


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return a permutation of range(count) that depends on the key alone, not on any library's version."""
    state = STEP
    for part in key:
        state = int(scatter_bits(np.asarray([wrapped((part + state) * STEP)]))[0])
    numbers = scatter_bits(np.arange(count) * STEP + wrapped(state * STEP))
    return np.argsort(numbers.view(np.uint64), kind="stable")
