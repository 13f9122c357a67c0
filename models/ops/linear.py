"""Products of rows with matrices; those of matrices that are neighbours in memory (zero/resident.py) are one.

Shapes: S local tokens, D width, N rows of a matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import has_wide_products, wide_product
from ulysses.parallel.layout import Context


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


def products(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Any] = (None, None)
) -> Sequence[Tensor]:
    """Return x W^T + b of each matrix and bias; those of stacked matrices are parts of one product."""
    whole, *others = stacked(matrices)
    if others:
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases)]
    bias = None if biases[0] is None else torch.cat(tuple(biases))
    return F.linear(x, whole, bias).split([len(m) for m in matrices], 1)


def products_backward(grad: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return the gradient of `products`' x, from those of its results side by side."""
    first, *others = matrices = stacked(matrices)
    part, *parts = grad.split([len(m) for m in matrices], 1)
    total = part @ first
    for part, matrix in zip(parts, others):
        total.addmm_(part, matrix)
    return total


class LinearNode(torch.autograd.Function):
    """Do torch's linear for rows x [S, D], with all rows of a matrix or with those that are numbered in `chosen`.

    Torch's own keeps a view of the weight, this keeps the weight.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, chosen)
        return F.linear(x, weight if chosen is None else weight[chosen], bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, chosen = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        used = weight if chosen is None else weight[chosen]
        grad_x = grad @ used if for_x else None
        grad_weight = grad.t() @ x if for_weight else None
        if grad_weight is not None and chosen is not None:
            grad_weight = torch.zeros_like(weight).index_copy_(0, chosen, grad_weight)
        return grad_x, grad_weight, column_sums(grad) if for_bias else None, None


def column_sums(x: Tensor) -> Tensor:
    """Return the gradient of a bias, summed in float32 or better."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def add_product(total: Tensor | None, grad: Tensor, rows: Tensor, whole: bool) -> Tensor:
    """Return the sum of weights' gradients with grad.T @ rows added.

    It is kept in float32 or better unless one tile is the whole.
    """
    wide = rows.dtype if whole else torch.promote_types(rows.dtype, torch.float32)
    left = grad.t()
    if not has_wide_products(rows):
        left, rows = left.to(wide), rows.to(wide)
    return wide_product(left, rows, wide, total)
