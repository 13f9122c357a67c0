# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""A Triton kernel of adapters' backward pass: both products that read the gradient of a result, in one pass over it.

Shapes: S rows, N columns of the result, r the adapter's rank.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

COLUMNS, ROWS = 256, 64  # of a tile

if triton is not None:

    @triton.jit
    def _narrow_kernel(
        grad, b, made, to_made, to_b, rows, grad_row, made_row, rank, scale,
        WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
        RANK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
        column, inner = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
        is_column, is_rank = column < WIDTH, inner < rank
        place = column[:, None] * rank + inner[None, :]
        right = tl.load(b + place, mask=is_column[:, None] & is_rank[None, :], other=0.0)
        total = tl.zeros((RANK, COLUMNS), dtype=tl.float32)
        for step in range(STEPS):
            row = (group * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
            narrow = (row < rows) & is_rank[None, :]
            at = grad + row * grad_row + column[None, :]
            g = tl.load(at, mask=(row < rows) & is_column[None, :], other=0.0)
            u = tl.load(made + row * made_row + inner[None, :], mask=narrow, other=0.0)
            part = tl.dot(g, right, input_precision=PRECISION) * scale
            tl.store(to_made + (block * rows + row) * rank + inner[None, :], part, mask=narrow)
            total += tl.dot(tl.trans(u), g, input_precision=PRECISION)
        place = (group * WIDTH + column[None, :]) * rank + inner[:, None]
        tl.store(to_b + place, total, mask=is_column[None, :] & is_rank[:, None])


def narrow_backward(
    grad: Tensor, b: Tensor, made: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return scale * grad b [S, r] and grad^T made [N, r], in float32, of grad [S, N], b [N, r] and made [S, r].

    Rows of grad and made are dense, b is contiguous.
    """
    (rows, width), rank = grad.shape, b.shape[1]
    steps = 16 if width >= 4096 else 4
    blocks, groups = triton.cdiv(width, COLUMNS), triton.cdiv(rows, steps * ROWS)
    to_made = torch.empty(blocks, rows, rank, dtype=torch.float32, device=grad.device)
    to_b = torch.empty(groups, width, rank, dtype=torch.float32, device=grad.device)
    with torch.cuda.device(grad.device):
        _narrow_kernel[blocks, groups](
            grad, b, made, to_made, to_b, rows, grad.stride(0), made.stride(0), rank, scale,
            WIDTH=width, COLUMNS=COLUMNS, ROWS=ROWS, STEPS=steps,
            RANK=max(16, triton.next_power_of_2(rank)),
            PRECISION="ieee" if grad.dtype == torch.float32 else "tf32", num_warps=8,
        )  # fmt: skip
    return to_made.sum(0), to_b.sum(0)
