"""Metrics as (sum, count) pairs, reduced once per step."""

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Named sums and means of this rank, made global by `reduce` with one collective.

    Every rank must add the same names in the same order; a rank without data adds zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(
        self, name: str, total: Tensor | float, count: Tensor | float | None = None
    ) -> None:
        """Add to a global mean of which `total` is a sum over `count` things, or without a count to a global sum."""
        for sums, value in ((self.sums, total), (self.counts, count)):
            if value is not None:
                if isinstance(value, Tensor):
                    new = value.detach().double()
                else:  # without waiting for a GPU
                    new = torch.full((), value, dtype=torch.float64, device=self.device)
                sums[name] = sums[name] + new if name in sums else new

    def totals(self) -> Tensor:
        """Return the global sums, and then the counts, float64 on the device. One collective."""
        flat = torch.stack([*self.sums.values(), *self.counts.values()])
        if dist.is_initialized():
            dist.all_reduce(flat)
        return flat

    def reduce(self) -> dict[str, float]:
        """Return the global sums and means; a mean over nothing is left out. One collective and one host read."""
        numbers = iter(self.totals().tolist())
        found = dict(zip(self.sums, numbers))
        for name, count in zip(self.counts, numbers):
            if count:
                found[name] /= count
            else:
                del found[name]
        return found
