"""The gradient of one optimizer step, wherever its pieces are.

    parameter a  [=========|=====]        one flat slice per parameter and rank (possibly empty), in the same order
    parameter b  [==|============]        on every rank; statistics are sums over slices, then ONE all-reduce
                  rank 0    rank 1

Shapes: P parameters, R rows (first axis) of all matrices together.
Every method is called on all ranks together. The floats it returns, and so the decisions taken from them, are equal
on all ranks.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

NORM_CHUNK = 1 << 18


@dataclass(frozen=True)
class GradientSlice:
    """Hold this rank's piece of one parameter's gradient.

    `shape` and `numel` describe the whole parameter. `grad` is the flat local slice (no padding); edits go
    into what `Gradients.slices` returns.
    `start` is the slice's offset in the flattened parameter, `scope` names what is clipped by a norm of its own.
    """

    name: str
    shape: tuple[int, ...]
    grad: Tensor
    start: int = 0
    scope: str = "default"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Gradients:
    """Measure a partitioned gradient exactly over all ranks, and scale it.

    `entries` lists every parameter in the same order on every rank. `all_reduce(tensor)` returns the
    tensor summed over the ranks that hold the slices; without it this process holds everything.

    The gradient is the entries' slices times the `factors` of their scopes: an optimizer multiplies while it reads.
    Statistics are remembered on the host until the slices change, so asking again costs nothing.
    """

    def __init__(
        self,
        entries: Iterable[GradientSlice],
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.entries, self.all_reduce = list(entries), all_reduce
        if not self.entries:
            raise ValueError("no parameter has a gradient; run the backward pass first")
        self.numel = sum(e.numel for e in self.entries)
        self.factors = dict.fromkeys((e.scope for e in self.entries), 1.0)
        self._known: dict[str, list[float]] = {}
        self.wide = torch.promote_types(self.entries[0].grad.dtype, torch.float32)

    # statistics

    def measure(self, *names: str) -> list[list[float]]:
        """Return a value for every parameter [P]: its L2 "norm", or its "mean_abs".

        What is not known yet travels in one collective and is read on the host at once.
        """
        missing = sorted(set(names) - self._known.keys())  # in the same order on every rank
        if missing:
            own = torch.stack([self._local_sums(statistic) for statistic in missing])
            for statistic, values in zip(missing, self.all_reduce(own).tolist()):
                if statistic == "norm":
                    values = [math.sqrt(value) for value in values]
                else:
                    values = [value / e.numel for value, e in zip(values, self.entries)]
                self._known[statistic] = values
        factors = [abs(self.factors[e.scope]) for e in self.entries]
        return [[x * f for x, f in zip(self._known[name], factors)] for name in names]

    def nonfinite(self) -> list[float]:
        """Return for every parameter how many of its elements are inf or nan [P]; one collective."""
        own = torch.stack([(~e.grad.isfinite()).sum() for e in self.entries])
        return self.all_reduce(own.double()).tolist()

    def _local_sums(self, statistic: str) -> Tensor:
        """Return this rank's sum of squares or of |g| for each parameter, float64 [P]."""
        grads = [e.grad for e in self.entries]
        order = 2.0 if statistic == "norm" else 1.0
        if grads[0].is_cuda:
            # a few kernels for all neighbours of one dtype; CUDA's reductions add in trees, so float32 is enough
            alike = (list(run) for _, run in groupby(grads, key=lambda grad: grad.dtype))
            parts = (torch._foreach_norm(run, order, dtype=self.wide) for run in alike)
            norms = tuple(chain.from_iterable(parts))
        else:
            # torch's CPU norm adds float32 numbers one after the other (on 10^8 elements the L2 norm comes out 1% and
            # the L1 norm 46% too small). Chunks of this size, copied to float64, fit into the processor's cache.
            chunks = (grad.split(NORM_CHUNK) for grad in grads)
            parts = (torch._foreach_norm(chunk, order, dtype=torch.float64) for chunk in chunks)
            norms = tuple(torch.linalg.vector_norm(torch.stack(part), order) for part in parts)
        return torch.stack(norms).double() ** order

    def norm(self, scope: str | None = None) -> float:
        """Return the L2 norm of all parameters, or of those of one scope."""
        (norms,) = self.measure("norm")
        own = (norm for norm, e in zip(norms, self.entries) if scope in (None, e.scope))
        return math.hypot(*own)

    def mean_abs(self) -> float:
        """Return the mean over parameters of each one's mean |g|, so that all count the same, whatever their size."""
        return statistics.fmean(*self.measure("mean_abs"))

    # changes, without a host synchronisation

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply all parameters, or those of one scope, by `factor`, which waits for the optimizer."""
        for group in self.factors:
            if scope in (None, group):
                self.factors[group] *= factor

    def slices(self) -> list[Tensor]:
        """Apply the factors, and return every parameter's local slice for a change in place."""
        self.apply_factors()
        return [e.grad for e in self.entries]

    def apply_factors(self) -> None:
        """Multiply every slice by its factor, for a change in place, which makes what was measured void."""
        scaled = [
            (e.grad, self.factors[e.scope]) for e in self.entries if self.factors[e.scope] != 1
        ]
        if scaled:
            torch._foreach_mul_(*map(list, zip(*scaled)))
        self.factors = dict.fromkeys(self.factors, 1.0)
        self._known.clear()
