"""What a run reads besides the rows of its data: the models' shapes and weights, the tokenizer and the rewards."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from models.arch import ARCHITECTURES, ModelConfig, architecture
from models.decoder import empty_model
from models.folders import folder_with, read_config, resolve_model
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import AbsentError, ConfigError, error_context
from ulysses.config.stage_sections import is_function
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.sources import missing_sources, parse_sources
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.data.serve.steps import check_fits
from ulysses.registry import stage_of
from ulysses.stages.base import AuxiliaryModel, Stage

# A folder that holds none of these has no tokenizer, whatever else describes one.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")


# ---------------------------------------------------------------- data


def check_sources(config: Config) -> None:
    """Refuse data that are not there, before anything opens them."""
    data = config.data
    if missing := missing_sources(parse_sources(data.train) + parse_sources(data.eval)):
        with error_context("data"):
            raise FileNotFoundError("; ".join(missing))
    if not data.train:
        raise AbsentError(
            "data.train is empty; set it to a file, a folder, a hub dataset or a list of them"
        )


def check_examples(config: Config, train: Any, held_out: Any) -> None:
    """Refuse open data of which nothing is trained on, or an example that is longer than a micro-batch."""
    copies = np.bincount(train.sources) * np.asarray(train.source_weights)
    if not copies.round().any():
        raise ConfigError("the weights of the data sources leave no example; raise them")
    budget = config.batch.tokens_per_microbatch
    for data in (train, held_out):
        if data and budget != "auto":
            check_fits(int(data.lengths.max()), budget)


# ---------------------------------------------------------------- the trained model


def read_shape(config: Config, need_weights: bool = True) -> tuple[ModelConfig, Path | None]:
    """Return the model's shape, and its folder or None for a shape given by name or keys.

    Without `need_weights` the weights of a hub id are not fetched.

    Raises ValueError or FileNotFoundError if there is no such model, or if it is not supported.
    """
    model, folder, raw = config.model, None, {}
    rope = model.rope.changes()
    if model.path:
        folder = resolve_model(model.path, model.revision, need_weights=need_weights)
    with error_context("model"):
        if folder is not None:
            shape = read_config(folder, **rope)
            # random weights belong to nothing around them
            raw = (shape if model.init == "pretrained" else replace(shape, around="")).to_hf()
        elif model.arch:
            raw = architecture(model.arch).to_hf()
        raw.pop("rope_parameters", None)  # model.config may have either style
        return ModelConfig.from_hf({**raw, **model.config}, **rope), folder


def check_model(config: Config, stage: Stage, shape: ModelConfig, folder: Path | None) -> None:
    """Refuse a shape whose export could not be loaded, and weights in the model's folder that do not fit it."""
    shape.to_hf(reward=stage.reward)
    if folder and config.model.init == "pretrained":
        with error_context("model.path"):
            check_weights(shape, folder, reward=stage.reward, quantize=config.model.quantize)


def published_shape(config: Config) -> ModelConfig | None:
    """Return the shape that model.path, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    model = config.model
    name = Path(model.path or "").name.lower()
    names = name + " " + re.sub(r"^([a-z-]+)-(\d)", r"\1\2", name)
    shape = next((shape for key, shape in ARCHITECTURES.items() if key in names), None)
    if shape is None:
        return None
    if "qwen2.5" in name and "instruct" in name:
        shape = replace(shape, max_position_embeddings=32768)
    return ModelConfig.from_hf(shape.to_hf(), **model.rope.changes())


def fit_window(
    config: Config, shape: ModelConfig, setting: str = "data.max_length"
) -> ModelConfig:
    """Return the shape with a window that holds the run's longest sequence.

    Only random weights, and a model that is to extrapolate, learn a longer window than they have; for others
    ConfigError refuses such a sequence. `setting` names the model's, or another model.
    """
    longest = stage_of(config).requirements.longest_example
    window, scaling = shape.max_position_embeddings, shape.rope_scaling
    is_own = setting == "data.max_length"
    learns = is_own and config.model.init == "random"
    if longest > window and not learns and not config.model.rope.extrapolate:
        original = scaling.original_max_position_embeddings if scaling else window
        table = "model.rope" if is_own else "rope_scaling"
        raise ConfigError(
            f"sequences may have {longest} tokens but the window of the model has {window}; set {table}.type = "
            f'"yarn" and {table}.factor = {-(-longest // original):.1f}, lower data.max_length, or insist with '
            "model.rope.extrapolate = true",
            setting,
        )
    return replace(shape, max_position_embeddings=max(longest, window))


def check_weights(
    shape: ModelConfig, folder: Path, *, reward: bool, quantize: str = "nf4"
) -> None:
    """Refuse weight files that do not hold every parameter in its shape, before anything is allocated.

    Raises ValueError naming the first parameter that is missing or wrong.
    """
    files = WeightFiles(folder)
    layers = {name.split(".")[2] for name in files.tensors if name.startswith("model.layers.")}
    if len(layers) != shape.num_hidden_layers:
        raise ValueError(
            f"{folder.absolute()} holds {len(layers)} layers, but its config.json has num_hidden_layers = "
            f"{shape.num_hidden_layers}; check that config.json belongs to these weights"
        )
    packed = {
        bool(t.state) for name, t in files.tensors.items() if name.endswith("_proj.weight")
    }
    if True in packed and (quantize != "nf4" or False in packed):
        raise ValueError(
            f"{folder.absolute()} holds {'some ' if False in packed else ''}matrices quantised to NF4; set "
            'model.quantize = "nf4" and model.lora.rank if all matrices of the layers are, or use the model that they '
            "were made from"
        )
    model = empty_model(shape, reward=reward)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    files.check(expected, may_lack=("score.weight",) if reward else ())


def initial_weights(
    config: Config,
    stage: Stage,
    shape: ModelConfig,
    tokenizer: Any,
    template: ChatTemplate | None,
    folder: Path | None,
) -> tuple[ModelConfig, InitialWeights]:
    """Return the shape as config.json of the export describes it, and the weights that training starts from."""
    pretrained = config.model.init == "pretrained"
    shape = stage.exported_config(shape, tokenizer)
    if template and not stage.reward:
        # config.json names every token that ends a turn: the template's, EOS and those that the model has learnt
        known = shape.eos_token_id if pretrained else ()
        ends = {template.end_of_turn, template.encoder.eos, *known}
        shape = replace(shape, eos_token_id=tuple(sorted(ends)))
    found = folder if pretrained else None
    return shape, InitialWeights(shape, config.run.seed, found, config.model.quantize)


# ---------------------------------------------------------------- the stage's other models


def read_others(
    config: Config, stage: Stage, need_weights: bool, others: dict[str, InitialWeights]
) -> list[ConfigError]:
    """Fill `others` with the weights of the run's other models, by their settings; return what is wrong with them."""
    errors: list[Any] = []
    for other in filter(lambda model: model.path, stage.requirements.models):
        with error_context(errors=errors):
            others[other.setting] = weights = read_other(other, need_weights=need_weights)
            fit_window(config, weights.shape, other.setting)
    return errors


def read_other(other: AuxiliaryModel, *, need_weights: bool = True) -> InitialWeights:
    """Return the weights of a model that the run reads besides the trained one."""
    folder = resolve_model(other.path, need_weights=need_weights, key=other.setting)
    with error_context(other.setting):
        weights = InitialWeights(read_config(folder), 0, folder)
        check_weights(weights.shape, folder, reward=other.is_reward)
        if other.is_reward and "score.weight" not in weights.stored:
            raise ValueError(
                f"{folder} has no score.weight, so it is not a reward model; train one with stage rm, or name a "
                "function as module:function"
            )
        return weights


def check_models(
    stage: Stage, shape: ModelConfig, tokenizer: Any, others: dict[str, InitialWeights]
) -> Iterator[str]:
    """Return what the stage objects to in the models and the tokenizer."""
    return stage.check_models(shape, tokenizer, others)


def check_rewards(config: Config, strict: bool) -> list[ConfigError]:
    """Return errors for reward functions that are not there; only a run that starts imports them: user's code runs."""
    errors: list[Any] = []
    for reward in filter(is_function, config.ppo.reward):
        with error_context(errors=errors):
            if strict:
                from ulysses.rl.rewards import load_function

                load_function(reward)
            elif "//" not in reward and find_spec(re.split("[.:]", reward)[0]) is None:
                raise ConfigError(
                    f"ppo.reward is {reward!r} but there is no such module; name a function as module:function, with "
                    "the module's folder on PYTHONPATH"
                )
    return errors


# ---------------------------------------------------------------- tokenizer


def read_tokenizer(
    config: Config, stage: Stage, shape: ModelConfig, folder: Path | None
) -> tuple[Any, Path | None, ChatTemplate | None]:
    """Return the tokenizer, where it was read and, for chats, its template; nothing if it is absent with the model."""
    given = config.model.tokenizer
    if given:
        place = Path(given)
        if not place.exists():
            place = resolve_model(given, need_weights=False, key="model.tokenizer")
    elif folder:
        place = folder_with(folder, "tokenizer*")
    elif config.model.path:
        return None, None, None
    else:
        raise AbsentError(
            "model.tokenizer is missing, and there is no model.path to take it from; set it to a folder, a hub id "
            "or a tokenizer.json"
        )
    if place.is_dir() and not any(chain(*map(place.glob, TOKENIZERS))):
        raise AbsentError(
            f"{place.absolute()} holds no tokenizer ({', '.join(TOKENIZERS)}); copy the model's own into it, or set "
            "model.tokenizer to a folder, a hub id or a tokenizer.json",
            "model.tokenizer",
        )
    with error_context("model.tokenizer"):
        tokenizer = load_tokenizer(place, **config.model.special_tokens)
    template = None
    if stage.dataset_type != "text":
        with error_context("data.chat_template"):
            given = config.data.chat_template, config.data.chat_template_kwargs
            template = ChatTemplate(tokenizer, *given)
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {place} has {len(tokenizer)} tokens but the model's vocabulary has {shape.vocab_size}; "
            "use the model's own tokenizer or, for random weights, raise model.config.vocab_size"
        )
    return tokenizer, place, template
