"""Steps of an epoch: which examples, in which micro-batches, on which data-parallel group.

Step k of an epoch is examples [k * B, (k + 1) * B) of the order fixed by (seed, epoch), whatever the topology; the last
smaller step is kept. Packing only rearranges inside a step. The position in the data is (seed, epoch, k): nothing else
is state, and every rank computes the same plan.
"""

import math

import numpy as np

from ulysses.data.dataset import Example, TokenizedDataset
from ulysses.data.packing import ATTENTION_LENGTH, example_cost, pack_step


class StepLoader:
    """Serve the micro-batches of every step to one data-parallel group.

    Args:
        examples_per_step: B, over all groups.
        tokens_per_microbatch: budget of one packed micro-batch.
        shuffle: False keeps the dataset's order (evaluation) and takes every example once.
        attention_length: tokens at which attention costs as much as the rest of the model (12 times its width).
        packing_seed: permutes the places inside a step; only a test of invariance needs it.

    Raises ValueError: an example is longer than tokens_per_microbatch.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        examples_per_step: int,
        *,
        tokens_per_microbatch: int,
        seed: int = 0,
        data_parallel_size: int = 1,
        dp_rank: int = 0,
        shuffle: bool = True,
        attention_length: float = ATTENTION_LENGTH,
        packing_seed: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.examples_per_step = examples_per_step
        self.budget = tokens_per_microbatch
        self.seed = seed
        self.data_parallel_size = data_parallel_size
        self.dp_rank = dp_rank
        self.shuffle = shuffle
        self.attention_length = attention_length
        self.packing_seed = packing_seed
        self._cached: tuple[int, np.ndarray] | None = None
        if examples_per_step < 1:
            raise ValueError(f"batch.examples is {examples_per_step} but must be at least 1")
        if shuffle and not self.examples_per_epoch:
            raise ValueError("the data weights leave no example in an epoch; raise them")
        longest = int(np.argmax(dataset.lengths))
        if dataset.lengths[longest] > self.budget:
            raise ValueError(
                f"the longest example has {dataset.lengths[longest]} tokens but batch.tokens_per_microbatch is "
                f"{self.budget}; raise it to at least {dataset.lengths[longest]} or lower data.max_length"
            )

    @property
    def examples_per_epoch(self) -> int:
        """Examples of one epoch, source weights applied."""
        return sum(count for _, count in self._shares()) if self.shuffle else len(self.dataset)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples_per_epoch / self.examples_per_step)

    def order(self, epoch: int) -> np.ndarray:
        """Return the dataset indices of an epoch in training order, int64 [examples_per_epoch]."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        chosen = []
        for source, (members, count) in enumerate(self._shares()):
            copies, rest = divmod(count, len(members)) if len(members) else (0, 0)
            part = members[shuffled(len(members), self.seed, epoch, source + 1)[:rest]]
            chosen += [np.tile(members, copies), np.sort(part)]
        flat = np.concatenate(chosen)
        return flat[shuffled(len(flat), self.seed, epoch, 0)]

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the dataset indices of all examples of step k, in the order of the epoch."""
        if not 0 <= k < self.steps_per_epoch:
            raise IndexError(f"step {k} is not in an epoch of {self.steps_per_epoch} steps")
        order = self._order(epoch)
        return [
            int(i) for i in order[k * self.examples_per_step : (k + 1) * self.examples_per_step]
        ]

    def plan(self, epoch: int, k: int) -> list[list[list[int]]]:
        """Return positions in indices(epoch, k) for every group and micro-batch."""
        indices = self.indices(epoch, k)
        sides = [self._tokens(i) for i in indices]
        shuffle = None if self.packing_seed is None else hash((self.packing_seed, epoch, k))
        costs = [example_cost(lengths, self.attention_length) for lengths in sides]
        return pack_step(
            [sum(s) for s in sides],
            self.budget,
            self.data_parallel_size,
            costs=costs,
            shuffle=shuffle,
        )

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k; an empty one stands for a batch without weight."""
        indices = self.indices(epoch, k)
        return [
            [self.dataset[indices[p]] for p in micro_batch]
            for micro_batch in self.plan(epoch, k)[self.dp_rank]
        ]

    def mismatched_pairs(self, indices: list[int]) -> list[tuple[int, int]]:
        """Return (example, whose completion it takes for KTO's baseline) for the examples of a step that have a partner.

        That is the next example of the step, cyclic, with a different prompt.
        """
        prompts = [int(self.dataset.columns["prompt_id"][i]) for i in indices]
        return [
            (i, j) for i, j in zip(indices, mismatched(indices, prompts), strict=True) if j >= 0
        ]

    def _tokens(self, index: int) -> list[int]:
        return [int(n) for n in self.dataset.sequence_lengths[index]]

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self.order(epoch))
        return self._cached[1]

    def _shares(self) -> list[tuple[np.ndarray, int]]:
        """(members, how many of them an epoch takes) of every source."""
        shares = []
        for source, weight in enumerate(self.dataset.source_weights):
            members = np.flatnonzero(self.dataset.sources == source)
            shares.append((members, round(len(members) * weight)))
        return shares


def mismatched(indices: list[int], prompts: list[int]) -> list[int]:
    """Pair each example with the next one (cyclic) that has a different prompt; -1 where there is none."""
    count = len(indices)
    return [
        next(
            (
                indices[(i + d) % count]
                for d in range(1, count)
                if prompts[(i + d) % count] != prompts[i]
            ),
            -1,
        )
        for i in range(count)
    ]


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return a permutation of range(count) that depends on the key alone (not on any library's version)."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(np.asarray([part], np.uint64) + state)[0]
        return np.argsort(_mix(np.arange(count, dtype=np.uint64) + state), kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 finaliser (Steele et al. 2014): a bijection of 64-bit numbers that scatters neighbours."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
