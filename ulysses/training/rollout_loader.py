"""Optimizer steps over rollouts, with the face of a StepLoader.

    steps of an epoch   | rollout 0: pass 0 (minibatch 0 .. m-1), pass 1 (...) | rollout 1: ... |     epochs * m steps each

A rollout is made when its first step is asked for, with the weights of that moment; nothing is prepared ahead of that.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ulysses.data.encode import Example
from ulysses.data.steps import StepLoader, shuffled
from ulysses.training.rollout import Rollout


@dataclass(eq=False)
class RolloutLoader:
    """Serve one data-parallel group.

    Args:
        prompts: gives each rollout's prompts; its step k is rollout k of the epoch.
        make: (rollout number, dataset, indices) -> Rollout; all ranks together.
        passes: over a rollout; each takes its sequences in a new order.
        minibatches: optimizer steps per pass.
        budget: tokens per packed micro-batch.

    Attributes:
        stopped: the rest of the current rollout is not trained on; its steps are empty.
    """

    prompts: StepLoader
    make: Callable[[int, Any, list[int]], Rollout]
    _: KW_ONLY
    passes: int
    minibatches: int
    budget: int

    def __post_init__(self) -> None:
        self.current: Rollout | None = None
        self.stopped = False

    @property
    def steps_per_rollout(self) -> int:
        return self.passes * self.minibatches

    @property
    def steps_per_epoch(self) -> int:
        return self.prompts.steps_per_epoch * self.steps_per_rollout

    @property
    def dataset(self) -> Rollout:
        """The rollout of the last step that was asked for."""
        assert self.current is not None
        return self.current

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the places in the rollout of all sequences of step k, in a fixed order."""
        number, within = self._split(epoch, k)
        rollout = self._rollout(number, epoch, k)
        if self.stopped:
            return []
        order = shuffled(len(rollout), self.prompts.seed, number, within // self.minibatches)
        return [int(i) for i in np.array_split(order, self.minibatches)[within % self.minibatches]]

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k, after making its rollout if it is the first one of it."""
        indices = self.indices(epoch, k)
        rollout = self.dataset
        lengths = [[int(n)] for n in rollout.answers.lengths[indices]] if indices else []
        plan = self.prompts.pack(lengths, self.budget)
        return [
            [Example(indices[p], (rollout.sequence(indices[p]),)) for p in micro_batch]
            for micro_batch in plan[self.prompts.dp_rank]
        ]

    def _split(self, epoch: int, k: int) -> tuple[int, int]:
        rollout, within = divmod(k, self.steps_per_rollout)
        return epoch * self.prompts.steps_per_epoch + rollout, within

    def _rollout(self, number: int, epoch: int, k: int) -> Rollout:
        if self.current is None or self.current.number != number:
            indices = self.prompts.indices(epoch, k // self.steps_per_rollout)
            self.current = self.make(number, self.prompts.dataset, indices)
            self.stopped = False
        return self.current
