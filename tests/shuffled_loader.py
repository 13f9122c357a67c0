"""A StepLoader that arranges the examples of a step in another random order: nothing may depend on the packing."""

import random
from dataclasses import dataclass, replace
from typing import Any

from ulysses.data.serve.dataset import Example
from ulysses.data.serve.steps import StepLoader


@dataclass(eq=False)
class ShuffledLoader(StepLoader):
    """Shuffle the groups, their micro-batches and the examples inside, if there is a seed."""

    packing_seed: int | None = None

    def micro_batches(self, dataset: Any, indices: list[int]) -> list[list[Example]]:
        if self.packing_seed is None:
            return super().micro_batches(dataset, indices)
        generator = random.Random(self.packing_seed)
        ranks = list(range(self.data_parallel_size))
        generator.shuffle(ranks)  # alike on every rank
        group = replace(self, dp_rank=ranks[self.dp_rank], packing_seed=None).micro_batches(
            dataset, indices
        )
        for micro_batch in group:
            generator.shuffle(micro_batch)
        generator.shuffle(group)
        return group
