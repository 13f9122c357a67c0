"""A Triton kernel that turns the codes of models/quantized.py into the matrix that they stand for, in one pass."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# what the codes of NF4 stand for, as bitsandbytes has them
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@triton.jit
def _nf4_kernel(codes, sizes, numbers, levels, out, count, BLOCK: tl.constexpr):  # noqa: N803
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < count
    code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    block = at // 32
    size = tl.load(sizes + block, mask=mask, other=0).to(tl.int32)
    outer = tl.load(numbers + 257 + block // 256, mask=mask, other=0.0)
    largest = tl.load(numbers + 1 + size) * outer + tl.load(numbers)
    high, low = tl.load(levels + (code >> 4)), tl.load(levels + (code & 15))
    both = tl.interleave(high * largest, low * largest)
    at = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(out + at, both.to(out.dtype.element_ty), mask=at < 2 * count)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


def dequantize(codes: Tensor, sizes: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Write the matrix into contiguous `out`; every product and sum is rounded by itself, as in bitsandbytes."""
    count, block = len(codes), 1024
    with torch.cuda.device(out.device):
        _nf4_kernel[(triton.cdiv(count, block),)](
            codes,
            sizes,
            numbers,
            _levels(out.device),
            out,
            count,
            BLOCK=block,
            enable_fp_fusion=False,
        )
