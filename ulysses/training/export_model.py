"""Write a model as a Hugging Face folder, whole or as adapters in peft's format; from an engine or from a checkpoint."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from models.arch import ModelConfig as Shape
from models.hf_format import WeightWriter, write_config
from ulysses.training.config import DTYPES, Config

Read = Callable[[Callable[[str], bool]], Iterable[tuple[str, Tensor | None]]]


def export_model(engine: Any, folder: Path, shape: Shape, config: Config, *, main: bool) -> None:
    """Write a ZeroEngine's weights and config.json; all ranks call it together, `main` writes."""
    from ulysses.zero.gather import (
        full_parameters,  # deepspeed, which a checkpoint's export does without
    )

    write_model(partial(full_parameters, engine), folder, shape, config, main=main)


def write_model(read: Read, folder: Path, shape: Shape, config: Config, *, main: bool) -> None:
    """Write weights and config.json one parameter at a time; with adapters, these alone unless model.lora.merge is set.

    `read(wanted)` yields the engine's parameters whose names are wanted, in the model's order; tensors where `main` is true.
    """
    stage, lora = config.stage_class, config.model.lora
    reward, prefix = stage.reward, stage.exported
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    if lora.rank:
        from ulysses.training.lora import (  # peft is an optional dependency
            base_name,
            is_adapter,
            merged,
            save_adapters,
        )

        found = read(lambda name: name.startswith(prefix) and is_adapter(name))
        adapters = {
            name.removeprefix(prefix): tensor for name, tensor in found if tensor is not None
        }
        if not lora.merge:
            if main:
                save_adapters(folder, adapters, lora, reward=reward, base=config.model.path)
            return
    writer = WeightWriter(folder) if main else None
    for full, tensor in read(lambda name: name.startswith(prefix) and ".lora_" not in name):
        if writer is not None and tensor is not None:
            name = full.removeprefix(prefix)
            if lora.rank:
                name, tensor = base_name(name), merged(name, tensor, adapters, lora)
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        write_config(folder, shape, dtype=DTYPES[config.model.dtype], reward=reward)
