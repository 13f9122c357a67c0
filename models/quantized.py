"""Frozen matrices of four bits, for LoRA: NF4 with double quantisation (QLoRA, 2305.14314).

Every element is a code of 4 bits, to be multiplied by the largest absolute value (absmax) of its block of 64 elements.
The absmax values are codes of 8 bits in their turn, in blocks of 256. A matrix is one parameter of bytes, which ZeRO-3
partitions and gathers like any other; products dequantise it first:

    codes [n / 2] | absmax codes [n / 64] | nested, in float32: the mean absmax, the table of codes [256], their absmax

Shapes: S rows, D inputs, F outputs, n = F * D.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from models.modules import Linear
from models.ops.norm import triton_kernels

BLOCK, NESTED_BLOCK = 64, 256  # elements with one absmax, and absmax values with one of theirs
# of an element: its code, and its share of the absmax values of both kinds
BITS = 4 + 8 / BLOCK + 32 / BLOCK / NESTED_BLOCK


def packed_parts(shape: tuple[int, ...]) -> list[int]:
    """Return how many bytes matrices [..., F, D] take for codes, for absmax codes, and for `nested`."""
    n = math.prod(shape)
    blocks = -(-n // BLOCK)
    return [-(-n // 2), blocks, 4 * (1 + 256 - (-blocks // NESTED_BLOCK))]


def pack(matrix: Tensor) -> Tensor:
    """Return the bytes of matrices [..., F, D], on their device."""
    from bitsandbytes.functional import quantize_4bit  # an optional dependency

    matrix = matrix.flatten(0, -2).contiguous()
    codes, state = quantize_4bit(
        matrix, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    nested = state.offset.view(1), state.state2.code, state.state2.absmax
    return join_parts(codes, state.absmax, torch.cat([x.float() for x in nested]))


def join_parts(*parts: Tensor) -> Tensor:
    """Lay tensors one after the other as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


class Packed(NamedTuple):
    """What the bytes of a parameter stand for: a matrix, or several, of this shape [..., F, D]."""

    shape: tuple[int, ...]

    def unpack(self, data: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the matrices, in `out` if it is given."""
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=data.device)
        codes, absmax_codes, nested = data.split(packed_parts(self.shape))
        # small, and copied if it is not aligned
        nested = nested if nested.storage_offset() % 4 == 0 else nested.clone()
        nested = nested.view(torch.float32)
        if kernels := triton_kernels(out):
            kernels.dequantize_nf4(codes, absmax_codes, nested, out)
            return out
        import bitsandbytes  # noqa: F401 - registers torch.ops.bitsandbytes

        ops = torch.ops.bitsandbytes
        mean, table, nested_absmax = nested.split([1, 256, len(nested) - 257])
        absmax = ops.dequantize_blockwise(
            absmax_codes, nested_absmax, table, NESTED_BLOCK, torch.float32
        ).add_(mean)
        # as rows of one block: bitsandbytes 0.50 is wrong on CPUs where a row ends within a block
        rows = ops.dequantize_4bit(
            codes[:, None], absmax, BLOCK, "nf4", [len(absmax), BLOCK], dtype
        )
        return out.copy_(rows.view(self.shape))


class QuantizedLinear(Linear):
    """Multiply rows [S, D] by a frozen matrix of bytes; the bias keeps its dtype."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.weight, self.packed = self.empty((outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)

    @staticmethod
    def empty(shape: tuple[int, ...]) -> tuple[nn.Parameter, Packed]:
        *rows, width = shape
        if math.prod(shape) % BLOCK:
            raise ValueError(
                f"a matrix {math.prod(rows)} x {width} is no whole number of blocks of {BLOCK}"
            )
        data = torch.empty(sum(packed_parts(shape)), dtype=torch.uint8)
        return nn.Parameter(data, requires_grad=False), Packed(shape)


# ---------------------------------------------------------------- files of bitsandbytes

# Endings of the names that files give to a matrix's description and to its parts; the codes have the matrix's own name.
STATE = ".quant_state.bitsandbytes__nf4"
PARTS = "", ".absmax", ".nested_quant_map", ".nested_absmax"


class PackedTensor(NamedTuple):
    """A matrix that a file holds in NF4. dtype: of the matrix before it was quantised. mean: of its absmax values."""

    file: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    mean: float
    is_packed: bool = True

    def read_packed(self) -> Tensor:
        """Return the matrix as a parameter of bytes."""
        with safe_open(self.file, "pt") as file:
            codes, absmax_codes, *others = (file.get_tensor(self.name + part) for part in PARTS)
        nested = torch.cat([torch.tensor([self.mean]), *others])
        return join_parts(codes, absmax_codes, nested)

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major, in float32 on the CPU."""
        whole = Packed(self.shape).unpack(self.read_packed(), torch.float32)
        return whole.view(-1)[start:stop]


def join_packed(path: Path, tensors: dict[str, Any]) -> None:
    """Replace the StoredTensors of a file that make up a quantised matrix by one PackedTensor under its name.

    Raises ValueError for matrices that are quantised otherwise than here.
    """
    for description in [name for name in tensors if name.endswith(STATE)]:
        name = description.removesuffix(STATE)
        try:
            state = json.loads(bytes(tensors[description].whole().tolist()))
            layout = state["blocksize"], state["nested_blocksize"], state["quant_type"]
            shape, dtype = torch.Size(state["shape"]), getattr(torch, state["dtype"])
            mean = state["nested_offset"]
            codes, absmax_codes, *nested = (
                tensors[name + part].shape.numel() for part in PARTS
            )
            sizes = [codes, absmax_codes, 4 * (1 + sum(nested))]
            is_nf4 = layout == (BLOCK, NESTED_BLOCK, "nf4") and sizes == packed_parts(shape)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_nf4 = False
        if not is_nf4:
            raise ValueError(
                f"{path.absolute()} holds {name} otherwise than in NF4 doubly quantised, in blocks of 64 and "
                "256; quantise the original model anew with model.quantize"
            )
        for part in [part for part in tensors if part.startswith(f"{name}.")]:
            del tensors[part]
        tensors[name] = PackedTensor(path, name, shape, dtype, mean)
