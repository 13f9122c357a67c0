"""The precision of all losses and of sums of matrix products: float32, or float64 for float64 inputs."""

import torch
from torch import Tensor


def at_least_float32(value: Tensor) -> Tensor:
    """Return `value` as float32, or unchanged if it is float32 or float64 already."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def has_wide_products(matrix: Tensor) -> bool:
    """Tell whether products of this half-precision matrix come out in float32: they do on a GPU."""
    return matrix.is_cuda and matrix.dtype.itemsize == 2


def wide_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """Return left @ right in `dtype`, added to `total` in place if there is one.

    Half-precision matrices on a GPU are multiplied into float32 there, and added up inside the kernel; elsewhere both
    matrices must have the `dtype`.
    """
    if left.dtype == dtype:
        return left @ right if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)
