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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ulysses.parallel.random_keys import keyed_generator

NORM_CHUNK = 1 << 18
NOISE_BLOCK = 65_536
NOISE_BUFFER = 64 * NOISE_BLOCK  # 16 MiB


@dataclass(frozen=True)
class GradientSlice:
    """Hold this rank's piece of one parameter's gradient.

    shape and numel describe the whole parameter. `grad` is the flat local slice (no padding) that edits write into.
    `start` is the slice's offset in the flattened parameter, `group` the scope that the parameter belongs to.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    grad: Tensor
    start: int = 0
    group: str = "default"


class Gradients:
    """Measure a partitioned gradient exactly over all ranks, and edit it in place.

    `entries` lists every parameter in the same order on every rank. `all_reduce(tensor)` returns the
    tensor summed over the ranks that hold the slices; without it this process holds everything. Statistics are
    remembered on the host until an edit, so asking again costs nothing.

    With `defer`, `scale` only notes its factors, and whoever reads the slices next applies them: an optimizer takes
    them (`take_factors`) to multiply while it reads, anything else through iteration.
    """

    def __init__(
        self,
        entries: Iterable[GradientSlice],
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        *,
        defer: bool = False,
    ) -> None:
        self._entries = list(entries)
        if not self._entries:
            raise ValueError("no parameter has a gradient; run the backward pass first")
        self.numel = sum(e.numel for e in self._entries)
        self._all_reduce, self._defer = all_reduce, defer
        self._factors = dict.fromkeys((e.group for e in self._entries), 1.0)
        self._known: dict[str, list[float]] = {}
        self._wide = torch.promote_types(self._entries[0].grad.dtype, torch.float32)

    def __iter__(self) -> Iterator[GradientSlice]:
        factors = self.take_factors()
        self.scale_parameters([factors[e.group] for e in self._entries])
        return iter(self._entries)

    def take_factors(self) -> dict[str, float]:
        """Return what each scope's slices are still to be multiplied by, for the caller to do."""
        factors, self._factors = self._factors, dict.fromkeys(self._factors, 1.0)
        return factors

    # statistics

    def measure(self, *names: str) -> list[list[float]]:
        """Return a value for every parameter [P]: its L2 "norm", its "mean_abs", or its number of "nonfinite" elements.

        What is not known yet travels in one collective and is read on the host at once.
        """
        missing = sorted(set(names) - self._known.keys())  # in the same order on every rank
        if missing:
            own = torch.stack([self._local_sums(statistic) for statistic in missing])
            for statistic, values in zip(missing, self._all_reduce(own).tolist()):
                if statistic == "norm":
                    values = [math.sqrt(value) for value in values]
                elif statistic == "mean_abs":
                    values = [value / e.numel for value, e in zip(values, self)]
                self._known[statistic] = values
        return [self._known[statistic] for statistic in names]

    def _local_sums(self, statistic: str) -> Tensor:
        """Return this rank's sum of squares, of |g| or of bad elements for each parameter, float64 [P]."""
        grads = [e.grad for e in self]
        if statistic == "nonfinite":
            return torch.stack([(~grad.isfinite()).sum() for grad in grads]).double()
        order = 2.0 if statistic == "norm" else 1.0
        if grads[0].is_cuda:
            # a few kernels for all slices; CUDA's reductions add in trees, so float32 is enough
            norms = torch._foreach_norm(grads, order, dtype=self._wide)
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
        return math.hypot(*(norm for norm, e in zip(norms, self) if scope in (None, e.group)))

    def mean_abs(self) -> float:
        """Return the mean over parameters of each one's mean |g|, so that all count the same, whatever their size."""
        return statistics.fmean(*self.measure("mean_abs"))

    # edits: in place, without a host synchronisation

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply all parameters, or those of one scope, by `factor`; 1 changes nothing."""
        for group in self._factors:
            if scope in (None, group) and factor != 1.0:
                self._factors[group] *= factor
                self._known.clear()
        if not self._defer:
            iter(self)

    def scale_parameters(self, factors: Sequence[float]) -> None:
        """Multiply each parameter by its own factor [P], which must be the same on all ranks; 1 changes nothing."""
        scaled = [(e.grad, f) for e, f in zip(self._entries, factors, strict=True) if f != 1.0]
        if scaled:
            grads, chosen = zip(*scaled)
            torch._foreach_mul_(grads, chosen)
            self._known.clear()

    def add_noise(self, sigma: float, *, seed: int, step: int) -> None:
        """Add N(0, sigma^2) noise that depends on (seed, step, parameter name, place), never on the partitioning.

        A parameter's flattened elements fall into fixed blocks. Each block's noise comes from a generator of its own,
        is drawn whole, and is then cut to what this rank holds:

            blocks     |----- 0 -----|----- 1 -----|--- 2 (tail unused)
            rank 1              [=================]       draws 0, 1, 2 whole, uses the marked part

        So two ranks that share a block draw it twice and agree. Blocks are drawn into one buffer and added together: on
        a GPU the number of kernels is what this costs. The draw is float32 also for float64 gradients, so that the
        precision of a run does not change its noise.
        """
        if not sigma:
            return
        device = self._entries[0].grad.device
        noise = torch.empty(NOISE_BUFFER, dtype=torch.float32, device=device)
        for entry in self:
            block, skipped = divmod(entry.start, NOISE_BLOCK)
            rest = entry.grad
            while len(rest):
                piece = rest[: NOISE_BUFFER - skipped]
                needed = noise[: skipped + len(piece)]
                for drawn in noise.split(NOISE_BLOCK)[: math.ceil(len(needed) / NOISE_BLOCK)]:
                    drawn.normal_(
                        generator=keyed_generator(device, seed, step, entry.name, block)
                    )
                    block += 1
                piece.add_(needed[skipped:], alpha=sigma)
                rest = rest[len(piece) :]
                skipped = 0
        self._known.clear()

    def center(self) -> float:
        """Subtract from every row of a matrix its mean (over all axes but the first) and return the norm removed.

        Vectors are left alone. One all-reduce of the row sums makes the means exact although rows lie on several ranks.
        """
        matrices = [e for e in self if len(e.shape) > 1]
        if not matrices:
            return 0.0
        rows = [e.shape[0] for e in matrices]
        own = torch.zeros(sum(rows), dtype=self._wide, device=matrices[0].grad.device)
        for part, total in _row_parts(matrices, own):  # a slice has at most one part of a row
            torch.sum(part, dim=1, dtype=self._wide, out=total)
        sums = self._all_reduce(own.double())
        means = sums.clone()
        torch._foreach_div_(means.split(rows), [e.numel / e.shape[0] for e in matrices])
        for part, mean in _row_parts(matrices, means.to(self._wide)):
            part.sub_(mean[:, None])
        self._known.clear()
        return float((sums * means).sum().sqrt())


class TorchGradients(Gradients):
    """Use the `.grad` of plain torch parameters: `TorchGradients(model.named_parameters())`.

    Every process holds whole gradients (one process, or replicas that are already averaged), so nothing is reduced.
    Parameters that are frozen or have no gradient are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        entries = []
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                grad = parameter.grad.detach().view(-1)
                entries.append(GradientSlice(name, parameter.shape, len(grad), grad))
        super().__init__(entries)


def _row_parts(
    entries: Sequence[GradientSlice], values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every part of matrices' slices that lies in whole rows or in one row, [rows, length], and its rows' values.

        row 3            row 4            row 5            row 6
        ......[ head ][ whole row ][ whole row ][ tail ]......       a slice may begin and end inside a row

    `values` [R] holds a number for each row, and views of it are returned.
    """
    for entry, own in zip(entries, values.split([e.shape[0] for e in entries])):
        size = len(entry.grad)
        length = entry.numel // entry.shape[0]
        row = entry.start // length
        head = min(size, -entry.start % length)
        tail = (size - head) % length
        for part in entry.grad.split([head, size - head - tail, tail]):
            if len(part):
                part = part.view(-1, min(length, len(part)))
                yield part, own[row : row + len(part)]
                row += len(part)
