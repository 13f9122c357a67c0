"""Products of the same rows with several matrices, to each of which an adapter may add a matrix of low rank.

    y = x W^T + bias + scale * (x a^T) b^T        a [r, D] and b [N, r] of an adapter

Matrices that are neighbours in memory (zero/resident.py) are multiplied as one, and so are all a's of the same rows.
Their results, [S, r] of each, are all that adapters keep for backward.

Shapes: S local tokens, D width, N rows of a matrix, r an adapter's rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import has_wide_products, wide_product
from ulysses.parallel.layout import Context


class Adapter(NamedTuple):
    """What is added to a matrix, scale * b a; `dropout` is the probability of dropping an input of a."""

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
        return self.part(self.packed.unpack(self.weight, dtype) if self.packed else self.weight)

    def part(self, tensor: Tensor) -> Tensor:
        """Return those of all rows that are wanted."""
        return tensor if self.chosen is None else tensor[self.chosen]


# two matrices [S, r] and [r, N], whose product is to be added to one [S, N]
Addend = tuple[Tensor, Tensor] | None


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


class Inner:
    """What adapters make of rows, on the way to their results and back.

    masks: of what each drops, times what the others are scaled by. made: scale * x a^T of all, side by side [S, k r].
    grads: scale * grad b of all, side by side.
    """

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self.masks = masks
        self.made: Any = None
        self.grads: Any = None


class Products:
    """Matrices that multiply the same rows; their results, and the gradients of these, lie side by side.

    trained: the tensors that are trained, as modules list them.
    """

    def __init__(self, *matrices: Matrix) -> None:
        self.matrices = matrices
        self.widths = [m.outputs for m in matrices]
        adapted = [
            (x, number) for number, m in enumerate(matrices) if (x := m.adapter) is not None
        ]
        self.adapters, self.adapted = [x for x, _ in adapted], [i for _, i in adapted]
        each = ((m.weight, m.bias, *(m.adapter or ())[:2]) for m in matrices)
        self.trained = [t for own in each for t in own if t is not None and t.requires_grad]

    def start(self, rows: Tensor) -> Inner:
        """Draw what adapters drop of such rows [S, D]."""
        return Inner(
            [F.dropout(torch.ones_like(rows), x.dropout) for x in self.adapters if x.dropout]
        )

    def forward(self, x: Tensor, inner: Inner) -> list[Tensor]:
        """Return the results [S, N]."""
        results = self.plain(x, inner)
        for result, addend in zip(results, self.addends(inner)):
            if addend is not None:
                result.addmm_(*addend)
        return results

    def plain(self, x: Tensor, inner: Inner) -> list[Tensor]:
        """Return the results without what adapters add, which `addends` returns."""
        if self.adapters:
            self._make(x, inner)
        return products(x, self._dense(x.dtype), [m.bias for m in self.matrices])

    def addends(self, inner: Inner) -> list[Addend]:
        """Return what is to be added to each result."""
        found: list[Addend] = [None] * len(self.matrices)
        if self.adapters:
            parts = inner.made.chunk(len(self.adapters), 1)
            for number, b, part in zip(self.adapted, self._b, parts):
                found[number] = part, b.t()
        return found

    def back(self, grad: Tensor, inner: Inner) -> Tensor:
        """Return the gradient of x from that of the results."""
        total, addend = self.plain_back(grad, inner)
        return total if addend is None else total.addmm_(*addend)

    def plain_back(self, grad: Tensor, inner: Inner) -> tuple[Tensor, Addend]:
        """Return the gradient of x, and what is to be added to it."""
        total = products_backward(grad, self._dense(grad.dtype))
        if not self.adapters:
            return total, None
        own, scale = self._grads(grad), self.adapters[0].scale
        rank = self.adapters[0].a.shape[0]
        inner.grads = grad.new_empty(len(grad), rank * len(own))
        parts = inner.grads.split(rank, 1)
        for part, of_result, b in zip(parts, own, self._b):
            torch.addmm(part, of_result, b, beta=0, alpha=scale, out=part)
        if not inner.masks:
            return total, (inner.grads, self._a)
        for part, mask, adapter in zip(parts, inner.masks, self.adapters):
            total.addcmul_(part @ adapter.a, mask)
        return total, None

    def gradients(self, grad: Tensor, x: Tensor, inner: Inner, sums: Sums) -> None:
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
        if inner.made is None:
            self._make(x, inner)
        count = len(self.adapters)
        made, grads = inner.made.chunk(count, 1), inner.grads.chunk(count, 1)
        if not inner.masks:
            sums.add_product([adapter.a for adapter in self.adapters], inner.grads, x)
        for adapter, mask, back in zip(self.adapters, inner.masks, grads):
            sums.add_product([adapter.a], back, x * mask)
        owners = [self.matrices[number] for number in self.adapted]
        for m, adapter, own, part in zip(owners, self.adapters, self._grads(grad), made):
            _add_rows(sums, m, adapter.b, own, part)

    def _dense(self, dtype: torch.dtype) -> list[Tensor]:
        return [m.dense(dtype) for m in self.matrices]

    def _grads(self, grad: Tensor) -> list[Tensor]:
        """Return those parts of the results' gradients that belong to adapters."""
        parts = grad.split(self.widths, 1)
        return [parts[number] for number in self.adapted]

    @property
    def _a(self) -> Tensor:
        """All a's, one below the other."""
        whole, *others = stacked([x.a for x in self.adapters])
        return torch.cat([x.a for x in self.adapters]) if others else whole

    @property
    def _b(self) -> list[Tensor]:
        return [self.matrices[i].part(x.b) for i, x in zip(self.adapted, self.adapters)]

    def _make(self, x: Tensor, inner: Inner) -> None:
        """Multiply by the a's, and scale before the result is rounded, so that b stays as it is."""
        scale, nothing = self.adapters[0].scale, x.new_empty(1)
        if not inner.masks:
            inner.made = torch.addmm(nothing, x, self._a.t(), beta=0, alpha=scale)
            return
        parts = [
            torch.addmm(nothing, x * mask, adapter.a.t(), beta=0, alpha=scale)
            for mask, adapter in zip(inner.masks, self.adapters)
        ]
        inner.made = torch.cat(parts, 1)


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


def products_backward(grad: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return the gradient of `products`' x, from those of its results side by side."""
    first, *others = matrices = stacked(matrices)
    part, *parts = grad.split([len(m) for m in matrices], 1)
    total = part @ first
    for part, matrix in zip(parts, others):
        total.addmm_(part, matrix)
    return total


def linear(x: Tensor, *matrices: Matrix) -> tuple[Tensor, ...]:
    """Return the products [S, N] of rows x [S, D] with these matrices, of which the graph keeps no view."""
    own = Products(*matrices)
    return LinearNode.apply(x, own, *own.trained)


class LinearNode(torch.autograd.Function):
    """Do `linear`; keeps the rows if anything is trained."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Products, Inner]], x: Tensor, own: Products, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        inner = own.start(x)
        results = own.forward(x, inner)
        ctx.save_for_backward(x if trained else None, *(m.chosen for m in own.matrices))
        ctx.rest = own, inner
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[Products, Inner]], *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (x, *_), (own, inner) = ctx.saved_tensors, ctx.rest
        grad = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
        to_x = own.back(grad, inner)
        sums = Sums(whole=True)
        if own.trained:
            own.gradients(grad, x, inner, sums)
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
