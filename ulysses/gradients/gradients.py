"""The gradient of one optimizer step, wherever its pieces are.

    parameter a  [=========|=====]        one flat slice per parameter and rank (possibly empty), in the same order
    parameter b  [==|============]        on every rank; statistics are sums over slices, then ONE all-reduce
                  rank 0    rank 1

Shapes: P parameters, R rows of all parameters together (a matrix's first axis; a vector is one row).
Every method is called on all ranks together. The floats it returns, and so the decisions taken from them, are equal
on all ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ulysses.parallel.random_keys import seed_of

ORDERS = {"norm": 2.0, "mean_abs": 1.0, "max_abs": math.inf}  # statistic -> order of a slice's norm
NORM_RUN = 1024
NOISE_BLOCK = 65_536
BLOCKS_TOGETHER = 64  # noise blocks in one buffer, 16 MiB


@dataclass(frozen=True)
class GradientSlice:
    """Hold this rank's piece of one parameter's gradient.

    shape and numel describe the whole parameter, `grad` is the flat local slice (no padding) that edits write into,
    `start` its offset in the flattened parameter, `group` the scope that the parameter belongs to, `weight` the
    parameter's own values in the same slice, or None where nobody needs them.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    grad: Tensor
    start: int = 0
    group: str = "default"
    weight: Tensor | None = None

    @property
    def rows(self) -> int:
        """The first axis of a matrix; a vector is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1


class Gradients:
    """Measure a partitioned gradient exactly over all ranks, and edit it in place.

    `entries` lists every parameter in the same order on every rank. `all_reduce(tensor, "sum" | "max")` returns the
    tensor reduced over the ranks that hold the slices; None means that this process holds everything. Statistics are
    remembered on the host until an edit, so asking again costs nothing.
    """

    def __init__(
        self,
        entries: Sequence[GradientSlice],
        all_reduce: Callable[[Tensor, str], Tensor] | None = None,
    ) -> None:
        self.entries = list(entries)
        self._all_reduce = all_reduce or (lambda tensor, op: tensor)
        self._measured: dict[str, list[float]] = {}  # reduced sums (or maxima), one per parameter

    def __iter__(self) -> Iterator[GradientSlice]:
        return iter(self.entries)

    @property
    def numel(self) -> int:
        return sum(e.numel for e in self.entries)

    @property
    def scopes(self) -> list[str]:
        return list(dict.fromkeys(e.group for e in self.entries))

    # statistics

    def measure(self, *statistics: str) -> None:
        """Measure "norm", "mean_abs", "max_abs" or "nonfinite" of all parameters, unless they are known.

        All sums travel in one collective and are read on the host at once.
        """
        missing = [s for s in dict.fromkeys(statistics) if s not in self._measured]
        for op in ("sum", "max"):
            chosen = [s for s in missing if (s == "max_abs") == (op == "max")]
            if chosen:
                local = torch.stack([_local_statistic(self.entries, s) for s in chosen])
                self._measured |= zip(chosen, self._all_reduce(local, op).tolist())

    def _values(self, statistic: str) -> list[float]:
        self.measure(statistic)
        return self._measured[statistic]

    def parameter_norms(self) -> list[float]:
        """Return every parameter's L2 norm [P]."""
        return [math.sqrt(square) for square in self._values("norm")]

    def parameter_mean_abs(self) -> list[float]:
        """Return every parameter's mean |g| [P]."""
        return [total / max(e.numel, 1) for total, e in zip(self._values("mean_abs"), self)]

    def nonfinite_counts(self) -> list[float]:
        """Return how many elements of every parameter are inf or nan [P]."""
        return self._values("nonfinite")

    def norm(self, scope: str | None = None) -> float:
        """Return the L2 norm of all parameters, or of those of one scope."""
        squares = zip(self._values("norm"), self)
        return math.sqrt(sum(square for square, e in squares if scope in (None, e.group)))

    def mean_abs(self) -> float:
        """Return the mean over parameters of each one's mean |g|, so that all count the same, whatever their size."""
        return sum(self.parameter_mean_abs()) / max(len(self.entries), 1)

    def max_abs(self) -> float:
        """Return the largest |g|."""
        found = self._values("max_abs")
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    # edits: in place, without a host synchronisation

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply all parameters, or those of one scope, by `factor`; 1 changes nothing."""
        self.scale_parameters([factor if scope in (None, e.group) else 1.0 for e in self])

    def scale_parameters(self, factors: Sequence[float]) -> None:
        """Multiply each parameter by its own factor [P], which must be the same on all ranks; 1 changes nothing."""
        if any(factor != 1.0 for factor in factors):
            pairs = zip(self, factors, strict=True)
            chosen = [(e.grad, f) for e, f in pairs if f != 1.0 and e.grad.numel()]
            if chosen:
                torch._foreach_mul_([g for g, _ in chosen], [float(f) for _, f in chosen])
            self._measured.clear()

    def add_noise(self, sigma: float, *, seed: int, step: int) -> None:
        """Add N(0, sigma^2) noise that depends on (seed, step, parameter name, place), never on the partitioning."""
        if sigma:
            for entry in self:
                _add_noise(entry, sigma, seed, step)
            self._measured.clear()

    def center(self) -> float:
        """Subtract from every row of a matrix its mean (over all axes but the first) and return the norm removed.

        Vectors are left alone. One all-reduce of the row sums makes the means exact although rows lie on several ranks.
        """
        matrices = [e for e in self if len(e.shape) > 1 and e.numel]
        if not matrices:
            return 0.0
        grads = [e.grad for e in matrices]
        sums = self._all_reduce(_row_sums(matrices, grads), "sum")
        means = sums.clone()
        torch._foreach_div_(
            means.split([e.rows for e in matrices]), [e.numel / e.rows for e in matrices]
        )
        for part, mean in _row_parts(matrices, grads, means.to(_wide_dtype(grads))):
            part.sub_(mean[:, None])
        self._measured.clear()
        return float((sums * means).sum().sqrt())

    def row_norms(self) -> tuple[Tensor, Tensor]:
        """Return the L2 norms of all rows' weights and gradients, float64 [R] each, by one collective.

        Raises ValueError where the entries hold no weights.
        """
        weights = [e.weight for e in self if e.weight is not None]
        if len(weights) != len(self.entries):
            raise ValueError(
                "the norms of the weights' rows are needed, but these gradients were made without weights; "
                "give every GradientSlice its weight"
            )
        tensors = (weights, [e.grad for e in self])
        squares = torch.stack([_row_sums(self.entries, t, squared=True) for t in tensors])
        weight_norms, gradient_norms = self._all_reduce(squares, "sum").sqrt()
        return weight_norms, gradient_norms

    def scale_rows(self, factors: Tensor) -> None:
        """Multiply every row by its factor [R]."""
        grads = [e.grad for e in self]
        for part, factor in _row_parts(self.entries, grads, factors.to(_wide_dtype(grads))):
            part.mul_(factor[:, None])
        self._measured.clear()


class TorchGradients(Gradients):
    """Use the `.grad` of plain torch parameters: `TorchGradients(model.named_parameters())`.

    Every process holds whole gradients (one process, or replicas that are already averaged), so nothing is reduced.
    Parameters that are frozen or have no gradient are left out. `groups` maps names to scopes (those not listed are in
    "default").
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


def _local_statistic(entries: Sequence[GradientSlice], statistic: str) -> Tensor:
    """Return this rank's share, float64 [P]: squares, |g| or bad elements summed, or the largest |g|."""
    if not entries:
        return torch.zeros(0, dtype=torch.float64)
    if statistic == "nonfinite":
        return torch.stack([(~torch.isfinite(e.grad)).sum() for e in entries]).double()
    grads, order = [e.grad for e in entries if e.grad.numel()], ORDERS[statistic]
    device = entries[0].grad.device
    if device.type == "cuda" and grads:
        # a few kernels for all slices; CUDA's reductions add in trees, so float32 is enough
        norms = torch._foreach_norm(grads, order, dtype=_wide_dtype(grads))
    else:
        norms = tuple(_accurate_norm(g, order) for g in grads)
    empty = torch.zeros((), dtype=norms[0].dtype if norms else torch.float64, device=device)
    found = iter(norms)
    values = torch.stack([next(found) if e.grad.numel() else empty for e in entries]).double()
    return values.square_() if statistic == "norm" else values


def _wide_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _accurate_norm(flat: Tensor, order: float) -> Tensor:
    """Return a norm as float64 without a float64 copy.

    torch's CPU norm adds float32 numbers one after the other (on 10^8 elements the L2 norm comes out 1% and the L1 norm
    46% too small), so it is only asked for short runs.
    """
    whole = flat.numel() // NORM_RUN * NORM_RUN
    runs = [flat[:whole].view(-1, NORM_RUN), flat[whole:].view(1, -1)]
    norms = [
        torch.linalg.vector_norm(run, order, dim=1, dtype=_wide_dtype([flat]))
        for run in runs
        if run.numel()
    ]
    return torch.linalg.vector_norm(torch.cat(norms).double(), order)


def _row_parts(
    entries: Sequence[GradientSlice], tensors: Sequence[Tensor], values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every part of the flat tensors that lies in whole rows or in one row, [rows, length], and its rows' values.

        row 3            row 4            row 5            row 6
        ......[ head ][ whole row ][ whole row ][ tail ]......       a slice may begin and end inside a row

    `tensors` are sliced like `entries`; `values` [R] holds a number for each row, and views of it are returned.
    """
    for entry, tensor, own in zip(entries, tensors, values.split([e.rows for e in entries])):
        length, size = max(entry.numel // entry.rows, 1), tensor.numel()
        head = min(size, -entry.start % length)
        tail = (size - head) % length
        ends, lengths = (head, size - tail, size), (head, length, tail)
        for first, last, part_length in zip((0, *ends), ends, lengths):
            if first < last:
                row = (entry.start + first) // length
                part = tensor[first:last].view(-1, part_length)
                yield part, own[row : row + len(part)]


def _row_sums(
    entries: Sequence[GradientSlice], tensors: Sequence[Tensor], *, squared: bool = False
) -> Tensor:
    """Return this rank's share of every row's sum (of squares), float64 [R], of flat tensors sliced like `entries`."""
    wide = _wide_dtype(tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    sums = torch.zeros(sum(e.rows for e in entries), dtype=wide, device=device)
    for part, own in _row_parts(entries, tensors, sums):  # a slice has at most one part of a row
        if squared:
            torch.linalg.vector_norm(part, dim=1, dtype=wide, out=own)
        else:
            torch.sum(part, dim=1, dtype=wide, out=own)
    return sums.double().square_() if squared else sums.double()


def _add_noise(entry: GradientSlice, sigma: float, seed: int, step: int) -> None:
    """Add Gaussian noise that is the same for every partitioning.

    A parameter's flattened elements fall into fixed blocks. Each block's noise comes from a generator of its own, is
    drawn whole, and is then cut to what this rank holds:

        blocks     |----- 0 -----|----- 1 -----|--- 2 (tail unused)
        rank 1              [=================]       draws 0, 1, 2 whole, uses the marked part

    So two ranks that share a block draw it twice and agree. Blocks are drawn into one buffer and added together: on a
    GPU the number of kernels is what this costs. The draw is float32 also for float64 gradients, so that the precision
    of a run does not change its noise.
    """
    grad, start, end = entry.grad, entry.start, entry.start + entry.grad.numel()
    if start == end:
        return
    blocks = range(start // NOISE_BLOCK, (end - 1) // NOISE_BLOCK + 1)
    size = min(len(blocks), BLOCKS_TOGETHER) * NOISE_BLOCK
    noise = torch.empty(size, dtype=torch.float32, device=grad.device)
    generator = torch.Generator(device=grad.device)
    for i in range(0, len(blocks), BLOCKS_TOGETHER):
        drawn = blocks[i : i + BLOCKS_TOGETHER]
        for block, row in zip(drawn, noise.split(NOISE_BLOCK)):
            generator.manual_seed(seed_of(seed, step, entry.name, block))
            row.normal_(generator=generator)
        first = drawn[0] * NOISE_BLOCK
        low, high = max(start, first), min(end, first + len(drawn) * NOISE_BLOCK)
        piece = grad[low - start : high - start]
        piece.add_(noise[low - first : high - first].to(_wide_dtype([grad])), alpha=sigma)
