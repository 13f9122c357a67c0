"""Products of the same rows with several matrices, to each of which an adapter may add a matrix of low rank.

    y = x W^T + bias + scale * (x a^T) b^T        a [r, D] and b [N, r] of an adapter

Matrices that are neighbours in memory (zero/resident.py) are multiplied as one, and so are all a's of the same rows.
Their results, [S, r] of each, are all that adapters keep for backward.

Shapes: S local tokens, D width, N rows of a matrix, r an adapter's rank.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import has_wide_products, wide_product
from ulysses.parallel.layout import Context


class Adapter(NamedTuple):
    """What is added to a matrix, scale * b a; `dropout` is the probability of dropping an input of a.

    Adapters of the same rows drop the same inputs.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


class Matrix(NamedTuple):
    """A matrix [N, D], what else its product needs, and the rows of it that are wanted; None stands for all.

    packed: what the bytes of a quantised weight stand for (models/quantized.py).
    """

    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None
    packed: Any = None
    chosen: Tensor | None = None

    @property
    def outputs(self) -> int:
        """How many rows are wanted."""
        if self.chosen is not None:
            return len(self.chosen)
        return len(self.weight) if self.packed is None else self.packed.shape[0]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the rows that are wanted."""
        weight = self.packed.unpack(self.weight, dtype) if self.packed else self.weight
        return weight if self.chosen is None else weight[self.chosen]

    def part(self, tensor: Tensor) -> Tensor:
        """Return those of all rows that are wanted."""
        return tensor if self.chosen is None else tensor[self.chosen]


class Sums:
    """The gradients of trained tensors, as sums over tiles: in float32 or better unless one tile is the `whole`."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._sums: dict[tuple[Tensor, ...], Tensor] = {}

    def add(self, tensor: Tensor | None, grad: Tensor | None) -> None:
        """Add to a tensor's gradient, if it is trained."""
        if tensor is not None and grad is not None and tensor.requires_grad:
            total = self._sums.get((tensor,))
            self._sums[tensor,] = grad if total is None else total.add_(grad)

    def add_product(self, tensors: Sequence[Tensor], grad: Tensor, rows: Tensor) -> None:
        """Add grad^T rows, in which the gradients of these tensors lie one below the other, if any is trained."""
        key = tuple(tensors)
        if any(t.requires_grad for t in key):
            self._sums[key] = add_product(self._sums.get(key), grad, rows, self.whole)

    def of(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of these tensors, of their dtypes."""
        found: dict[Tensor, Tensor] = {}
        for tensors, total in self._sums.items():
            found |= zip(tensors, total.split([len(t) for t in tensors]))
        return [found[t].to(t.dtype) for t in trained]


class Products:
    """The product of some rows with several matrices, once to its results and back; these lie side by side.

    Backward needs what forward has left here: made, scale * x a^T of all adapters, [S, r] of each, and the mask of what
    they drop of x, times what the rest is scaled by. Another tile may follow when that is done.

    trained: the tensors that are trained, as modules list them.
    """

    def __init__(self, *matrices: Matrix) -> None:
        self.matrices, self.widths = matrices, [m.outputs for m in matrices]
        self.adapters = [m.adapter for m in matrices if m.adapter is not None]
        own = ((m.weight, m.bias, *(m.adapter or ())[:2]) for m in matrices)
        self.trained = [
            t for of_one in own for t in of_one if t is not None and t.requires_grad
        ]
        self.mask: Tensor | None = None
        self.made: Any = None
        self.grads: Any = None  # scale * grad b of all adapters

    @property
    def kept(self) -> tuple[Tensor | None, Tensor | None]:
        """What backward needs; nodes save it, so that it counts among what a graph holds."""
        return self.made, self.mask

    def start(self, rows: Tensor) -> None:
        """Draw what adapters drop of such rows [S, D]; `forward` does it itself."""
        self.mask = self.made = None
        if any(x.dropout for x in self.adapters):
            self.mask = F.dropout(torch.ones_like(rows), self.adapters[0].dropout)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the results [S, N]."""
        biases = [None if m.bias is None else m.part(m.bias) for m in self.matrices]
        if not self.adapters:
            return products(x, self._dense(x.dtype), biases)
        self.start(x)
        self._make(x)
        out = x.new_empty(len(x), sum(self.widths))
        results, parts = list(out.split(self.widths, 1)), self._parts()
        # the small products come first, and the large one adds to them as it writes
        for m, bias, result in zip(self.matrices, biases, results):
            if m.adapter is None:
                result.copy_(x.new_zeros(1) if bias is None else bias)
            elif bias is None:
                torch.mm(next(parts), m.part(m.adapter.b).t(), out=result)
            else:
                torch.addmm(bias, next(parts), m.part(m.adapter.b).t(), out=result)
        dense = stacked(self._dense(x.dtype))
        for result, matrix in zip(results if len(dense) > 1 else [out], dense):
            result.addmm_(x, matrix.t())
        return results if len(results) > 1 else [out]

    def back(self, grad: Tensor) -> Tensor:
        """Return the gradient of x from that of the results."""
        total = None
        if self.adapters:
            own = zip(self.matrices, grad.split(self.widths, 1))
            each = [
                _scaled(g, m.part(m.adapter.b), m.adapter.scale) for m, g in own if m.adapter
            ]
            self.grads = torch.cat(each, 1)
            total = self.grads @ self._a
            if self.mask is not None:
                total.mul_(self.mask)
        return products_backward(grad, self._dense(grad.dtype), total)

    def gradients(self, grad: Tensor, x: Tensor, sums: Sums) -> None:
        """Add the gradients of what is trained; after `back`."""
        whole = all(m.chosen is None for m in self.matrices)
        if whole:
            sums.add_product([m.weight for m in self.matrices], grad, x)
        for m, own in zip(self.matrices, grad.split(self.widths, 1)):
            if not whole:
                _add_rows(sums, m, m.weight, own, x)
            if m.bias is not None and m.bias.requires_grad:
                sums.add(m.bias, _placed(column_sums(own), m, m.bias))
        if not self.adapters:
            return
        if self.made is None:
            self._make(x)
        parts = self._parts()
        for m, own in zip(self.matrices, grad.split(self.widths, 1)):
            if m.adapter is not None:
                _add_rows(sums, m, m.adapter.b, own, next(parts))
        sums.add_product([adapter.a for adapter in self.adapters], self.grads, self._kept(x))

    def _dense(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the matrices, those of bytes as neighbours in memory."""
        first, *others = self.matrices
        if not others or any(m.packed is None or m.chosen is not None for m in self.matrices):
            return [m.dense(dtype) for m in self.matrices]
        size = sum(self.widths), first.packed.shape[1]
        parts = torch.empty(size, dtype=dtype, device=first.weight.device).split(self.widths)
        return [m.packed.unpack(m.weight, dtype, part) for m, part in zip(self.matrices, parts)]

    @property
    def _a(self) -> Tensor:
        """All a's, one below the other."""
        whole, *others = stacked([x.a for x in self.adapters])
        return torch.cat([x.a for x in self.adapters]) if others else whole

    def _kept(self, x: Tensor) -> Tensor:
        return x if self.mask is None else x * self.mask

    def _make(self, x: Tensor) -> None:
        """Multiply by the a's, and scale before the result is rounded, so that b stays as it is."""
        self.made = _scaled(self._kept(x), self._a.t(), self.adapters[0].scale)

    def _parts(self) -> Iterator[Tensor]:
        """Return what each adapter made."""
        return iter(self.made.chunk(len(self.adapters), 1))


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


def _add_rows(sums: Sums, matrix: Matrix, tensor: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add grad^T rows to the gradient of a tensor, in those rows that were wanted."""
    if matrix.chosen is None:
        sums.add_product([tensor], grad, rows)
    elif tensor.requires_grad:
        sums.add(tensor, _placed(grad.t() @ rows, matrix, tensor))


def _placed(rows: Tensor, matrix: Matrix, tensor: Tensor) -> Tensor:
    """Return the gradient of a whole tensor from that of the rows that were wanted."""
    if matrix.chosen is None:
        return rows
    return rows.new_zeros(tensor.shape).index_copy_(0, matrix.chosen, rows)


def stacked(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return one view over matrices [N, D] that lie one after the other in memory, or else the matrices."""
    first = matrices[0]
    end = first.storage_offset()
    for m in matrices:
        same_memory = m.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not m.is_contiguous() or not same_memory or m.storage_offset() != end:
            return matrices
        end += m.numel()
    return [first.as_strided((sum(map(len, matrices)), first.shape[1]), first.stride())]


def products(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Any]) -> list[Tensor]:
    """Return x W^T + b of each matrix and bias; those of stacked matrices are parts of one product."""
    whole, *others = stacked(matrices)
    if others or len(matrices) == 1:
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases)]
    bias = None if biases[0] is None else torch.cat(tuple(biases))
    return [*F.linear(x, whole, bias).split([len(m) for m in matrices], 1)]


def products_backward(
    grad: Tensor, matrices: Sequence[Tensor], total: Tensor | None = None
) -> Tensor:
    """Return the gradient of `products`' x, from those of its results side by side, added to `total` in place."""
    matrices = stacked(matrices)
    for part, matrix in zip(grad.split([len(m) for m in matrices], 1), matrices):
        total = part @ matrix if total is None else total.addmm_(part, matrix)
    assert total is not None
    return total


def linear(x: Tensor, *matrices: Matrix) -> tuple[Tensor, ...]:
    """Return the products [S, N] of rows x [S, D] with these matrices, of which the graph keeps no view."""
    own = Products(*matrices)
    return LinearNode.apply(x, own, *own.trained)


class LinearNode(torch.autograd.Function):
    """Do `linear`; keeps the rows if anything is trained."""

    @staticmethod
    def forward(
        ctx: Context[Products], x: Tensor, own: Products, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        results, chosen = own.forward(x), (m.chosen for m in own.matrices)
        ctx.save_for_backward(x if trained else None, *chosen, *own.kept)
        ctx.rest = own
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Products], *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *_), own, sums = ctx.saved_tensors, ctx.rest, Sums(whole=True)
        grad = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
        to_x = own.back(grad)
        if own.trained:
            own.gradients(grad, x, sums)
        return to_x, None, *sums.of(own.trained)


def column_sums(x: Tensor) -> Tensor:
    """Return the gradient of a bias, summed in float32 or better."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def add_product(total: Tensor | None, grad: Tensor, rows: Tensor, whole: bool) -> Tensor:
    """Return the sum of weights' gradients with grad.T @ rows added.

    It is kept in float32 or better unless one tile is the whole.
    """
    wide = rows.dtype if whole else torch.promote_types(rows.dtype, torch.float32)
    left = grad.t()
    if not has_wide_products(rows):
        left, rows = left.to(wide), rows.to(wide)
    return wide_product(left, rows, wide, total)
