"""Turn a checkpoint into a Hugging Face folder: `python -m ulysses.export RUN/checkpoints/step-N OUT`.

Needs no GPU, no launcher and no process group; holds one parameter at a time.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ulysses.training  # noqa: F401 - first: it refuses foreign packages named models or losses
from models.arch import ModelConfig
from models.decoder import CausalLM, RewardModel
from models.hf_format import WeightWriter, copy_side_files, write_config
from ulysses.zero.slices import SavedSlices

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    """Write the policy saved in `checkpoint` to `out` as config.json, safetensors shards and tokenizer.

    Raises:
        ValueError: if the folder is not a complete checkpoint, or `out` already holds a model.
    """
    run = checkpoint.parent.parent
    try:
        state = json.loads((checkpoint / "run.json").read_text())
        shape = ModelConfig.from_hf(state["shape"])
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{checkpoint.absolute()} is not a complete checkpoint; give a folder RUN/checkpoints/step-N") from None
    if (out / "config.json").exists():
        raise ValueError(f"{out.absolute()} already holds a model; give a folder that does not exist yet")
    reward = state["config"]["stage"] == "rm"
    dtype = DTYPES[state["config"]["model"]["dtype"]]
    saved = SavedSlices(checkpoint / "policy")
    prefix = "policy." if state["config"]["stage"] == "ppo" else ""  # PPO's value is left out
    with torch.device("meta"):
        model: nn.Module = RewardModel(shape) if reward else CausalLM(shape)
    out.mkdir(parents=True, exist_ok=True)
    copy_side_files(run / "tokenizer", out)
    if state["config"]["model"]["lora"]["rank"]:
        _export_lora(model, saved, state["config"], shape, out, prefix)
        return
    writer = WeightWriter(out)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.numel(), dtype=torch.float32)
        saved.read_into(whole, prefix + name, "master")
        writer.add(name, whole.to(dtype).view(parameter.shape))
    writer.finish()
    write_config(out, shape, dtype=dtype, reward=reward)


def _export_lora(model: nn.Module, saved: SavedSlices, config: dict[str, Any], shape: ModelConfig, out: Path, prefix: str) -> None:
    """Write the adapters, or the base weights (read from where the run read them) with the adapters added in."""
    from ulysses.training.build import read_shape, weights_of  # heavy, and needed here only
    from ulysses.training.command_line import check
    from ulysses.training.lora import add_adapters, base_name, is_adapter, merged, save_adapters

    settings = check(config)
    lora, reward, dtype = settings.model.lora, settings.stage == "rm", DTYPES[settings.model.dtype]
    shapes = {name: p.shape for name, p in add_adapters(model, lora).named_parameters()}
    adapters = {}
    for name in filter(is_adapter, shapes):
        whole = torch.empty(shapes[name].numel(), dtype=torch.float32)
        saved.read_into(whole, prefix + name, "master")
        adapters[name] = whole.to(dtype).view(shapes[name])
    if not lora.merge:
        save_adapters(out, adapters, lora, reward=reward, base=settings.model.path)
        return
    source = weights_of(settings, shape, read_shape(settings)[1])
    writer = WeightWriter(out)
    for name, size in shapes.items():
        if name in adapters and ".lora_" in name:
            continue
        plain = base_name(name)
        if name in adapters:
            weight = adapters[name]
        else:
            weight = source.slice(plain, size, 0, size.numel(), dtype, torch.device("cpu")).view(size)
        writer.add(plain, merged(name, weight, adapters, lora))
    writer.finish()
    write_config(out, shape, dtype=dtype, reward=reward)


def main() -> int:
    parser = argparse.ArgumentParser("python -m ulysses.export", description="Export a checkpoint in Hugging Face format.")
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step-N")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    try:
        export_checkpoint(arguments.checkpoint, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"exported {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
