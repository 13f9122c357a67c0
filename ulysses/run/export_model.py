"""Write a trained model as a Hugging Face folder, for a run and for the command `ulysses export`.

    RUN/tokenizer/   tokenizer and generation_config.json, as the run's exports carry them; written at the start
    RUN/export/      config.json, weights or adapters, the files of RUN/tokenizer, README.md (the model card)

A folder is written under a temporary name next to its target and takes its place whole, so that no file of an earlier
export stays in it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from itertools import starmap
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from models.arch import ModelConfig
from models.families import Fields
from models.folders import CONFIG, folder_with, resolve_model
from models.hf_format import WeightFiles
from models.multimodal import multimodal_name
from models.writing import (
    GENERATION,
    TOKENIZER_FILES,
    Rounding,
    copy_side_files,
    is_wider,
    stored_weights,
    whole_weights,
    write_weights,
)
from ulysses.check.input_files import RunInputs
from ulysses.config.schema import Config
from ulysses.data.read.sources import parse_sources
from ulysses.data.read.tokenizer import SPECIAL_NAMES
from ulysses.disk import whole_folder, write_json
from ulysses.options import stage_of
from ulysses.run.metrics import METRICS, logged

CARD = "README.md"


# ---------------------------------------------------------------- tokenizer


def save_tokenizer(inputs: RunInputs, target: Path) -> None:
    """Write the tokenizer's files and generation_config.json, which every export of the run will carry.

    tokenizer.json is copied byte for byte unless the run adds tokens. In tokenizer_config.json only these keys change:
    a `tokenizer_class` that transformers 4 does not know, `model_input_names` if that class is a generic one, special
    tokens that differ, the template's variables, and `chat_template` if the run has another one.
    """
    tokenizer, stage, source = inputs.tokenizer, inputs.stage, inputs.tokenizer_path
    special = {name: getattr(tokenizer, name) for name in SPECIAL_NAMES}
    chat = stage.dataset_type != "text"
    other_template = chat and inputs.config.data.chat_template != "tokenizer"
    with whole_folder(target, replaces=True) as new:
        if inputs.folder is not None:
            of_model = GENERATION, "*processor*.json", "LICENSE*"
            copy_side_files(folder_with(inputs.folder, GENERATION), new, of_model)
        if source.is_file():
            shutil.copyfile(source, new / "tokenizer.json")
        else:
            copy_side_files(source, new, TOKENIZER_FILES)
        # some sources have only vocab.json and merges.txt
        if not (new / "tokenizer.json").exists():
            tokenizer.save_pretrained(str(new))
        if inputs.config.model.add_tokens:
            tokenizer.backend_tokenizer.save(str(new / "tokenizer.json"))
        if other_template:
            (new / "chat_template.json").unlink(missing_ok=True)
        if chat:
            if other_template or isinstance(tokenizer.chat_template, str):
                text = inputs.template.text
                (new / "chat_template.jinja").write_text(text, encoding="utf-8")
            if not stage.reward:
                special["eos_token"] = tokenizer.convert_ids_to_tokens(
                    inputs.template.end_of_turn
                )
                written = replace(inputs.shape, around="").to_hf()
                with _edited(new / GENERATION) as generation:
                    for name in ("bos_token_id", "eos_token_id"):
                        if (token := written[name]) is not None:
                            generation[name] = token
        with _edited(new / "tokenizer_config.json") as settings:
            if not settings:  # the source is a tokenizer.json alone
                settings["clean_up_tokenization_spaces"] = False
            for name, token in special.items():
                old = settings.get(name)
                if isinstance(old, dict):
                    old = old["content"]
                if token not in (None, old):
                    settings[name] = token
            # transformers 4 would also return token_type_ids for the generic class, which no model takes
            generic = "PreTrainedTokenizerFast"
            if settings.get("tokenizer_class", "Backend").endswith(("Backend", generic)):
                settings["tokenizer_class"] = generic
                settings["model_input_names"] = ["input_ids", "attention_mask"]
            # transformers 5 writes a list, 4 reads only a dict under this name
            if isinstance(settings.get("extra_special_tokens"), list):
                settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
            if other_template:
                settings.pop("chat_template", None)
            # ulysses chat, generate and score pass the variables on to the template
            variables = inputs.config.data.chat_template_kwargs
            if settings.get("chat_template_kwargs", {}) != variables:
                settings["chat_template_kwargs"] = variables


@contextmanager
def _edited(path: Path) -> Iterator[Fields]:
    """Yield the content of a JSON file, to be changed; the file is written only if the content has changed."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    after = dict(before)
    yield after
    if after != before:
        write_json(path, after)


# ---------------------------------------------------------------- weights

Read = Callable[[Callable[[str], bool]], Iterable[tuple[str, Tensor]]]


def served_weights(
    read: Read, shape: ModelConfig, config: Config
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights that an export for servers holds, with the same names and bits, where `read` has them.

    All ranks iterate together, and the first one gets the weights. Tensors that are only copied from the base are not
    among them.
    """
    lora = config.model.lora
    adapters = {}
    weights = read(lambda name: ".lora_" not in name)
    if lora.rank:
        from models.lora import is_adapter

        adapters = dict(read(partial(is_adapter, whole=lora.train)))
    if dist.is_initialized() and dist.get_rank():
        for _ in weights:
            pass  # this rank only takes part in gathering them
        return
    merged = whole_weights(shape, weights, adapters, config.model)
    rounding = Rounding(config.model.dtype, shape)
    yield from stored_weights(shape, starmap(rounding, merged))


def export_model(
    read: Read,
    out: Path,
    shape: ModelConfig,
    config: Config,
    step: int,
    *,
    reward: bool = False,
    dtype: str = "",
    for_servers: bool = False,
) -> str:
    """Write the export after `step`, which is complete when `out` exists; all ranks call it, and the first one writes.

    Returns a remark about the weights' precision, or "".

    Args:
        read: read(wanted) yields the policy's parameters in the model's order; only the first rank needs their values.
        reward: the policy is a reward model.
        dtype: of the weights in place of the configured one.
        for_servers: write whole weights as they are trained on, in place of those that were written to `out` before.
    """
    model, lora = config.model, config.model.lora
    whole = for_servers or lora.merge or not lora.rank
    weights = read(lambda name: whole and ".lora_" not in name)
    adapters = {}
    if lora.rank:
        from models.lora import is_adapter, save_adapters

        adapters = dict(read(partial(is_adapter, whole=lora.train)))
    if dist.is_initialized() and dist.get_rank():
        for _ in weights:
            pass  # this rank only takes part in gathering them
        return ""
    rounding = Rounding(dtype or config.export_dtype, shape)
    task, end_of_call = "CausalLM", ")"
    if reward:
        # the base may pad with the token that ends turns, and transformers would score the token before it
        task = "SequenceClassification"
        pad = f"model.config.get_text_config().pad_token_id = {shape.pad_token_id}"
        end_of_call = f", num_labels=1)\n{pad}"
    was_quantised = model.quantize != "none" and not for_servers
    from_folder = not lora.rank and Path(str(model.path)).is_dir()
    reads_base = was_quantised or (is_wider(model.dtype, rounding.name) and from_folder)
    # tensors of vision or multi-token prediction, which are copied from the base
    has_others = (shape.around or shape.delta) and not reward
    base_files = None
    carried = {}
    if whole and model.init == "pretrained" and (reads_base or has_others):
        base_files = WeightFiles(resolve_model(str(model.path), model.revision))
        carried = base_files.carried if has_others else {}
    # servers do not read it, and get weights at every rollout: it would read a log that grows with the run
    card = "" if for_servers else model_card(config, step)
    if not whole:
        adapted = shape.adapted_class(task)
        card += f"""
The adapters are for transformers' {adapted}. PEFT loads them with their base:

```python
model = AutoPeftModelFor{task}.from_pretrained("."{end_of_call}
```
"""
    with whole_folder(out, f" after step {step}", replaces=for_servers) as new:
        if whole:
            merged = whole_weights(
                shape, weights, adapters, model, base_files if reads_base else None
            )
            shard = int(config.export.shard_gib * 2**30)
            stored = stored_weights(shape, starmap(rounding, merged), reward=reward)
            write_weights(new, stored, shard, carried=carried)
        else:
            is_text = not shape.around or adapted.endswith("ForCausalLM")
            adapters = {
                name if is_text else multimodal_name(name): x.to(rounding.dtype)
                for name, x in adapters.items()
            }
            by_parameter = shape.family.mlp_by_parameter
            save_adapters(new, adapters, model, reward=reward, by_parameter=by_parameter)
        if rounding.note:
            card += f"\nThe metrics are of the trained weights: {rounding.note}.\n"
        write_json(new / CONFIG, shape.to_hf(dtype=rounding.name, reward=reward))
        copy_side_files(config.output / "tokenizer", new)
        if not for_servers:
            (new / CARD).write_text(card, encoding="utf-8")
    return rounding.note


# ---------------------------------------------------------------- model card


def model_card(config: Config, step: int) -> str:
    """Return the text of README.md: the base, the data's names, the settings, the newest metrics, the versions.

    Of paths only the last names are left, because a model may be published, and its folders are nobody else's business.
    """
    base = config.model.path if config.model.init == "pretrained" else None
    settings = config.model_dump(
        mode="json", exclude_defaults=True, exclude={"run", "data", "deepspeed"}
    )
    settings["data"] = config.data.model_dump(include={"max_length", "eval_fraction"}) | {
        key: [Path(source.path).name for source in parse_sources(getattr(config.data, key))]
        for key in ("train", "eval")
    }
    metrics = {}
    for line in logged(config.output / METRICS):
        if line["step"] <= step:
            metrics |= line
    packages = ("ulysses-engine", "torch", "deepspeed", "transformers")
    facts = {
        "settings": settings,
        # place, speed and memory say nothing about the model
        f"newest metrics up to step {step}": {
            k: v
            for k, v in metrics.items()
            if not re.match("step|run|lr|tokens|seconds|mfu|peak_memory|time/", k)
        },
        "versions": {name: d.version for name in packages for d in distributions(name=name)},
    }
    named = f"base_model: {json.dumps(base)}\n" if base else ""
    card = f"""---
{named}tags: [ulysses-engine, {config.stage}]
---
# Trained by {config.stage} from {base or "a random start"}

{step} steps of {stage_of(config).requirements.examples_per_step} examples.

```json
{json.dumps(facts, indent=2)}
```
"""
    # a metric's name may end with the folder of a reward model
    return re.sub(r'(["\s]|objective/scores/)[~/.][^"\n]*/', r"\1", card)
