"""Experts in weight files: transformers saves the matrices of each one by itself, the model holds them in one tensor.

    ...mlp.experts.0.gate_proj.weight, ...experts.0.up_proj.weight, ...1.gate_proj...    ...mlp.experts.gate_up_proj
    ...mlp.experts.0.down_proj.weight, ...experts.1.down_proj.weight, ...                ...mlp.experts.down_proj

Those on the right, which some folders hold, are read as they are. gpt-oss's are saved so, transposed, or in MXFP4:

    ...mlp.experts.gate_up_proj_blocks, ...gate_up_proj_scales                            ...mlp.experts.gate_up_proj
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class JoinedTensor(NamedTuple):
    """One tensor whose parts, one after the other, are tensors of their own in the files: every expert's matrices."""

    parts: list[Any]  # StoredTensors of models/hf_format.py
    shape: torch.Size
    state: Mapping[str, object] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; only the parts that hold them are touched."""
        found, before = [torch.empty(0, dtype=self.dtype, device=device)], 0
        with ExitStack() as stack:
            opened = cache(lambda file: stack.enter_context(safe_open(file, "pt")))
            for part in self.parts:
                size = part.shape.numel()
                low, high = max(start - before, 0), min(stop - before, size)
                before += size
                if low < high:
                    found.append(part.part(opened(part.file), low, high, device))
            return torch.cat(found)


BLOCKS, SCALES = "_blocks", "_scales"
# what the codes of MXFP4 stand for: a sign, two bits of exponent, one of mantissa
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockTensor(NamedTuple):
    """Matrices [N, K, O] whose files hold them in MXFP4, as blocks of 32 elements along K; read into bfloat16.

    blocks [N, O, K/32, 16]: two codes in a byte, the first one low. scales [N, O, K/32]: powers of two, plus 127.
    """

    blocks: Any  # StoredTensors of models/hf_format.py
    scales: Any
    dtype: torch.dtype = torch.bfloat16
    state: Mapping[str, object] = {}

    @property
    def shape(self) -> torch.Size:
        count, outputs, groups, _ = self.blocks.shape
        return torch.Size([count, 32 * groups, outputs])

    def read(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the flat elements [start, stop), row-major; only the blocks that hold them are touched."""
        _, inputs, outputs = self.shape
        every = torch.arange(256, device=device)
        values = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=self.dtype, device=device)
        pairs = values[torch.stack([every & 15, every >> 4], -1)]  # of every byte
        found = [values[:0]]
        with ExitStack() as stack:
            blocks, scales = (
                stack.enter_context(safe_open(part.file, "pt")).get_tensor(part.name)
                for part in (self.blocks, self.scales)
            )
            while start < stop:
                number, place = divmod(start, inputs * outputs)
                count = min(inputs * outputs - place, stop - start)
                first, last = place // outputs // 32, -(-(place + count) // (32 * outputs))
                codes = blocks[number, :, first:last].to(device)
                powers = (scales[number, :, first:last].to(device).float() - 127).exp2()
                columns = pairs[codes.int()].flatten(2) * powers.to(self.dtype)[..., None]
                if not columns.isfinite().all():
                    raise FloatingPointError(
                        f"{self.scales.name} in {self.scales.file.absolute()} holds scales that make infinite weights; "
                        "download it again"
                    )
                before = place - first * 32 * outputs
                found.append(columns.flatten(1).t().flatten()[before : before + count])
                start += count
        return torch.cat(found)


def join_blocks(found: dict[str, Any]) -> None:
    """Make one tensor of the blocks and the scales of matrices in MXFP4, under the name of the matrices.

    Raises ValueError for blocks or scales of other shapes than these have.
    """
    for name in [name for name in found if name.endswith(BLOCKS)]:
        stem = name.removesuffix(BLOCKS)
        if stem + SCALES in found:
            blocks, scales = found.pop(name), found.pop(stem + SCALES)
            kinds = {blocks.dtype, scales.dtype}
            if (len(scales.shape), *scales.shape, 16, kinds) != (
                3,
                *blocks.shape,
                {torch.uint8},
            ):
                raise ValueError(
                    f"{blocks.file.absolute()} holds {name} of shape {[*blocks.shape]} with scales of shape "
                    f"{[*scales.shape]}, but MXFP4 has bytes: blocks [experts, outputs, groups, 16] and scales "
                    "[experts, outputs, groups]; download it again"
                )
            found[stem] = BlockTensor(blocks, scales)


# What files hold in place of a parameter with all experts' matrices: a matrix of each expert, or two.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(\w+)\.weight")


def join_experts(found: dict[str, Any]) -> None:
    """Make one tensor of the matrices of a layer's experts, where files hold them one by one and all of them.

    Raises ValueError if an expert before the last one is missing, or they are quantised, each with scales of its own.
    """
    each: dict[str, dict[tuple[int, str], str]] = {}
    for name in found:
        if match := _EXPERT.fullmatch(name):
            stem, number, matrix = match.groups()
            each.setdefault(stem, {})[int(number), matrix] = name
    for stem, names in each.items():
        numbers = {number for number, _ in names}
        count = len(numbers)
        if count <= max(numbers):
            raise ValueError(
                f"the files hold {stem}.{max(numbers)} but only {count} of these experts, which are numbered from 0; "
                "download them again"
            )
        for joined, matrices in EXPERT_PARTS.items():
            wanted = [names.get((i, matrix), "") for i in range(count) for matrix in matrices]
            sides, *others = {found[name].shape if name else torch.Size() for name in wanted}
            if len(sides) == 2 and not others:
                if any(found[name].state for name in wanted):
                    raise ValueError(
                        f"{found[wanted[0]].file.absolute()} holds {wanted[0]} quantised apart from other experts'; "
                        "use the model that they were made from, with model.quantize"
                    )
                shape = torch.Size([count, sides[0] * len(matrices), sides[1]])
                parts = [found.pop(name) for name in wanted]
                found[f"{stem}.{joined}"] = JoinedTensor(parts, shape)


def as_stored(
    weights: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights as transformers saves them: the matrices of experts one by one."""
    for name, tensor in weights:
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, tensor
            continue
        matrices = EXPERT_PARTS[last]
        for number, own in enumerate(tensor):
            for matrix, part in zip(matrices, own.chunk(len(matrices))):
                yield f"{stem}.{number}.{matrix}.weight", part


# --- adapters as PEFT's target_parameters: A [N * r, inputs], and B [outputs, r * N], the expert's number last -------

MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


def adapted_experts(targets: Iterable[str]) -> list[str]:
    """Return which of the experts' parameters the targets of LoRA mean."""
    return [name for name, matrices in EXPERT_PARTS.items() if {*matrices} <= {*targets}]


def adapter_parameters(model: Any, targets: Collection[str]) -> tuple[int, int]:
    """Count the parameters that LoRA of rank 1 adds to a model without adapters, and those that a token leaves out."""
    own, count, unmet = adapted_experts(targets), 0, 0
    for name, matrix in model.named_parameters():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        if matrix.dim() == 3 and stem in own:  # of all experts
            each = sum(matrix.shape[1:])
            count += len(matrix) * each
            unmet += (len(matrix) - model.config.moe.num_experts_per_tok) * each
        elif matrix.dim() == 2 and stem in targets:
            count += sum(matrix.shape)
    return count, unmet


def is_of_experts(name: str) -> bool:
    """Return whether a parameter is an adapter of experts' matrices."""
    return ".experts.lora_" in name


def peft_tensor(name: str, tensor: Tensor, adapted: list[str]) -> tuple[str, Tensor]:
    """Return an adapter's name and tensor as PEFT saves them, which wraps one of two parameters inside the other."""
    if not is_of_experts(name):
        return name + ".weight" * (".lora_" in name), tensor
    stem, _, last = name.rpartition(".")
    inner = ".base_layer" if last != adapted[-1] else ""
    flat = tensor.flatten(0, 1) if ".lora_A" in stem else tensor.permute(1, 2, 0).flatten(1)
    return stem.replace(".experts.", f".experts{inner}.") + ".weight", flat


def adapted_name(stem: str, parameters: Iterable[str]) -> str:
    """Return the name of what an adapter belongs to, from that of PEFT without its `.lora_`."""
    inner = stem.removesuffix(".base_layer")
    if not inner.endswith(".experts"):
        return f"{stem}.weight"
    named = {name.rpartition(".")[2] for name in parameters}  # some have `experts.` before
    names = [name for name in EXPERT_PARTS if name in named]
    return f"{inner}.{names[0 if inner != stem else -1]}"
