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
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add(
        self, name: str, total: Tensor | float, count: Tensor | float | None = None
    ) -> None:
        """Add to a global mean of which `total` is a sum over `count` things, or without a count to a global sum."""
        for sums, value in ((self._sums, total), (self._counts, count)):
            if value is not None:
                new = number(value, self.device)
                sums[name] = sums[name] + new if name in sums else new

    def reduce(self) -> dict[str, float]:
        """Return the global sums and means; a mean over nothing is left out. One collective and one host read."""
        flat = torch.stack([*self._sums.values(), *self._counts.values()])
        if dist.is_initialized():
            dist.all_reduce(flat)
        numbers = iter(flat.tolist())
        found = dict(zip(self._sums, numbers))
        for name, count in zip(self._counts, numbers):
            if count:
                found[name] /= count
            else:
                del found[name]
        return found


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return the value as a float64 scalar on the device, without gradient and without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.full((), value, dtype=torch.float64, device=device)
