# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""Average every rank's copy of a gradient, in one pass over memory where Triton is."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_BLOCK = 2048

if triton is not None:

    @triton.jit
    def _average_kernel(
        copies, target, count, W: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        total = tl.load(copies + at, mask).to(tl.float32)
        for r in tl.static_range(1, W):
            total += tl.load(copies + r * count + at, mask).to(tl.float32)
        total /= W
        if ADD:
            total += tl.load(target + at, mask)
        tl.store(target + at, total, mask)


def average(copies: Tensor, target: Tensor, *, add: bool) -> None:
    """Write the mean over the first axis of contiguous copies [W, n], in float32, to a target [n], or add it."""
    if triton is not None and copies.is_cuda:
        blocks = triton.cdiv(len(target), _BLOCK)
        if blocks:
            _average_kernel[(blocks,)](
                copies, target, len(target), W=len(copies), ADD=add, BLOCK=_BLOCK, num_warps=8
            )
    elif add:
        target.add_(copies.mean(0, dtype=torch.float32))
    else:
        torch.mean(copies, 0, dtype=torch.float32, out=target)
