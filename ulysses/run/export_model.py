"""Write the trained model as a Hugging Face folder: from a running engine, from a checkpoint, or by merging an adapter.

    RUN/tokenizer/   tokenizer and generation_config.json, as the run's exports carry them; written at the start
    RUN/export/      config.json, weights or adapters, the files of RUN/tokenizer, README.md (the model card)

A folder is written under a temporary name next to its target and takes its place whole, so that no file of an earlier
export stays in it.
"""

import json
import re
import shutil
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.arch import ModelConfig
from models.decoder import empty_model
from models.folders import CONFIG, folder_with, read_config, resolve_model
from models.hf_format import (
    GENERATION,
    TOKENIZER_FILES,
    Rounding,
    WeightFiles,
    copy_side_files,
    write_json,
    write_weights,
)
from ulysses.config.command_line import check
from ulysses.config.schema import Config
from ulysses.data.read.chat import SPECIAL_NAMES
from ulysses.data.read.sources import parse_sources
from ulysses.disk import check_apart, check_files, check_replaceable, whole_folder
from ulysses.registry import stage_of
from ulysses.run.checkpoint import read_run_state
from ulysses.run.metrics import logged
from ulysses.zero.state import SavedSlices

if TYPE_CHECKING:
    from ulysses.check.preflight import Prepared

CARD = "README.md"


# ---------------------------------------------------------------- tokenizer


def save_tokenizer(plan: "Prepared", target: Path) -> None:
    """Write the tokenizer's own files and generation_config.json as every export of the run will carry them.

    tokenizer.json is copied byte for byte. Of tokenizer_config.json only these keys change: a `tokenizer_class` that
    transformers 4 does not know, `model_input_names` if that class is a generic one, special tokens that differ, and
    `chat_template` if the run brings its own.
    """
    tokenizer, stage, source = plan.tokenizer, plan.stage, plan.tokenizer_place
    special = {name: getattr(tokenizer, name) for name in SPECIAL_NAMES}
    chat = stage.dataset_type != "text"
    own_template = chat and plan.config.data.chat_template != "tokenizer"
    with whole_folder(target) as new:
        if plan.folder is not None:
            copy_side_files(folder_with(plan.folder, GENERATION), new, (GENERATION,))
        if source.is_file():
            shutil.copyfile(source, new / "tokenizer.json")
        else:
            copy_side_files(source, new, TOKENIZER_FILES)
        if not (new / "tokenizer.json").exists():  # only vocab.json and merges.txt
            tokenizer.save_pretrained(str(new))
        if own_template:
            (new / "chat_template.json").unlink(missing_ok=True)
        if chat:
            if own_template or isinstance(tokenizer.chat_template, str):
                text = plan.template.text
                (new / "chat_template.jinja").write_text(text, encoding="utf-8")
            if not stage.reward:
                special["eos_token"] = tokenizer.convert_ids_to_tokens(
                    plan.template.end_of_turn
                )
                with _edited(new / GENERATION) as generation:
                    for name in ("bos_token_id", "eos_token_id"):
                        if (token := plan.shape.to_hf()[name]) is not None:
                            generation[name] = token
        with _edited(new / "tokenizer_config.json") as settings:
            if not settings:  # a bare tokenizer.json
                settings["clean_up_tokenization_spaces"] = False
            for name, token in special.items():
                old = settings.get(name)  # may be an object with its text as "content"
                if token not in (None, old["content"] if isinstance(old, dict) else old):
                    settings[name] = token
            generic = "PreTrainedTokenizerFast"  # transformers 4 also gives it token_type_ids, which no model takes
            if settings.get("tokenizer_class", "Backend").endswith(("Backend", generic)):
                settings["tokenizer_class"] = generic
                settings["model_input_names"] = ["input_ids", "attention_mask"]
            # transformers 5 writes a list, 4 reads only a dict under this name
            if isinstance(settings.get("extra_special_tokens"), list):
                settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
            if own_template:
                settings.pop("chat_template", None)


@contextmanager
def _edited(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a JSON file to be changed; a file that says all of it already is left as it is."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    after = dict(before)
    yield after
    if after != before:
        write_json(path, after)


# ---------------------------------------------------------------- weights


def export_model(
    read: Callable[[Callable[[str], bool]], Iterable[tuple[str, Any]]],
    out: Path,
    shape: ModelConfig,
    config: Config,
    step: int,
    *,
    merge: bool = False,
    rounded: Rounding | None = None,
) -> str:
    """Write everything that an export after `step` consists of; all ranks call it together, and the first one writes.

    Returns what is to be said of the weights' precision, or "".

    Args:
        read: read(wanted) yields the policy's parameters in the model's order; only the first rank needs their values.
        merge: add adapters to their base's weights. Otherwise they are written alone.
        rounded: has rounded what `read` yields.
    """
    lora, stage = config.model.lora, stage_of(config)
    whole = merge or not lora.rank
    weights = read(lambda name: whole and ".lora_" not in name)
    if lora.rank:
        from models.lora import is_adapter, merged, save_adapters

        adapters = dict(read(is_adapter))
    if dist.is_initialized() and dist.get_rank():
        deque(weights, maxlen=0)  # this rank only takes part in gathering them
        return ""
    rounded = rounded or Rounding(getattr(torch, config.model.dtype))
    with whole_folder(out, f" after step {step}") as new:
        if not whole:
            save_adapters(new, adapters, config.model, reward=stage.reward)
        else:
            given = merged(weights, adapters, lora, rounded) if lora.rank else weights
            write_weights(new, given)
        write_json(new / CONFIG, shape.to_hf(dtype=config.model.dtype, reward=stage.reward))
        copy_side_files(config.output / "tokenizer", new)
        note = f"\nThe metrics are of the trained weights: {rounded.note}.\n" * bool(
            rounded.note
        )
        card = model_card(config, step) + note
        (new / CARD).write_text(card, encoding="utf-8")
    return rounded.note


def export_checkpoint(
    checkpoint: Path, out: Path, *, merge: bool = False, dtype: str = ""
) -> str:
    """Write the policy saved in `checkpoint` to `out`, the same files that the run itself would export.

    Needs no GPU and no process group and holds one shard at a time. `merge` adds adapters to their base's weights, as
    model.lora.merge does. A base that is not of model.dtype is rounded after the adapters are added, where the run
    rounds it before. Returns what is to be said of the weights' precision, or "".

    Args:
        dtype: of the weights: float32, the master weights, or bfloat16; by default model.dtype, in which they were
            trained.

    Raises DiskError if a file does not hold what the run wrote. Raises ValueError if the folder is not a complete
    checkpoint, the base of merged adapters is in no file, or `out` may not be replaced.
    """
    state = read_run_state(checkpoint)
    check_files(checkpoint, {n: d for n, d in state["files"].items() if ".exp_avg" not in n})
    model = state["config"]["model"]
    trained, lora = model["dtype"], model["lora"]
    written = dtype or trained
    merge = lora["merge"] = lora["rank"] > 0 and (merge or lora["merge"])
    # adapters are rounded once only, after they were added
    model["dtype"] = trained if merge and dtype != "float32" else written
    state["config"]["run"]["output"] = str(checkpoint.parent.parent)
    config, shape = check(state["config"]), ModelConfig.from_hf(state["shape"])
    source, stage, saved = config.model, stage_of(config), SavedSlices(checkpoint)
    if merge and source.init == "random":  # a GPU drew other numbers
        raise ValueError(
            "the base of these adapters was drawn at random and is in no file; use the export that the run itself wrote"
        )
    _check_out(out, [checkpoint, config.output / "tokenizer", Path(source.path or checkpoint)])
    model, rounded, base = empty_model(shape, reward=stage.reward), None, {}
    if source.lora.rank:
        from models.lora import add_adapters

        add_adapters(model, source.lora)
    elif trained > written and source.init == "pretrained" and Path(source.path).is_dir():
        rounded, files = Rounding(torch.bfloat16), WeightFiles(Path(source.path))
        base = files.tensors

    def read(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if wanted(name):
                tensor = torch.empty(parameter.numel())
                saved.read_into(tensor, name, "master")
                if name in base and base[name].shape == parameter.shape:
                    tensor = rounded(tensor, files.read(name))
                yield name, tensor.to(getattr(torch, source.dtype)).view(parameter.shape)

    if not merge:
        return export_model(read, out, shape, config, state["step"], rounded=rounded)
    resolve_model(source.path, source.revision)  # a base that is gone is refused by its setting
    with TemporaryDirectory() as folder:
        adapters = Path(folder) / "adapters"
        export_model(read, adapters, shape, config, state["step"])
        return merge_adapter(adapters, out, written)


def _check_out(out: Path, read: Iterable[Path]) -> None:
    """Raise ValueError for a folder that an export may not replace, or that belongs to what it reads."""
    check_replaceable(out)
    check_apart("the export's folder", out, (("read for it", place) for place in read))


def merge_adapter(folder: Path, out: Path, dtype: str = "") -> str:
    """Write the model that a LoRA adapter's folder and its base make together, one parameter at a time.

    Returns what is to be said of the weights' precision, or "".

    Args:
        dtype: of the weights; by default the adapters', in which they were trained.

    Raises ValueError if it is no plain LoRA adapter, or `out` may not be replaced.
    """
    files, shape = WeightFiles(folder), read_config(folder)
    _check_out(out, [folder, *(path.parent for path in files.paths)])
    reward = files.adapter.get("task_type") == "SEQ_CLS"
    sizes = {n: p.shape for n, p in empty_model(shape, reward=reward).named_parameters()}
    files.check(sizes)
    dtype = dtype or str(files.dtype).removeprefix("torch.")
    rounded, kind = Rounding(getattr(torch, dtype)), files.quantize

    def weight(name: str) -> Tensor:
        exact = files.read(name).float()
        trained = files.read(name, quantize=kind) if kind != "none" else None
        return rounded(exact, files.base(name), trained).view(sizes[name])

    with whole_folder(out) as new:
        write_weights(new, ((name, weight(name)) for name in sizes))
        write_json(new / CONFIG, shape.to_hf(dtype=dtype, reward=reward))
        for pattern in (GENERATION, "tokenizer*"):
            copy_side_files(folder_with(folder, pattern), new)
        card = merged_card(files.adapter, dtype, rounded.note)
        (new / CARD).write_text(card, encoding="utf-8")
    return rounded.note


# ---------------------------------------------------------------- model card


def model_card(config: Config, step: int) -> str:
    """Return README.md: the base, the data's names, the settings, the metrics at `step`, and the versions.

    Where a folder or file lies concerns nobody else, so only its name is left.
    """
    base = config.model.path if config.model.init == "pretrained" else None
    settings = config.model_dump(
        mode="json", exclude_defaults=True, exclude={"run", "data", "deepspeed"}
    )
    settings["data"] = config.data.model_dump(include={"max_length", "eval_fraction"}) | {
        key: [Path(source.path).name for source in parse_sources(getattr(config.data, key))]
        for key in ("train", "eval")
    }
    lines = logged(config.output / "metrics.jsonl")
    metrics = dict(ChainMap(*(line for line in reversed(lines) if line["step"] <= step)))
    packages = ("ulysses-engine", "torch", "deepspeed", "transformers", "peft")
    facts = {
        "settings": settings,
        # speed and memory say nothing about the model
        f"metrics at step {step}": {
            k: v
            for k, v in metrics.items()
            if k == "loss" or ("/" in k and not k.startswith("time/"))
        },
        "versions": {name: d.version for name in packages for d in distributions(name=name)},
    }
    named = f"base_model: {json.dumps(base)}\n" if base else ""
    card = f"""---
{named}tags: [ulysses-engine, {config.stage}]
---
# Trained by {config.stage} from {base or "a random start"}

{step} steps of {config.batch.examples} examples.

```json
{json.dumps(facts, indent=2)}
```
"""
    return re.sub(r'(?<=["\s])[~/.][^"\n]*/', "", card)


def merged_card(adapter: Mapping[str, Any], dtype: str, note: str) -> str:
    """Return README.md of a base with an adapter in it, of which nobody has measured anything yet."""
    base = adapter["base_model_name_or_path"]
    name = Path(base).name if Path(base).is_absolute() else base
    return f"""---
base_model: {json.dumps(name)}
tags: [ulysses-engine]
---
# {name} with LoRA adapters in its weights

Adapters of rank {adapter["r"]} were added to its weights, which are written in {dtype}.
No metrics were measured after that{": " * bool(note)}{note}.
"""
