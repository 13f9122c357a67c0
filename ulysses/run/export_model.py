"""Write the trained model as a Hugging Face folder; ulysses/export.py does so without a run.

    RUN/tokenizer/   tokenizer and generation_config.json, as the run's exports carry them; written at the start
    RUN/export/      config.json, weights or adapters, the files of RUN/tokenizer, README.md (the model card)

A folder is written under a temporary name next to its target and takes its place whole, so that no file of an earlier
export stays in it.
"""

import json
import re
import shutil
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from models.arch import ModelConfig
from models.families import Fields
from models.folders import CONFIG, folder_with, resolve_model
from models.hf_format import WeightFiles
from models.kinds import empty_model
from models.modules import Exact
from models.writing import (
    GENERATION,
    TOKENIZER_FILES,
    Rounding,
    copy_side_files,
    write_weights,
)
from ulysses.check.inputs import RunInputs
from ulysses.config.schema import Config
from ulysses.data.read.sources import parse_sources
from ulysses.data.read.tokenizer import SPECIAL_NAMES
from ulysses.disk import whole_folder, write_json
from ulysses.options import stage_of
from ulysses.run.metrics import METRICS, logged

CARD = "README.md"


# ---------------------------------------------------------------- tokenizer


def save_tokenizer(inputs: RunInputs, target: Path) -> None:
    """Write the tokenizer's own files and generation_config.json as every export of the run will carry them.

    tokenizer.json is copied byte for byte. Of tokenizer_config.json only these keys change: a `tokenizer_class` that
    transformers 4 does not know, `model_input_names` if that class is a generic one, special tokens that differ, and
    `chat_template` if the run brings its own.
    """
    tokenizer, stage, source = inputs.tokenizer, inputs.stage, inputs.place
    special = {name: getattr(tokenizer, name) for name in SPECIAL_NAMES}
    chat = stage.dataset_type != "text"
    own_template = chat and inputs.config.data.chat_template != "tokenizer"
    with whole_folder(target, replaces=True) as new:
        if inputs.folder is not None:
            of_model = GENERATION, "*processor*.json", "LICENSE*"
            copy_side_files(folder_with(inputs.folder, GENERATION), new, of_model)
        if source.is_file():
            shutil.copyfile(source, new / "tokenizer.json")
        else:
            copy_side_files(source, new, TOKENIZER_FILES)
        if not (new / "tokenizer.json").exists():  # only vocab.json and merges.txt
            tokenizer.save_pretrained(str(new))
        if inputs.config.model.add_tokens:
            tokenizer.backend_tokenizer.save(str(new / "tokenizer.json"))
        if own_template:
            (new / "chat_template.json").unlink(missing_ok=True)
        if chat:
            if own_template or isinstance(tokenizer.chat_template, str):
                text = inputs.template.text
                (new / "chat_template.jinja").write_text(text, encoding="utf-8")
            if not stage.reward:
                special["eos_token"] = tokenizer.convert_ids_to_tokens(
                    inputs.template.end_of_turn
                )
                with _edited(new / GENERATION) as generation:
                    for name in ("bos_token_id", "eos_token_id"):
                        written = replace(inputs.shape, around="").to_hf()
                        if (token := written[name]) is not None:
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
            # ulysses chat, generate and score give them to the template
            variables = inputs.config.data.chat_template_kwargs
            if settings.get("chat_template_kwargs", {}) != variables:
                settings["chat_template_kwargs"] = variables


@contextmanager
def _edited(path: Path) -> Iterator[Fields]:
    """Yield the content of a JSON file to be changed; a file that says all of it already is left as it is."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    after = dict(before)
    yield after
    if after != before:
        write_json(path, after)


# ---------------------------------------------------------------- weights


def export_model(
    read: Callable[[Callable[[str], bool]], Iterable[tuple[str, Tensor]]],
    out: Path,
    shape: ModelConfig,
    config: Config,
    step: int,
    *,
    merge: bool = False,
    dtype: str = "",
    replaces: bool = False,
) -> str:
    """Write everything that an export after `step` consists of; all ranks call it together, and the first one writes.

    Returns what is to be said of the weights' precision, or "".

    Args:
        read: read(wanted) yields the policy's parameters in the model's order; only the first rank needs their values.
        merge: add adapters to their base's weights. Otherwise they are written alone.
        dtype: of the weights in place of the configured one.
        replaces: `out` is a folder that the run itself has written before.
    """
    lora, stage = config.model.lora, stage_of(config)
    whole = merge or not lora.rank
    weights = read(lambda name: whole and ".lora_" not in name)
    if lora.rank:
        from models.lora import is_adapter, merged, save_adapters

        adapters = dict(read(partial(is_adapter, whole=lora.train)))
    if dist.is_initialized() and dist.get_rank():
        deque(weights, maxlen=0)  # this rank only takes part in gathering them
        return ""
    dtype, carried, base = dtype or config.export_dtype, {}, {}
    rounded = Rounding(getattr(torch, dtype))
    source = config.model
    has_others = shape.around or shape.delta  # tensors of vision, or of MTP
    if has_others and source.init == "pretrained" and whole and not stage.reward:
        folder = resolve_model(str(source.path), source.revision)
        carried = WeightFiles(folder).carried
    known = source.init == "pretrained" and Path(str(source.path)).is_dir()
    if known and dtype < source.dtype and not lora.rank:
        files = WeightFiles(Path(str(source.path)))
        base = files.tensors

    exact = set()
    if shape.delta:  # the decay of linear attention stays in float32
        parameters = empty_model(shape).named_parameters()
        exact = {name for name, p in parameters if isinstance(p, Exact)}

    def written(name: str, tensor: Tensor) -> Tensor:
        if name in exact:
            return tensor.float()
        if name in base and base[name].shape == tensor.shape:
            return rounded(tensor.view(-1), files.read(name)).view_as(tensor)
        return tensor.to(rounded.dtype)

    auto = "SequenceClassification" if stage.reward else "CausalLM"
    with whole_folder(out, f" after step {step}", replaces=replaces) as new:
        if not whole:
            adapters = {
                shape.adapted_name(name, auto): x.to(rounded.dtype)
                for name, x in adapters.items()
            }
            by_parameter = shape.family.mlp_by_parameter
            save_adapters(
                new, adapters, config.model, reward=stage.reward, by_parameter=by_parameter
            )
        else:
            if lora.rank:
                weights = merged(weights, adapters, lora, shape, rounded)
            write_weights(
                new,
                ((name, written(name, tensor)) for name, tensor in weights),
                int(config.export.shard_gib * 2**30),
                config=shape,
                reward=stage.reward,
                carried=carried,
            )
        write_json(new / CONFIG, shape.to_hf(dtype=dtype, reward=stage.reward))
        copy_side_files(config.output / "tokenizer", new)
        card = model_card(config, step)
        if not whole:
            card += f"""
The adapters are for transformers' {shape.adapted_class(auto)}. PEFT loads them with their base:

```python
model = AutoPeftModelFor{auto}.from_pretrained("."{", num_labels=1" * stage.reward})
```
"""
        if rounded.note:
            card += f"\nThe metrics are of the trained weights: {rounded.note}.\n"
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
    lines = logged(config.output / METRICS)
    metrics = dict(ChainMap(*(line for line in reversed(lines) if line["step"] <= step)))
    packages = ("ulysses-engine", "torch", "deepspeed", "transformers")
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
