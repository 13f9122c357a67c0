"""Experts in weight files: transformers saves each expert's matrices by themselves, the model holds all in one tensor.

    ...mlp.experts.0.gate_proj.weight, ...experts.0.up_proj.weight, ...1.gate_proj...    ...mlp.experts.gate_up_proj
    ...mlp.experts.0.down_proj.weight, ...experts.1.down_proj.weight, ...                ...mlp.experts.down_proj

Files may also hold the tensors on the right, which are read as they are. gpt-oss is saved so, transposed, or in MXFP4:

    ...mlp.experts.gate_up_proj_blocks, ...gate_up_proj_scales                            ...mlp.experts.gate_up_proj
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class JoinedTensor(NamedTuple):
    """One tensor whose parts, one after the other, are tensors of their own in the files: each expert's matrices."""

    parts: list[Any]  # StoredTensors of models/hf_format.py
    shape: torch.Size
    is_packed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; only the parts that hold them are touched."""
        pieces, before = [torch.empty(0, dtype=self.dtype, device=device)], 0
        for path, parts in groupby(self.parts, lambda part: part.file):
            with safe_open(path, "pt") as file:
                for part in parts:
                    size = part.shape.numel()
                    low, high = max(start - before, 0), min(stop - before, size)
                    before += size
                    if low < high:
                        pieces.append(part.read_from(file, low, high, device))
        return torch.cat(pieces)


BLOCKS, SCALES = "_blocks", "_scales"
# The values of MXFP4's codes without the sign bit, which is the highest: two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockTensor(NamedTuple):
    """Matrices [N, K, O] whose files hold them in MXFP4, as blocks of 32 elements along K; read into bfloat16.

    blocks [N, O, K/32, 16]: two codes in a byte, the first in the low bits. scales [N, O, K/32]: exponents of two, plus
    127.
    """

    blocks: Any  # StoredTensors of models/hf_format.py
    scales: Any
    dtype: torch.dtype = torch.bfloat16
    is_packed: bool = False

    @property
    def shape(self) -> torch.Size:
        count, outputs, groups, _ = self.blocks.shape
        return torch.Size([count, 32 * groups, outputs])

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; only the experts that hold them are touched."""
        size = self.shape[1:].numel()
        byte = torch.arange(256, device=device)
        values = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=self.dtype, device=device)
        pairs = values[torch.stack([byte & 15, byte >> 4], -1)]  # the two values of each byte
        pieces = [values[:0]]
        blocks, scales = self.blocks.pages(), self.scales.pages()
        for number in range(start // size, -(-stop // size)):
            powers = (scales[number].to(device).float() - 127).exp2().to(self.dtype)
            columns = pairs[blocks[number].to(device).int()].flatten(2) * powers[..., None]
            if not columns.isfinite().all():
                raise FloatingPointError(
                    f"{self.scales.name} in {self.scales.file.absolute()} holds scales that make infinite weights; "
                    "download it again"
                )
            matrix, begin = columns.flatten(1).t().flatten(), number * size
            pieces.append(matrix[max(start - begin, 0) : stop - begin])
        return torch.cat(pieces)


def join_blocks(tensors: dict[str, Any]) -> None:
    """Replace the blocks and the scales of matrices in MXFP4 by one tensor under the name of the matrices.

    Raises ValueError for blocks or scales of other shapes than BlockTensor says.
    """
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        stem = name.removesuffix(BLOCKS)
        if stem + SCALES in tensors:
            blocks, scales = tensors.pop(name), tensors.pop(stem + SCALES)
            are_bytes = blocks.dtype == scales.dtype == torch.uint8
            fit = len(scales.shape) == 3 and (*scales.shape, 16) == (*blocks.shape,)
            if not are_bytes or not fit:
                raise ValueError(
                    f"{blocks.file.absolute()} holds {name} of shape {[*blocks.shape]} with scales of shape "
                    f"{[*scales.shape]}, but MXFP4 has bytes: blocks [experts, outputs, groups, 16] and scales "
                    "[experts, outputs, groups]; download it again"
                )
            tensors[stem] = BlockTensor(blocks, scales)


# What files hold for each expert in place of a parameter with all experts' matrices: two matrices, or one.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(\w+)\.weight")


def join_experts(tensors: dict[str, Any]) -> None:
    """Replace the matrices of a layer's experts, where files hold them one by one, by tensors of all experts.

    Raises ValueError if an expert before the last one is missing, or if they are quantised each for itself.
    """
    names_of_layers: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            stem, number, matrix = match.groups()
            names_of_layers.setdefault(stem, {})[int(number), matrix] = name
    for stem, names in names_of_layers.items():
        numbers = {number for number, _ in names}
        count = len(numbers)
        if count <= max(numbers):
            raise ValueError(
                f"the files hold {stem}.{max(numbers)} but only {count} of these experts, which are numbered from 0; "
                "download them again"
            )
        for joined, matrices in EXPERT_PARTS.items():
            parts = [names.get((i, matrix), "") for i in range(count) for matrix in matrices]
            # matrices that are missing or of several shapes stay as they are, and do not fit the model
            sides, *others = {tensors[name].shape if name else torch.Size() for name in parts}
            if len(sides) == 2 and not others:
                if any(tensors[name].is_packed for name in parts):
                    raise ValueError(
                        f"{tensors[parts[0]].file.absolute()} holds {parts[0]} quantised apart from other experts'; "
                        "use the model that they were made from, with model.quantize"
                    )
                shape = torch.Size([count, sides[0] * len(matrices), sides[1]])
                stored = [tensors.pop(name) for name in parts]
                tensors[f"{stem}.{joined}"] = JoinedTensor(stored, shape)


def as_stored(
    weights: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights as transformers saves them, which has the matrices of experts one by one."""
    for name, tensor in weights:
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, tensor
            continue
        matrices = EXPERT_PARTS[last]
        for number, of_expert in enumerate(tensor):
            for matrix, part in zip(matrices, of_expert.chunk(len(matrices))):
                yield f"{stem}.{number}.{matrix}.weight", part


# --- adapters as PEFT's target_parameters: A [N * r, inputs], and B [outputs, r * N], the expert's number last -------

MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


def adapted_experts(targets: Iterable[str]) -> list[str]:
    """Return the experts' parameters that LoRA adapts for these targets."""
    return [name for name, matrices in EXPERT_PARTS.items() if {*matrices} <= {*targets}]


def is_of_experts(name: str) -> bool:
    """Return whether a parameter is an adapter of experts' matrices."""
    return ".experts.lora_" in name


def peft_tensor(name: str, tensor: Tensor, adapted: list[str]) -> tuple[str, Tensor]:
    """Return an adapter's name and tensor as PEFT saves them.

    Of two adapted parameters of the same experts PEFT wraps one inside the other, so that the inner one's name has
    `.base_layer`.
    """
    if not is_of_experts(name):
        return f"{name}.weight" if ".lora_" in name else name, tensor
    stem, _, last = name.rpartition(".")
    inner = ".base_layer" if last != adapted[-1] else ""
    flat = tensor.flatten(0, 1) if ".lora_A" in stem else tensor.permute(1, 2, 0).flatten(1)
    return stem.replace(".experts.", f".experts{inner}.") + ".weight", flat


def adapted_name(stem: str, parameters: Iterable[str]) -> str:
    """Return the name of the parameter that is adapted, from the name in PEFT's file up to `.lora_`."""
    inner = stem.removesuffix(".base_layer")
    if not inner.endswith(".experts"):
        return f"{stem}.weight"
    named = {name.rpartition(".")[2] for name in parameters}  # some names begin with `experts.`
    names = [name for name in EXPERT_PARTS if name in named]
    return f"{inner}.{names[0 if inner != stem else -1]}"
