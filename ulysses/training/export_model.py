"""Write a trained engine as a Hugging Face folder: the whole model, or its adapters in peft's format."""

from pathlib import Path

from torch import Tensor

from models.arch import ModelConfig as Shape
from models.hf_format import WeightWriter, write_config
from ulysses.training.build import DTYPES
from ulysses.training.config import Config
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.state import full_parameters


def export_model(engine: ZeroEngine, folder: Path, shape: Shape, config: Config, *, main: bool) -> None:
    """Write weights and config.json one parameter at a time; with adapters, these alone unless model.lora.merge is set.

    All ranks call it together; `main` writes.
    """
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    if config.model.lora.rank:
        _export_lora(engine, folder, shape, config, main)
        return
    writer = WeightWriter(folder) if main else None
    prefix = prefix_of(config)
    for name, tensor in full_parameters(engine, lambda name: name.startswith(prefix)):
        if writer is not None and tensor is not None:
            writer.add(name.removeprefix(prefix), tensor)
    _finish(writer, folder, shape, config)


def prefix_of(config: Config) -> str:
    """Return how the names of what is exported begin in the engine; PPO's value stays in the checkpoints."""
    return "policy." if config.stage == "ppo" else ""


def _export_lora(engine: ZeroEngine, folder: Path, shape: Shape, config: Config, main: bool) -> None:
    from ulysses.training.lora import base_name, is_adapter, merged, save_adapters  # peft is an optional dependency

    lora = config.model.lora
    prefix = prefix_of(config)
    adapters: dict[str, Tensor] = {
        n.removeprefix(prefix): t
        for n, t in full_parameters(engine, lambda name: name.startswith(prefix) and is_adapter(name))
        if t is not None
    }
    if not lora.merge:
        if main:
            save_adapters(folder, adapters, lora, reward=config.stage == "rm", base=config.model.path)
        return
    writer = WeightWriter(folder) if main else None
    for full, tensor in full_parameters(engine, lambda name: name.startswith(prefix) and ".lora_" not in name):
        name = full.removeprefix(prefix)
        if writer is not None and tensor is not None:
            writer.add(base_name(name), merged(name, tensor, adapters, lora))
    _finish(writer, folder, shape, config)


def _finish(writer: WeightWriter | None, folder: Path, shape: Shape, config: Config) -> None:
    if writer is not None:
        writer.finish()
        write_config(folder, shape, dtype=DTYPES[config.model.dtype], reward=config.stage == "rm")
