"""Write weights, and what lies beside them, into a Hugging Face model folder, holding one shard at a time.

A run, `ulysses export`, and samplers that read the model while it trains take whole weights from here.
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
from models.multimodal import file_prefix, outside
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
SHARD_GIB = 2.0  # written to one file, and held in host memory meanwhile


def whole_weights(
    config: ModelConfig,
    weights: Iterable[tuple[str, Tensor]],
    adapters: Mapping[str, Tensor],
    settings: Any,
    files: WeightFiles | None = None,
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield the names of weights, the values with adapters added in float32, and what these were before, if known.

    Args:
        weights: a model's parameters, of which those of adapters are left out.
        adapters: by their names; other tensors may be among them.
        settings: the table [model].
        files: what the weights were before training; quantised ones are read from them and not dequantised.
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
                from models.quantized import unpack

                weight = unpack(weight, shapes[name], getattr(torch, settings.dtype))
        owner, _, last = name.rpartition(".")
        end = "" if last == "weight" else f".{last}"  # of a matrix of every expert
        if f"{owner}.lora_A{end}" in adapters:
            a, b = (adapters[f"{owner}.lora_{kind}{end}"] for kind in "AB")
            scale = lora_scale(lora.rank, lora.alpha, lora.rslora)
            transposed = bool(end) and config.family.clamped_experts
            base, weight = weight, weight.float() + low_rank(a, b, scale, transposed)
        elif (
            files
            and not adapters
            and name in files.tensors
            and files.tensors[name].shape == weight.shape
        ):
            base = files.read(name).view_as(weight)
        yield name, weight, base


class Rounding:
    """Round weights to the dtype in which they are written, and say what that takes of what training changed.

    name, dtype: in which they are written.
    exact: names of those that are written in float32.
    change, lost: sums of squares: of what training changed, and of what is written otherwise than it was trained.
    """

    def __init__(self, dtype: str, config: ModelConfig) -> None:
        self.name, self.dtype = dtype, getattr(torch, dtype)
        parameters = empty_model(config).named_parameters() if config.delta else ()
        self.exact = {name for name, p in parameters if isinstance(p, Float32Parameter)}
        self.change, self.lost = 0.0, 0.0
        self.cure = "ulysses export --dtype float32 does not round"

    def __call__(
        self, name: str, weight: Tensor, base: Tensor | None, trained: Tensor | None = None
    ) -> tuple[str, Tensor]:
        """Return the name and the weight as it is written; `base` is what it was before training, if known.

        `trained` is what was trained if that is not `weight` itself: its base was quantised.
        """
        if name in self.exact:
            return name, weight.float()
        written = weight.to(self.dtype)
        if base is not None:
            if trained is not None:
                self.cure = "their base, quantised in training, is written as it was before"
            self.change += float((weight - base).square().sum())
            lost = written - (weight if trained is None else trained)
            self.lost += float(lost.square().sum())
        return name, written

    @property
    def note(self) -> str:
        """A sentence if more than a hundredth is lost, or an empty text."""
        share = math.sqrt(self.lost / self.change) if self.change else 0.0
        return (share > 0.01) * (
            f"the weights written in {self.name} differ from the trained ones by {share:.0%} of what training changed; "
            f"{self.cure}, and adapters exported alone keep all of it"
        )


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = int(SHARD_GIB * 2**30),
    *,
    config: ModelConfig | None = None,
    reward: bool = False,
    carried: Mapping[str, Any] = {},
) -> None:
    """Write named tensors as transformers does, holding one shard in host memory.

    Args:
        folder: an empty folder; the caller moves it into place when all is written.
        config: of the model, whose files have names of their own and perhaps each expert's matrices for itself.
        reward: it gives scores, and there is nothing around it.
        carried: tensors of other files (WeightFiles.carried), which are written as they are.
        max_shard_bytes: bounds a file; a larger tensor has a file of its own.
    """
    files: list[list[str]] = []  # the names in each
    shard: dict[str, Tensor] = {}
    size = total = 0

    def write_shard() -> None:
        # the file's final name tells how many there are
        write_tensors(folder / f"{len(files)}.tmp", shard, format="pt")
        files.append([*shard])
        shard.clear()

    others = (
        (name, stored.read(0, stored.shape.numel()).view(stored.shape))
        for name, stored in carried.items()
    )
    if config and config.around and not reward:
        prefix = file_prefix(config.around)
        tensors = ((outside(name, prefix), tensor) for name, tensor in tensors)
    if config and config.moe and not config.family.clamped_experts:
        from models.expert_files import as_stored

        tensors = as_stored(tensors)
    for name, tensor in chain(tensors, others):
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

    Raises ValueError for a link out of the folder; a snapshot of the hub's cache may link to the blobs next to it.
    """
    inside = source.resolve()
    if inside.parent.name == "snapshots":
        inside = inside.parents[1]
    for pattern in patterns:
        for path in source.glob(pattern):
            if not path.resolve().is_relative_to(inside):
                raise ValueError(
                    f"{path.absolute()} is a link to {path.resolve()}, outside of the model's folder; put a copy of "
                    "the file in its place"
                )
            shutil.copyfile(path, target / path.name)
