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
from torch import Tensor, nn

NORM_CHUNK = 1 << 18


@dataclass(frozen=True)
class GradientSlice:
    """Hold this rank's piece of one parameter's gradient.

    Args:
        shape: of the whole parameter.
        grad: the flat local slice, without padding. Gradient policies change what `Gradients.slices` returns.
        start: the slice's offset in the flattened parameter.
        scope: the group of parameters, such as PPO's policy or value, that is clipped by its own norm.
    """

    name: str
    shape: tuple[int, ...]
    grad: Tensor
    start: int = 0
    scope: str = "default"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


class Gradients:
    """Measure a partitioned gradient exactly over all ranks, and scale it.

    The gradient is the entries' slices times the `factors` of their scopes: an optimizer multiplies while it reads.
    Statistics are remembered on the host until the slices change, so asking again costs nothing.

    Args:
        entries: every parameter's slice, in the same order on every rank.
        all_reduce: returns a tensor summed over the ranks that hold the slices; by default this process holds all.

    Attributes:
        numel: elements of all parameters, over all ranks.
        sum_dtype: float32, or the first slice's dtype where that is wider.
    """

    def __init__(
        self,
        entries: Iterable[GradientSlice],
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.entries = list(entries)
        self.all_reduce = all_reduce
        if not self.entries:
            raise ValueError("no parameter has a gradient; run the backward pass first")
        self.numel = sum(e.numel for e in self.entries)
        self.factors = dict.fromkeys((e.scope for e in self.entries), 1.0)
        self._statistics: dict[str, list[float]] = {}
        # over all ranks, of statistics that the host has not read yet
        self._sums: dict[str, Tensor] = {}
        self.sum_dtype = torch.promote_types(self.entries[0].grad.dtype, torch.float32)

    # ---------------------------------------------------------------- statistics

    def begin_to_measure(self, *names: str) -> None:
        """Launch what `measure` of these names needs, so that a GPU computes it while the host does something else."""
        # sorted, so that the order is the same on every rank
        missing = sorted(set(names) - self._statistics.keys() - self._sums.keys())
        if missing:
            local_sums = torch.stack([self._local_sums(statistic) for statistic in missing])
            self._sums |= zip(missing, self.all_reduce(local_sums))

    def measure(self, *names: str) -> list[list[float]]:
        """Return a value for every parameter [P]: its L2 "norm", or its "mean_abs".

        Statistics that are not remembered take one collective, and the host waits for it.
        """
        self.begin_to_measure(*names)
        for statistic, sums in self._sums.items():
            if statistic == "norm":
                values = [math.sqrt(value) for value in sums.tolist()]
            else:
                values = [value / e.numel for value, e in zip(sums.tolist(), self.entries)]
            self._statistics[statistic] = values
        self._sums.clear()
        factors = [abs(self.factors[e.scope]) for e in self.entries]
        return [[x * f for x, f in zip(self._statistics[name], factors)] for name in names]

    def nonfinite(self) -> list[float]:
        """Return for every parameter how many of its elements are inf or nan [P]; one collective."""
        counts = torch.stack([(~e.grad.isfinite()).sum() for e in self.entries])
        return self.all_reduce(counts.double()).tolist()

    def _local_sums(self, statistic: str) -> Tensor:
        """Return this rank's sum of squares or of |g| for each parameter, float64 [P]."""
        grads = [e.grad for e in self.entries]
        order = 2.0 if statistic == "norm" else 1.0
        if grads[0].is_cuda:
            # a few kernels for each run of slices of one dtype; CUDA's reductions add in trees, so float32 is enough
            runs = (list(run) for _, run in groupby(grads, key=lambda grad: grad.dtype))
            parts = (torch._foreach_norm(run, order, dtype=self.sum_dtype) for run in runs)
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
        return math.hypot(*(n for n, e in zip(norms, self.entries) if scope in (None, e.scope)))

    def mean_abs(self) -> float:
        """Return the mean over parameters of their mean |g|: a small parameter counts as much as a large one."""
        return statistics.fmean(*self.measure("mean_abs"))

    # ---------------------------------------------------------------- changes, for which the host does not wait

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply the gradient, or that of one scope, by `factor`, which the optimizer will apply."""
        for group in self.factors:
            if scope in (None, group):
                self.factors[group] *= factor

    def slices(self) -> list[Tensor]:
        """Apply the factors, and return every parameter's local slice, to be changed in place."""
        self.apply_factors()
        return [e.grad for e in self.entries]

    def apply_factors(self) -> None:
        """Multiply every slice by its factor, and forget the statistics, because the slices are about to change."""
        for scope, factor in self.factors.items():
            if factor != 1:
                grads = [e.grad for e in self.entries if e.scope == scope]
                torch._foreach_mul_(grads, factor)
        self.factors = dict.fromkeys(self.factors, 1.0)
        self._statistics.clear()
        self._sums.clear()


class TorchGradients(Gradients):
    """Use the `.grad` of plain torch parameters: `TorchGradients(model.named_parameters())`.

    Every process holds whole gradients (one process, or replicas that are already averaged), so nothing is reduced.
    Parameters that are frozen or have no gradient are left out. Raises ValueError for a sharded or sparse gradient.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        entries = []
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter.grad is not None:
                if type(parameter.grad) is not Tensor or parameter.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {name} is sharded or sparse but TorchGradients takes whole, dense ones; "
                        "give Gradients this process's slices and how to add them up"
                    )
                parameter.grad = parameter.grad.contiguous()
                grad = parameter.grad.detach().view(-1)
                entries.append(GradientSlice(name, parameter.shape, grad))
        super().__init__(entries)

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply at once, in place: torch's optimizers take no factor."""
        super().scale(factor, scope)
        if factor != 1:
            self.apply_factors()
