"""Turn a checkpoint into a Hugging Face folder: `python -m ulysses.export RUN/checkpoints/step-N OUT`.

Needs no GPU, no launcher and no process group; holds one parameter at a time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import ulysses.training  # noqa: F401 - first: it refuses foreign packages named models or losses
from models.arch import ModelConfig
from models.decoder import CausalLM, RewardModel
from models.hf_format import copy_side_files
from ulysses.training.command_line import check
from ulysses.training.config import DTYPES, Config
from ulysses.training.export_model import write_model
from ulysses.zero.state import SavedSlices


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    """Write the policy saved in `checkpoint` to `out` as config.json, safetensors shards and tokenizer.

    Raises ValueError if the folder is not a complete checkpoint, `out` already holds a model, or the base of merged adapters is in no file.
    """
    try:
        state = json.loads((checkpoint / "run.json").read_text())
        shape = ModelConfig.from_hf(state["shape"])
    except (OSError, ValueError, KeyError):
        raise ValueError(
            f"{checkpoint.absolute()} is not a complete checkpoint; give a folder RUN/checkpoints/step-N"
        ) from None
    if (out / "config.json").exists():
        raise ValueError(
            f"{out.absolute()} already holds a model; give a folder that does not exist yet"
        )
    config = check(state["config"])
    if (
        config.model.lora.rank and config.model.lora.merge and config.model.init == "random"
    ):  # a GPU drew other numbers than this CPU
        raise ValueError(
            "the base of these adapters was drawn at random and is in no file; use the export that the run itself wrote"
        )
    out.mkdir(parents=True, exist_ok=True)
    copy_side_files(checkpoint.parent.parent / "tokenizer", out)
    write_model(
        _reader(SavedSlices(checkpoint / "policy"), config, shape), out, shape, config, main=True
    )


def _reader(
    saved: SavedSlices, config: Config, shape: ModelConfig
) -> Callable[[Callable[[str], bool]], Iterator[tuple[str, Tensor]]]:
    """Read the policy's saved parameters, and those that adapters left frozen from where the run read them."""
    dtype, prefix, lora = DTYPES[config.model.dtype], config.stage_class.exported, config.model.lora
    with torch.device("meta"):
        model: nn.Module = RewardModel(shape) if config.stage_class.reward else CausalLM(shape)
    if lora.rank:
        from ulysses.training.build import read_shape, weights_of  # heavy, and needed here only
        from ulysses.training.lora import add_adapters, base_name, is_adapter

        model = add_adapters(model, lora)
        base = weights_of(config, shape, read_shape(config)[1]) if lora.merge else None

    def read(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if not wanted(prefix + name):
                continue
            if lora.rank and base is not None and not is_adapter(name):
                flat = base.slice(
                    base_name(name),
                    parameter.shape,
                    0,
                    parameter.numel(),
                    dtype,
                    torch.device("cpu"),
                )
            else:
                flat = torch.empty(parameter.numel(), dtype=torch.float32)
                saved.read_into(flat, prefix + name, "master")
            yield prefix + name, flat.to(dtype).view(parameter.shape)

    return read


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m ulysses.export", description="Export a checkpoint in Hugging Face format."
    )
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step-N")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    try:
        export_checkpoint(arguments.checkpoint, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {arguments.out.absolute()} cannot be written from {arguments.checkpoint}: {error}",
            file=sys.stderr,
        )
        return 2
    print(f"exported {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
