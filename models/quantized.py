"""Frozen matrices of four bits, for LoRA: NF4 with double quantisation (QLoRA, 2305.14314).

An element is a code of 4 bits, and the largest size of a block of 64 a code of 8 bits in blocks of 256. A matrix is one
parameter of bytes, which ZeRO-3 partitions and gathers like any other; products dequantise it first:

    codes [n / 2] | codes of the sizes [n / 64] | float32: their mean, the table of sizes [256], block sizes

Shapes: S rows, D inputs, F outputs, n = F * D.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.modules import Linear
from models.ops.norm import triton_kernels

# bits of an element: its code, and its share of scales and their tables
BITS = 4 + 8 / 64 + 32 / 64 / 256
BLOCK, OUTER = 64, 256  # elements whose largest size is stored; and of these sizes


def packed_parts(shape: tuple[int, ...]) -> list[int]:
    """Return the bytes of codes, of codes of sizes, and of float32 numbers that matrices [..., F, D] take."""
    n = math.prod(shape)
    blocks = -(-n // BLOCK)
    return [-(-n // 2), blocks, 4 * (1 + 256 - (-blocks // OUTER))]


def pack(matrix: Tensor) -> Tensor:
    """Return the bytes of matrices [..., F, D], on their device."""
    from bitsandbytes.functional import quantize_4bit  # an optional dependency

    matrix = matrix.flatten(0, -2).contiguous()
    codes, state = quantize_4bit(
        matrix, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    sizes = state.state2
    numbers = state.offset.view(1), sizes.code, sizes.absmax
    return join_parts(codes, state.absmax, torch.cat([x.float() for x in numbers]))


def join_parts(*parts: Tensor) -> Tensor:
    """Lay tensors one after the other as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(
    data: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return the matrices [..., F, D] that the bytes stand for, in `out` if it is given."""
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=data.device)
    codes, sizes, numbers = split_parts(data, shape)
    if kernels := triton_kernels(out):
        kernels.dequantize_nf4(codes, sizes, numbers, out)
        return out
    import bitsandbytes  # noqa: F401 - registers torch.ops.bitsandbytes

    ops = torch.ops.bitsandbytes
    mean, table, outer = numbers.split([1, 256, len(numbers) - 257])
    largest = ops.dequantize_blockwise(sizes, outer, table, OUTER, torch.float32).add_(mean)
    # as rows of one block: bitsandbytes 0.50 is wrong on CPUs where a row ends within a block
    rows = ops.dequantize_4bit(
        codes[:, None], largest, BLOCK, "nf4", [len(largest), BLOCK], dtype
    )
    return out.copy_(rows.view(shape))


def split_parts(data: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the codes, the codes of sizes and the numbers; the last, small, as a copy if they are not aligned."""
    codes, sizes, numbers = data.split(packed_parts(shape))
    aligned = numbers if numbers.storage_offset() % 4 == 0 else numbers.clone()
    return codes, sizes, aligned.view(torch.float32)


def empty_packed(shape: tuple[int, ...]) -> Tensor:
    """Return uninitialised bytes for a matrix, or for several of one shape [N, F, D] as one below the other."""
    *rows, width = shape
    size = math.prod(shape)
    if size % BLOCK:
        raise ValueError(
            f"a matrix {math.prod(rows)} x {width} is no whole number of blocks of {BLOCK}"
        )
    return torch.empty(sum(packed_parts(shape)), dtype=torch.uint8)


class Packed(NamedTuple):
    """What bytes stand for: a matrix, or several, of such a shape."""

    shape: tuple[int, ...]

    def unpack(self, data: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the matrix, in `out` if it is given."""
        return unpack(data, self.shape, dtype, out)


class QuantizedLinear(Linear):
    """Multiply rows [S, D] by a frozen matrix of bytes; the bias keeps its dtype."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.packed = Packed((outputs, inputs))
        weight = empty_packed(self.packed.shape)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
