"""The gradient of one optimizer step, wherever its pieces lie.

    parameter a  [=========|=====]        one flat slice per parameter and rank (possibly empty), in the same order
    parameter b  [==|============]        on every rank; statistics are sums over slices, then ONE all-reduce
                  rank 0    rank 1

Shapes: P parameters, R rows of all parameters together (a matrix's first axis; a vector is one row).
Every method is called on all ranks together. Floats it returns are equal on all ranks, and so are
decisions taken from them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ulysses.gradients.noise import add_block_noise
from ulysses.gradients.rows import (
    GradientSlice,
    row_counts,
    row_starts,
    row_sums,
    scale_rows,
    subtract_rows,
)

NORM_RUN = 1024
ORDERS = {
    "norm": 2.0,
    "mean_abs": 1.0,
    "max_abs": math.inf,
}  # what is measured -> the order of the slices' norms


@dataclass
class _Shared:
    """What a view and its scoped views have in common: all parameters, and what is known of them until the next edit."""

    entries: list[GradientSlice]
    memo: dict[str, list[float]] = field(
        default_factory=dict
    )  # reduced sums (or maxima), one per parameter
    changed: bool = False


class Gradients:
    """Give exact global statistics of a partitioned gradient, and edit it in place.

    `entries` lists every parameter in the same order on every rank. `all_reduce(tensor, "sum" | "max")` returns the
    tensor reduced over the ranks that hold the slices; None means that this process holds everything. Statistics are
    taken of all parameters at once and remembered on the host until an edit, so asking again, also for a group of
    parameters, costs nothing. `refresh` is called once after a step's edits, for engines that keep figures derived from
    the gradient.
    """

    def __init__(
        self,
        entries: Sequence[GradientSlice],
        all_reduce: Callable[[Tensor, str], Tensor] | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self.entries = list(entries)
        self._all_reduce = all_reduce
        self._refresh = refresh
        self._shared = _Shared(self.entries)
        self._places: list[int] | None = None  # where a scoped view's parameters stand among all

    def __iter__(self) -> Iterator[GradientSlice]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def scoped(self, groups: Collection[str]) -> "Gradients":
        """Return a view of the parameters in `groups`; ValueError if none is."""
        everything = self._shared.entries
        places = [i for i, e in enumerate(everything) if e.group in groups]
        if not places:
            known = ", ".join(sorted({e.group for e in everything}))
            raise ValueError(
                f"parameter groups {sorted(groups)} hold no parameter; this run has {known}"
            )
        view = Gradients([everything[i] for i in places], self._all_reduce, None)
        view._shared, view._places = self._shared, places
        return view

    @property
    def changed(self) -> bool:
        """Tell whether an edit happened since construction or the last `refresh`."""
        return self._shared.changed

    def refresh(self) -> None:
        """Let the engine bring figures derived from the gradient up to date, if anything was edited."""
        if self._shared.changed and self._refresh is not None:
            self._refresh()
        self._shared.changed = False

    @property
    def names(self) -> list[str]:
        return [e.name for e in self.entries]

    @property
    def numel(self) -> int:
        return sum(e.numel for e in self.entries)

    # statistics: one collective and one read on the host each, or together

    def measure(self, *statistics: str) -> None:
        """Take "norm", "mean_abs", "max_abs" or "nonfinite" of all parameters together, unless they are known.

        All sums travel in one collective and are read on the host at once; what is asked later is then known.
        """
        missing = [s for s in dict.fromkeys(statistics) if s not in self._shared.memo]
        for op in ("sum", "max"):
            chosen = [s for s in missing if (s == "max_abs") == (op == "max")]
            if chosen:
                local = torch.stack([_local(self._shared.entries, s) for s in chosen])
                self._shared.memo.update(zip(chosen, self._reduce(local, op).tolist()))

    def parameter_norms(self) -> Tensor:
        """Return every parameter's L2 norm, float64 [P], on the host."""
        return torch.tensor(self._measured("norm"), dtype=torch.float64).sqrt()

    def parameter_mean_abs(self) -> Tensor:
        """Return every parameter's mean |g|, float64 [P], on the host."""
        return torch.tensor(self._means(), dtype=torch.float64)

    def nonfinite_counts(self) -> Tensor:
        """Return how many elements of every parameter are inf or nan, float64 [P], on the host."""
        return torch.tensor(self._measured("nonfinite"), dtype=torch.float64)

    def norm(self) -> float:
        """Return the global L2 norm."""
        return math.sqrt(sum(self._measured("norm")))

    def mean_abs(self) -> float:
        """Return the mean over parameters of each one's mean |g|, so that all count the same, whatever size."""
        return sum(self._means()) / max(len(self), 1)

    def element_mean_abs(self) -> float:
        """Return the mean of |g| over all elements."""
        return sum(self._measured("mean_abs")) / max(self.numel, 1)

    def max_abs(self) -> float:
        """Return the largest |g|."""
        found = self._measured("max_abs")
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    def nonfinite_count(self) -> int:
        """Return how many elements are inf or nan."""
        return int(sum(self._measured("nonfinite")))

    # edits: in place, no host synchronisation

    def scale(self, factor: float) -> None:
        """Multiply everything by `factor`."""
        if grads := self._filled():
            torch._foreach_mul_(grads, factor)
        self._edited()

    def scale_parameters(self, factors: Sequence[float]) -> None:
        """Multiply each parameter's gradient by its own factor [P]; all ranks must pass the same factors."""
        if len(factors) != len(self.entries):
            raise ValueError(
                f"{len(factors)} factors were given for {len(self.entries)} parameters; give one each"
            )
        chosen = [(e.grad, f) for e, f in zip(self.entries, factors) if f != 1.0 and e.grad.numel()]
        if chosen:
            torch._foreach_mul_([g for g, _ in chosen], [float(f) for _, f in chosen])
        self._edited()

    def clip_norm(self, max_norm: float, *, eps: float = 1e-6) -> float:
        """Scale by min(1, max_norm / (norm + eps)), as torch's clip_grad_norm_ does, and return the factor.

        A norm that is not finite changes nothing and returns nan.
        """
        norm = self.norm()
        if not math.isfinite(norm):
            return math.nan
        factor = max_norm / (norm + eps)
        if factor >= 1:
            return 1.0
        self.scale(factor)
        return factor

    def add_noise(self, sigma: float, *, seed: int, step: int) -> None:
        """Add N(0, sigma^2) noise that depends on (seed, step, parameter name, place), never on the partitioning."""
        for e in self.entries:
            add_block_noise(e.grad, e.start, sigma, seed=seed, step=step, name=e.name)
        self._edited()

    def center(self) -> float:
        """Subtract from every row of a matrix its mean (over all axes but the first) and return the norm removed.

        Rows may straddle ranks; one all-reduce of the row sums makes the means exact. Vectors are left alone.
        """
        matrices = [e for e in self.entries if len(e.shape) > 1 and e.numel]
        if not matrices:
            return 0.0
        sums = self._reduce(row_sums([e.grad for e in matrices], matrices), "sum")
        lengths = torch.tensor(
            [e.numel / e.shape[0] for e in matrices], dtype=sums.dtype, device=sums.device
        )
        lengths = lengths.repeat_interleave(
            row_counts(matrices, sums.device), output_size=sums.numel()
        )
        means = sums / lengths
        subtract_rows(matrices, means)
        self._edited()
        return float((means.square() * lengths).sum().sqrt())

    def row_norms(self) -> tuple[Tensor, Tensor]:
        """Return the L2 norms of all rows' weights and gradients, float64 [R] each, by one collective.

        Raises ValueError where the view carries no weights.
        """
        weights = [e.weight for e in self.entries if e.weight is not None]
        if len(weights) != len(self.entries):
            raise ValueError(
                "row norms of the weights were asked for, but this view of the gradients carries no weights"
            )
        both = torch.stack(
            [
                row_sums(weights, self.entries, squares=True),
                row_sums([e.grad for e in self.entries], self.entries, squares=True),
            ]
        )
        norms = self._reduce(both, "sum").sqrt()
        return norms[0], norms[1]

    def row_slice(self, index: int) -> slice:
        """Return where parameter `index` stands in [R]."""
        starts = row_starts(self.entries)
        return slice(starts[index], starts[index + 1])

    def scale_rows(self, factors: Tensor) -> None:
        """Multiply every row by its factor [R]."""
        scale_rows(self.entries, factors)
        self._edited()

    # internals

    def _filled(self) -> list[Tensor]:
        return [e.grad for e in self.entries if e.grad.numel()]

    def _edited(self) -> None:
        self._shared.memo.clear()
        self._shared.changed = True

    def _reduce(self, local: Tensor, op: str) -> Tensor:
        return local if self._all_reduce is None else self._all_reduce(local, op)

    def _measured(self, statistic: str) -> list[float]:
        self.measure(statistic)
        values = self._shared.memo[statistic]
        return values if self._places is None else [values[i] for i in self._places]

    def _means(self) -> list[float]:
        return [
            total / max(e.numel, 1) for total, e in zip(self._measured("mean_abs"), self.entries)
        ]


def _local(entries: Sequence[GradientSlice], statistic: str) -> Tensor:
    """Return this rank's share of a statistic, float64 [P]: squares, |g| or bad elements summed, or the largest |g|."""
    if not entries:
        return torch.zeros(0, dtype=torch.float64)
    if statistic == "nonfinite":
        return torch.stack([(~torch.isfinite(e.grad)).sum() for e in entries]).double()
    grads, order = [e.grad for e in entries if e.grad.numel()], ORDERS[statistic]
    if (
        entries[0].grad.is_cuda
    ):  # a few kernels for all slices; CUDA's reductions add in trees, so float32 is enough
        wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        norms = torch._foreach_norm(grads, order, dtype=wide) if grads else ()
    else:
        norms = tuple(_accurate_norm(g, order) for g in grads)
    empty = torch.zeros(
        (), dtype=norms[0].dtype if norms else torch.float64, device=entries[0].grad.device
    )
    found = iter(norms)
    values = torch.stack([next(found) if e.grad.numel() else empty for e in entries]).double()
    return values.square_() if statistic == "norm" else values


def _accurate_norm(flat: Tensor, order: float) -> Tensor:
    """Return a norm as float64 without a float64 copy.

    torch's CPU norm adds float32 numbers one after the other (on 10^8 elements the L2 norm comes out 1% and the L1 norm
    46% too small), so it is only asked for short runs. CUDA's kernel adds in blocks anyway.
    """
    whole = flat.numel() // NORM_RUN * NORM_RUN
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    parts = (
        [torch.linalg.vector_norm(flat[:whole].view(-1, NORM_RUN), order, dim=1, dtype=wide)]
        if whole
        else []
    )
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], order, dtype=wide).view(1))
    return torch.linalg.vector_norm(torch.cat(parts).double(), order)


class TorchGradients(Gradients):
    """Look at the `.grad` of plain torch parameters: `TorchGradients(model.named_parameters())`.

    Every process holds whole gradients (one process, or replicas that are already averaged), so nothing is reduced.
    Parameters that are frozen or have no gradient are left out. `groups` maps names to parameter group names
    (those not listed are "default").
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        groups: dict[str, str] | None = None,
    ) -> None:
        entries = []
        for name, parameter in named_parameters:
            if not parameter.requires_grad or parameter.grad is None:
                continue
            if not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            entries.append(
                GradientSlice(
                    name=name,
                    shape=tuple(parameter.shape),
                    numel=parameter.numel(),
                    grad=parameter.grad.detach().view(-1),
                    group=(groups or {}).get(name, "default"),
                    weight=parameter.detach().reshape(-1),
                )
            )
        super().__init__(entries)
