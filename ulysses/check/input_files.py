"""What a run reads besides the rows of its data: the model's shape and weights, and the tokenizer."""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from models.arch import KINDS, LISTS, NEUTRAL, ModelConfig, architecture
from models.folders import (
    ADAPTER_CONFIG,
    folder_with,
    name_of_base,
    read_config,
    resolve_model,
)
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.kinds import parameter_shapes
from ulysses.config.schema import Config, ModelSection
from ulysses.config.section import AbsentError, ConfigError, error_context
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message
from ulysses.data.read.sources import missing_sources, parse_sources
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast, load_tokenizer
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import check_fits
from ulysses.options import stage_of
from ulysses.stages.base import Stage

ROUTERS = {"router_aux_loss_coefficient", "freeze_router"}  # settings of experts
# A folder that holds none of these has no tokenizer, whatever else describes one.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
MOST_EXAMPLES = 2**28  # of an epoch, whose order is in memory


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


def check_examples(
    config: Config, train: TokenizedDataset, held_out: TokenizedDataset | None
) -> None:
    """Refuse open data of which nothing is trained on, or an example that is longer than a micro-batch."""
    counts = np.bincount(train.sources, minlength=len(train.source_weights))
    taken = (counts * train.source_weights).round()
    if taken.sum() > max(MOST_EXAMPLES, len(train)):
        raise ConfigError(
            f"by the weights or probabilities of its sources an epoch of data.train has {taken.sum():,.0f} examples, "
            f"but can have {MOST_EXAMPLES:,}; give less uneven ones"
        )
    for path, count, own in zip(train.source_paths, counts, taken):
        if count and not own:
            raise ConfigError(
                f"the weights or probabilities of data.train leave no example of {path} in an epoch, which has "
                f"{count}; raise its own, or remove it"
            )
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
            if model.init == "random":  # which belongs to nothing around it
                shape = replace(shape, around="")
            raw = shape.to_hf()
        elif model.arch:
            raw = architecture(model.arch).to_hf()
        if model.config or folder is None:
            raw.pop("rope_parameters", None)  # model.config may have either style
            for name in model.config:  # which may say in other words what `raw` says
                raw.pop(name, None)
                raw.pop(LISTS.get(name, ""), None)
            shape = ModelConfig.from_hf({**raw, **model.config}, **rope)
    family = shape.family
    known = {*shape.to_hf(), *KINDS, *NEUTRAL, *family.defaults, *family.fixed, *family.aliases}
    for name in sorted(model.config.keys() - known):
        near = f", did you mean {x[0]}" if (x := get_close_matches(name, known, 1)) else ""
        raise ConfigError(
            f"{name} is no field of a {shape.model_type} model here{near}; correct or remove it",
            "model.config",
        )
    return shape, folder


def check_model(config: Config, stage: Stage, shape: ModelConfig, folder: Path | None) -> None:
    """Refuse a shape whose export could not be loaded, and weights in the model's folder that do not fit it."""
    shape.to_hf(reward=stage.reward)
    if folder and config.model.init == "pretrained":
        with error_context("model.path"):
            check_weights(shape, folder, reward=stage.reward, quantize=config.model.quantize)


def check_routers(model: ModelSection, shape: ModelConfig) -> Iterator[str]:
    """Yield which settings of experts have no effect."""
    for key, value in model.model_dump(include=ROUTERS, exclude_defaults=True).items():
        if not shape.moe:
            yield f"model.{key} is {value} but a {shape.model_type} model has no experts; remove it"
        elif key != "freeze_router" and (model.freeze_router or model.lora.rank):
            why = "model.freeze_router" if model.freeze_router else "model.lora.rank"
            yield f"model.{key} is {value:g} but {why} is set, which trains no router; set it to 0"


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
        sampled = " or ppo.max_new_tokens" if longest > config.data.max_length else ""
        raise ConfigError(
            f"sequences may have {longest} tokens but the window of the model has {window}; set {table}.type = "
            f'"yarn" and {table}.factor = {-(-longest // original):.1f}, lower data.max_length{sampled}, or insist '
            "with model.rope.extrapolate = true",
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
    if shape.around and all(name.startswith("mtp.") for name in files.carried):
        raise ValueError(
            f"{folder.absolute()} has a config.json with a vision model but holds no tensors of one; complete the "
            "files, or write its text_config alone as config.json"
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
    expected = parameter_shapes(shape, reward=reward)
    files.check(expected, may_lack=("score.weight",) if reward else ())


def initial_weights(
    config: Config,
    stage: Stage,
    shape: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate | None,
    folder: Path | None,
    place: Path,
) -> tuple[ModelConfig, InitialWeights]:
    """Return the shape as config.json of the export describes it, and the weights that training starts from."""
    pretrained = config.model.init == "pretrained"
    shape = stage.exported_config(shape, tokenizer)
    if template and not stage.reward:
        # config.json names every token that ends a turn: the template's, EOS and those that the model has learnt
        known = shape.eos_token_id if pretrained else ()
        ends = {template.end_of_turn, template.encoder.eos, *known}
        shape = replace(shape, eos_token_id=tuple(sorted(ends)))
    found, rows = folder if pretrained else None, {}
    continues = False
    if found and (found / ADAPTER_CONFIG).is_file():
        continues = name_of_base(found)[0] == config.model.path
    if added := config.model.add_tokens:
        before = load_tokenizer(place, **config.model.special_tokens)
        pieces = [before.encode(text, add_special_tokens=False) for text in added]
        # rows that only fill the vocabulary up are made like the last token's
        numbers = [
            *tokenizer.convert_tokens_to_ids(added),
            *range(len(tokenizer), shape.vocab_size),
        ]
        rows = dict(zip_longest(numbers, pieces, fillvalue=pieces[-1]))
    given = config.run.seed, found, config.model.quantize
    return shape, InitialWeights(shape, *given, new_rows=rows, continues=continues)


# ---------------------------------------------------------------- tokenizer


def read_tokenizer(
    config: Config, stage: Stage, shape: ModelConfig, folder: Path | None
) -> tuple[ModelConfig, PreTrainedTokenizerFast | None, Path | None, ChatTemplate | None]:
    """Return the shape with model.add_tokens, the tokenizer, where it was read and, for chats, its template.

    All but the shape is None if it is absent with the model.
    """
    given = config.model.tokenizer
    if given:
        place = Path(given)
        if not place.exists():
            place = resolve_model(given, need_weights=False, key="model.tokenizer")
    elif folder:
        place = folder_with(folder, "tokenizer*")
    elif config.model.path:
        return shape, None, None, None
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
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {place} has {len(tokenizer)} tokens but the model's vocabulary has {shape.vocab_size}; "
            "use the model's own tokenizer or, for random weights, raise model.config.vocab_size"
        )
    if added := config.model.add_tokens:
        if len({*added} - {"", *tokenizer.get_vocab()}) < len(added):
            raise ConfigError(
                f"{added} has an empty token, one twice, or one that the tokenizer {place} knows; remove it",
                "model.add_tokens",
            )
        tokenizer.add_tokens(added)
        if len(tokenizer) > shape.vocab_size:
            multiple = config.model.pad_vocabulary
            shape = replace(shape, vocab_size=-(-len(tokenizer) // multiple) * multiple)
    template = None
    if stage.dataset_type != "text":
        with error_context("data.chat_template"):
            given = config.data.chat_template, config.data.chat_template_kwargs
            template = ChatTemplate(tokenizer, *given)
        samples, window = config.run.samples, shape.max_position_embeddings
        with error_context("run.samples"):
            for text in samples if isinstance(samples, list) else ():
                prompt = template.render([Message("user", text)])
                if len(template.encoder.encode(prompt)[0][0]) >= window:
                    raise ValueError(
                        f"the model's window of {window:,} tokens is too short for {text[:40]!r} and an answer"
                    )
    return shape, tokenizer, place, template
