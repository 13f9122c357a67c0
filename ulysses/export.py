"""Export a checkpoint or merge an adapter: `ulysses export RUN/checkpoints/step-N OUT`, `--merge ADAPTER OUT`.

It needs no GPU, no launcher and no process group, and holds one shard or one parameter at a time.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from models.arch import ModelConfig
from models.folders import ADAPTER_CONFIG, CONFIG, folder_with, read_config, resolve_model
from models.hf_format import WeightFiles
from models.kinds import empty_model, parameter_shapes
from models.writing import (
    GENERATION,
    SHARD_GIB,
    Rounding,
    copy_side_files,
    stored_weights,
    write_weights,
)
from ulysses.check.run_folder import is_run_folder, read_run_state
from ulysses.config.command_line import check, still_known
from ulysses.config.section import ConfigError, absolute, existing
from ulysses.disk import check_apart, check_empty, check_files, whole_folder, write_json
from ulysses.options import stage_of
from ulysses.run.export_model import CARD, export_model
from ulysses.zero.state import SavedSlices


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint or merge an adapter; return 2, after one sentence, if that is impossible."""
    parser = argparse.ArgumentParser(
        "ulysses export", description="Export a checkpoint in Hugging Face format."
    )
    parser.add_argument("source", help="RUN/checkpoints/step-N, or an adapter's folder")
    parser.add_argument("out", help="folder to write, which is new or empty")
    parser.add_argument(
        "--merge", action="store_true", help="add the LoRA adapter to its base's weights"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="",
        help="precision of the weights; by default export.dtype, or the one that adapters were trained in",
    )
    parser.add_argument(
        "--shard-gib", type=float, default=0.0, help="largest file; by default export.shard_gib"
    )
    options = parser.parse_args(arguments)
    source, out, merge = (
        Path(absolute(options.source)),
        Path(absolute(options.out)),
        options.merge,
    )
    dtype, shard_gib = options.dtype, options.shard_gib
    try:
        if not 0 <= shard_gib < math.inf:
            raise ValueError(f"--shard-gib is {shard_gib} but must be a size above 0")
        is_adapter = (existing(source) / ADAPTER_CONFIG).exists()
        is_model = (source / CONFIG).exists() and not is_run_folder(source)
        if merge and is_model and not is_adapter:
            raise ValueError(
                f"{source.absolute()} is a model without adapters; nothing is to be merged"
            )
        if merge and is_adapter:
            note = merge_adapter(source, out, dtype, shard_gib or SHARD_GIB)
        else:
            note = export_checkpoint(source, out, merge=merge, dtype=dtype, shard_gib=shard_gib)
    except (ValueError, OSError, FloatingPointError) as error:
        # ConfigError hides a key or a password in an address, such as HF_ENDPOINT's
        print(f"error: {ConfigError(error)}", file=sys.stderr)
        return 2
    if note:
        print(f"warning: {note}", file=sys.stderr)
    print(f"exported {out}")
    return 0


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    merge: bool = False,
    dtype: str = "",
    shard_gib: float = 0.0,
) -> str:
    """Write the policy saved in `checkpoint` to `out`, the same files that the run itself would export.

    Returns a remark about the weights' precision, or "".

    Args:
        merge: add adapters to their base's weights, as model.lora.merge does. A base that is not of model.dtype is
            rounded after the adapters are added, while the run rounds it before.
        dtype, shard_gib: in place of the run's settings under [export], unless they are empty or 0.

    Raises DiskError if a file does not hold what the run wrote. Raises ValueError if the folder is not a complete
    checkpoint in its run's folder, the base of merged adapters is in no file, or `out` holds something.
    """
    state = read_run_state(checkpoint)
    check_files(checkpoint, {n: d for n, d in state["files"].items() if ".exp_avg" not in n})
    lora = state["config"]["model"]["lora"]
    merge, lora["merge"] = lora["rank"] > 0 and (merge or lora["merge"]), False
    export = state["config"].setdefault("export", {})
    if dtype:
        export["dtype"] = dtype
    if shard_gib:
        export["shard_gib"] = shard_gib
    state["config"]["run"]["output"] = str(checkpoint.parent.parent)
    config, shape = check(still_known(state["config"])), ModelConfig.from_hf(state["shape"])
    source, stage, saved = config.model, stage_of(config), SavedSlices(checkpoint)
    # this machine would draw other numbers than the run's GPU
    if merge and source.init == "random":
        raise ValueError(
            "the base of these adapters was drawn at random and is in no file; use the export that the run itself wrote"
        )
    if not (tokenizer := config.output / "tokenizer").exists():
        raise ValueError(
            f"there is no {tokenizer}, whose files every export carries; put the checkpoint back into its run's folder"
        )
    _check_out(out, [checkpoint, tokenizer, Path(source.path or checkpoint)])
    model = empty_model(shape, reward=stage.reward)
    if source.lora.rank:
        from models.lora import add_adapters

        add_adapters(model, source.lora)

    def read(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if wanted(name):
                tensor = torch.empty(parameter.numel())
                saved.read_into(tensor, name, "master")
                yield name, tensor.view(parameter.shape)

    export = partial(
        export_model, read, shape=shape, config=config, step=state["step"], reward=stage.reward
    )
    if not merge:
        return export(out)
    resolve_model(source.path, source.revision)  # a base that is gone is refused by its setting
    with TemporaryDirectory() as folder:
        adapters = Path(folder) / "adapters"
        # weights are rounded once, after the adapters are added
        export(adapters, dtype=max(config.export_dtype, source.dtype))
        return merge_adapter(adapters, out, config.export_dtype, config.export.shard_gib)


def _check_out(out: Path, read: Iterable[Path]) -> None:
    """Raise ValueError if the export's folder holds something, or if it is, holds or lies in a folder that is read."""
    check_empty(out, "an export")
    check_apart("the export's folder", out, (("read for it", path) for path in read))


def merge_adapter(
    folder: Path, out: Path, dtype: str = "", shard_gib: float = SHARD_GIB
) -> str:
    """Write the model that a LoRA adapter's folder and its base make together, one parameter at a time.

    Returns a remark about the weights' precision, or "".

    Args:
        dtype: of the weights; by default that of the adapters, in which they were trained.

    Raises ValueError if it is no plain LoRA adapter, or `out` holds something.
    """
    files, shape = WeightFiles(folder), read_config(folder)
    _check_out(out, [folder, *(path.parent for path in files.paths)])
    reward = files.adapter.get("task_type") == "SEQ_CLS"
    sizes = parameter_shapes(shape, reward=reward)
    files.check(sizes)
    dtype = dtype or str(files.dtype).removeprefix("torch.")
    rounding, quantize = Rounding(dtype, shape), files.quantize

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, size in sizes.items():
            trained = (
                files.read(name, quantize=quantize).view(size) if quantize != "none" else None
            )
            merged, base = files.read(name).float(), files.base(name)
            yield rounding(name, merged.view(size), base.view(size), trained)

    base = files.adapter["base_model_name_or_path"]
    base = Path(base).name if Path(base).is_absolute() else base
    sources = [folder_with(folder, pattern) for pattern in (GENERATION, "tokenizer*")]
    with whole_folder(out) as new:
        shard, carried = int(shard_gib * 2**30), {} if reward else files.carried
        write_weights(
            new, stored_weights(shape, weights(), reward=reward), shard, carried=carried
        )
        card = f"""---
base_model: {json.dumps(base)}
tags: [ulysses-engine]
---
# {base} with LoRA adapters in its weights

Adapters of rank {files.adapter["r"]} were added to its weights, which are written in {dtype}.
No metrics were measured after that{": " if rounding.note else ""}{rounding.note}.
"""
        write_json(new / CONFIG, shape.to_hf(dtype=rounding.name, reward=reward))
        for source in sources:
            copy_side_files(source, new)
        (new / CARD).write_text(card, encoding="utf-8")
    return rounding.note


if __name__ == "__main__":
    raise SystemExit("error: the command is: ulysses export")
