"""Write Hugging Face model folders: weights, a shard at a time, and the files beside them.

A run, `ulysses export`, and the sampler of an inference engine take whole weights from here, with adapters added.
"""

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.arch import ModelConfig
from models.folders import INDEX, WEIGHTS
from models.hf_format import WeightFiles, lora_scale, low_rank
from models.kinds import empty_model, parameter_shapes
from models.modules import Float32Parameter
from models.multimodal import file_prefix, multimodal_name
from ulysses.disk import write_json, write_tensors

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "*processor*.json",  # of multimodal models
    "LICENSE*",
)
SHARD_GIB = 2.0  # weights that are written to one file, and are held in host memory meanwhile


def whole_weights(
    config: ModelConfig,
    weights: Iterable[tuple[str, Tensor]],
    adapters: Mapping[str, Tensor],
    settings: Any,
    files: WeightFiles | None = None,
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield the names of weights, the values with adapters added in float32, and the values before training, if known.

    Args:
        weights: a model's parameters, of which those of adapters are left out.
        adapters: by their names; other tensors may be among them.
        settings: the table [model].
        files: the weights before training; matrices that training quantised are read from them, and not dequantised.
    """
    shapes, lora = parameter_shapes(config), settings.lora
    for name, weight in weights:
        if ".lora_" in name:
            continue
        base = None
        if weight.dtype == torch.uint8:
            if files:
                weight = files.read(name).view(shapes[name])
            else:
                from models.quantized import Packed

                weight = Packed(shapes[name]).unpack(weight, getattr(torch, settings.dtype))
        module, _, last = name.rpartition(".")
        # the module of experts has adapters of several parameters, whose names the adapters' end with
        ending = "" if last == "weight" else f".{last}"
        if f"{module}.lora_A{ending}" in adapters:
            a, b = (adapters[f"{module}.lora_{kind}{ending}"] for kind in "AB")
            scale = lora_scale(lora.rank, lora.alpha, lora.rslora)
            transposed = bool(ending) and config.family.clamped_experts
            base, weight = weight, weight.float() + low_rank(a, b, scale, transposed)
        elif (
            files
            and not adapters
            and name in files.tensors
            and files.tensors[name].shape == weight.shape
        ):
            base = files.read(name).view_as(weight)
        yield name, weight, base


def stored_weights(
    config: ModelConfig, weights: Iterable[tuple[str, Tensor]], *, reward: bool = False
) -> Iterable[tuple[str, Tensor]]:
    """Return a model's weights as transformers' files hold them: with their names, and each expert's matrices apart.

    Args:
        reward: whether the model gives scores: then no multimodal model is written around it.
    """
    if config.around and not reward:
        prefix = file_prefix(config.around)
        weights = ((multimodal_name(name, prefix), weight) for name, weight in weights)
    if config.moe and not config.family.clamped_experts:
        from models.expert_files import as_stored

        weights = as_stored(weights)
    return weights


def is_wider(dtype: str, other: str) -> bool:
    """Tell whether a number takes more bytes in one dtype than in another; both are named as in torch."""
    return getattr(torch, dtype).itemsize > getattr(torch, other).itemsize


class Rounding:
    """Round weights to the dtype in which they are written, and say how much of training's change the rounding loses.

    name, dtype: of the written weights.
    in_float32: names of the weights that are written in float32.
    change, lost: sums of squares, of training's change and of the differences between written and trained weights.
    """

    def __init__(self, dtype: str, config: ModelConfig) -> None:
        self.name, self.dtype = dtype, getattr(torch, dtype)
        parameters = empty_model(config).named_parameters() if config.delta else ()
        self.in_float32 = {name for name, p in parameters if isinstance(p, Float32Parameter)}
        self.change, self.lost = 0.0, 0.0
        self.remark = "ulysses export --dtype float32 does not round"

    def __call__(
        self, name: str, weight: Tensor, base: Tensor | None, trained: Tensor | None = None
    ) -> tuple[str, Tensor]:
        """Return the name and the weight as it is written; `base` is the weight before training, if known.

        `trained` is the trained weight where that is not `weight` itself, because its base was quantised in training.
        """
        if name in self.in_float32:
            return name, weight.float()
        written = weight.to(self.dtype)
        if base is not None:
            if trained is not None:
                self.remark = "their base, quantised in training, is written as it was before"
            self.change += float((weight - base).square().sum())
            difference = written - (weight if trained is None else trained)
            self.lost += float(difference.square().sum())
        return name, written

    @property
    def note(self) -> str:
        """A sentence if more than a hundredth is lost, or an empty text."""
        share = math.sqrt(self.lost / self.change) if self.change else 0.0
        if share > 0.01:
            return (
                f"the weights written in {self.name} differ from the trained ones by {share:.0%} of what training "
                f"changed; {self.remark}, and adapters exported alone keep all of it"
            )
        return ""


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = int(SHARD_GIB * 2**30),
    *,
    carried: Mapping[str, Any] = {},
) -> None:
    """Write named tensors as transformers does, holding one shard in host memory.

    Args:
        folder: an empty folder; the caller moves it into place when all is written.
        carried: stored tensors (WeightFiles.carried) that are written as they are.
        max_shard_bytes: bounds a file; a larger tensor has a file of its own.
    """
    files: list[list[str]] = []  # the names of the tensors in each
    shard: dict[str, Tensor] = {}
    size = total = 0

    def write_shard() -> None:
        # renamed later, because the final name says how many files there are
        write_tensors(folder / f"{len(files)}.tmp", shard, format="pt")
        files.append([*shard])
        shard.clear()

    of_other_files = (
        (name, stored.read(0, stored.shape.numel()).view(stored.shape))
        for name, stored in carried.items()
    )
    for name, tensor in chain(tensors, of_other_files):
        if shard and size + tensor.nbytes > max_shard_bytes:
            write_shard()
            size = 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write_shard()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else WEIGHTS
        (folder / f"{number - 1}.tmp").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def copy_side_files(
    source: Path, target: Path, patterns: Iterable[str] = (GENERATION, *TOKENIZER_FILES)
) -> None:
    """Copy tokenizer, chat template and generation config as they are.

    Raises ValueError for a link out of the folder; a snapshot in the hub's cache may link to the blobs beside it.
    """
    root = source.resolve()
    if root.parent.name == "snapshots":
        root = root.parents[1]
    for pattern in patterns:
        for path in source.glob(pattern):
            if not path.resolve().is_relative_to(root):
                raise ValueError(
                    f"{path.absolute()} is a link to {path.resolve()}, outside of the model's folder; put a copy of "
                    "the file in its place"
                )
            shutil.copyfile(path, target / path.name)
