"""Frozen matrices of four or eight bits, for LoRA.

    nf4    a code of 4 bits for each element, and for each block of 64 its largest size, which is again a code, of 8
           bits in blocks of 256 (QLoRA, 2305.14314). Products dequantise the matrix first
    fp8    e4m3 and a float32 scale for each row. GPUs multiply the codes themselves by rows that are rounded to e4m3
           too, whatever their own scale; elsewhere products dequantise the matrix first

A matrix is one parameter of bytes, which ZeRO-3 partitions and gathers like any other:

    nf4    codes [n / 2] | codes of the sizes [n / 64] | float32: their mean, the table of sizes [256], block sizes
    fp8    codes [n] | float32: scales [rows]

Shapes: S rows, D inputs, F outputs, n = F * D.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.modules import Linear
from models.ops import passes_triton
from ulysses.parallel.layout import Context

# bits of an element: its code, and its share of scales and their tables
BITS = {"nf4": 4 + 8 / 64 + 32 / 64 / 256, "fp8": 8.01}
BLOCK, OUTER = 64, 256  # elements whose largest size is stored; and of these sizes
FP8, FP8_MOST = torch.float8_e4m3fn, 448.0


def packed_parts(kind: str, shape: tuple[int, ...]) -> list[int]:
    """Return the bytes of codes, of codes of sizes, and of float32 numbers that matrices [..., F, D] take."""
    n = math.prod(shape)
    if kind == "fp8":
        return [n, 0, 4 * n // shape[-1]]
    blocks = -(-n // BLOCK)
    return [-(-n // 2), blocks, 4 * (1 + 256 - (-blocks // OUTER))]


def pack(kind: str, matrix: Tensor) -> Tensor:
    """Return the bytes of matrices [..., F, D], on their device."""
    matrix = matrix.flatten(0, -2)
    if kind == "fp8":
        scale = matrix.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MOST
        return join_parts((matrix.float() / scale).to(FP8), matrix.new_empty(0), scale)
    from bitsandbytes.functional import quantize_4bit  # an optional dependency

    codes, state = quantize_4bit(
        matrix.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    sizes = state.state2
    numbers = state.offset.view(1), sizes.code, sizes.absmax
    return join_parts(codes, state.absmax, torch.cat([x.float() for x in numbers]))


def join_parts(*parts: Tensor) -> Tensor:
    """Lay tensors one after the other as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(kind: str, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the matrices [..., F, D] that the bytes stand for."""
    codes, sizes, numbers = split_parts(kind, data, shape)
    if kind == "fp8":
        rows = codes.view(FP8).view(-1, shape[-1]).float() * numbers[:, None]
        return rows.to(dtype).view(shape)
    import bitsandbytes  # noqa: F401 - registers torch.ops.bitsandbytes

    ops = torch.ops.bitsandbytes
    mean, table, outer = numbers.split([1, 256, len(numbers) - 257])
    largest = ops.dequantize_blockwise(sizes, outer, table, OUTER, torch.float32).add_(mean)
    # as rows of one block: bitsandbytes 0.50 is wrong on CPUs where a row ends within a block
    rows = ops.dequantize_4bit(
        codes[:, None], largest, BLOCK, "nf4", [len(largest), BLOCK], dtype
    )
    return rows.view(shape)


def split_parts(kind: str, data: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the codes, the codes of sizes and the numbers; the last, small, as a copy, which is aligned."""
    codes, sizes, numbers = data.split(packed_parts(kind, shape))
    return codes, sizes, numbers.clone().view(torch.float32)


def empty_packed(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Return uninitialised bytes for a matrix, or for several of one shape [N, F, D] as one below the other."""
    *rows, width = shape
    size = math.prod(shape)
    if size % BLOCK:
        raise ValueError(
            f"a matrix {math.prod(rows)} x {width} is no whole number of blocks of {BLOCK}"
        )
    return torch.empty(sum(packed_parts(kind, shape)), dtype=torch.uint8)


class QuantizedLinear(Linear):
    """Multiply rows [S, D] by a frozen matrix of bytes; the bias keeps its dtype.

    Args:
        kind: "nf4" or "fp8".
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = inputs, outputs, kind
        self.weight = nn.Parameter(empty_packed(kind, self.shape), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix's own shape [F, D]."""
        return self.out_features, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        return QuantizedNode.apply(x, self.weight, self.bias, self)


LayoutContext = Context[tuple[str, tuple[int, int]]]  # kind and shape


class QuantizedNode(torch.autograd.Function):
    """Do `QuantizedLinear`; keeps nothing but the bytes."""

    @staticmethod
    def forward(
        ctx: LayoutContext,
        x: Tensor,
        data: Tensor,
        bias: Tensor | None,
        matrix: QuantizedLinear,
    ) -> Tensor:
        ctx.save_for_backward(data)
        ctx.rest = kind, shape = matrix.kind, matrix.shape
        if not _multiplies_codes(kind, x):
            return F.linear(x, unpack(kind, data, shape, x.dtype), bias)
        codes, _, scales = split_parts(kind, data, shape)
        out = _product(x, codes.view(FP8).view(shape).t(), None, scales)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: LayoutContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (data,), (kind, shape) = ctx.saved_tensors, ctx.rest
        if not _multiplies_codes(kind, grad):
            return grad @ unpack(kind, data, shape, grad.dtype), None, None, None
        codes, _, scales = split_parts(kind, data, shape)
        # the product wants the second matrix column by column
        columns = codes.view(shape).t().contiguous().view(FP8).t()
        return _product(grad, columns, scales, None), None, None, None


def _multiplies_codes(kind: str, x: Tensor) -> bool:
    return kind == "fp8" and x.is_cuda and x.dtype == torch.bfloat16


def _product(
    rows: Tensor, codes: Tensor, before: Tensor | None, after: Tensor | None
) -> Tensor:
    """Return (rows * before) @ codes * after in bfloat16, the rows rounded to e4m3."""
    flat = rows.reshape(-1, rows.shape[-1])
    rounded, scale = passes_triton.quantize_rows(flat, before, FP8, FP8_MOST)
    if after is None:
        after = scale.new_ones(codes.shape[1])
    out = torch._scaled_mm(
        rounded, codes, scale[:, None], after[None], out_dtype=rows.dtype, use_fast_accum=True
    )
    return out.view(*rows.shape[:-1], -1)


def dense(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights, or None in their place, with quantised ones as matrices of the other weights' dtype."""
    dtype = next(model.parameters()).dtype
    for name, weight in weights:
        if weight is not None and weight.dtype == torch.uint8:
            owner, _, last = name.rpartition(".")
            module: Any = model.get_submodule(owner)
            shape = module.shape if last == "weight" else module.shapes[last]
            weight = unpack(module.kind, weight, shape, dtype)
        yield name, weight


def originals(
    weights: Iterable[tuple[str, Tensor]], files: Any
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights, or None in their place, with quantised ones as the matrices that WeightFiles hold."""
    for name, weight in weights:
        if weight is not None and weight.dtype == torch.uint8:
            plain = name.replace(".base_layer.", ".")
            weight = files.read(plain).view(files.tensors[plain].shape)
        yield name, weight
