"""What a run reads besides the rows of its data: the model's shape and weights, and the tokenizer.

RunInputs is what the checks hand to the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

import numpy as np

from models.arch import ModelConfig, architecture, recognised
from models.config_json import FIELD_KINDS, NEUTRAL, SYNONYMS
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
from ulysses.config.section import AbsentError, ConfigError, error_context, refuse
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.messages import Message
from ulysses.data.read.sources import missing_sources, parse_sources
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast, load_tokenizer
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import check_fits, examples_taken
from ulysses.parallel.kernels.choice import KernelChoice
from ulysses.stages.base import Stage

ROUTERS = {"router_aux_loss_coefficient", "freeze_router"}  # settings of experts
# Files that hold a tokenizer's vocabulary: a folder without any has no tokenizer, whatever else describes one.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
# in a dataset's README.md: the table before the text, and a subset that it names
CARD = re.compile(r"---\n(.*?)^---", re.DOTALL | re.MULTILINE)
SUBSET = re.compile(r"""^[ -]*config_name: *["']?([^\s"']+)""", re.MULTILINE)
MOST_EXAMPLES = 2**28  # of an epoch, whose order is in memory


@dataclass(frozen=True)
class RunInputs:
    """What a run starts from, as the checks found it; after a dry run with findings some of it is None."""

    stage: Stage
    shape: ModelConfig
    folder: Path | None  # of the model; None for a shape given by name or keys
    tokenizer: PreTrainedTokenizerFast
    tokenizer_path: Path  # the folder, or the tokenizer.json, that the tokenizer was read from
    template: ChatTemplate | None  # None for plain text
    weights: InitialWeights
    # of the stage's other models, by the settings that name them
    others: dict[str, InitialWeights]
    attention: str  # the name by which the layers choose their kernel
    kernel: KernelChoice
    resume_from: Path | None
    disk_warning: str = ""

    @property
    def config(self) -> Config:
        return self.stage.config


# ---------------------------------------------------------------- data


def check_sources(config: Config) -> None:
    """Refuse data that do not exist, before anything opens them."""
    data = config.data
    sources = parse_sources(data.train) + parse_sources(data.eval)
    if missing := missing_sources(sources):
        with error_context("data"):
            raise FileNotFoundError("; ".join(missing))
    for source in sources:
        if (source.subset or source.revision) and not source.is_on_hub:
            raise ConfigError(
                f"data source {source.path}: subset and revision are read of a dataset on the hub alone; remove them"
            )
        file = source.local_path / "README.md"
        card = CARD.match(file.read_text(errors="replace")) if file.is_file() else None
        subsets = {*SUBSET.findall(card[1])} if card else ()
        if len(subsets) > 1:
            raise ConfigError(
                f"data source {source.path}: its README.md names the subsets {', '.join(sorted(subsets))}; name the "
                "folder or the files of one of them, or list those of several"
            )
    if data.stopping_strategy != "first_exhausted" and not any(s.probability for s in sources):
        raise ConfigError(
            "data.stopping_strategy: no data source has a probability; give each of them one, or remove it"
        )
    if not data.train:
        raise AbsentError(
            "data.train is empty; set it to a file, a folder, a hub dataset or a list of them"
        )


def check_examples(
    stage: Stage, train: TokenizedDataset, held_out: TokenizedDataset | None
) -> None:
    """Refuse opened data with a source of which nothing is trained on, or an example longer than a micro-batch."""
    counts = np.bincount(train.sources, minlength=len(train.source_weights))
    taken = examples_taken(train)
    if taken.sum() > max(MOST_EXAMPLES, len(train)):
        raise ConfigError(
            f"by the weights or probabilities of its sources an epoch of data.train has {taken.sum():,.0f} examples, "
            f"but can have {MOST_EXAMPLES:,}; give less uneven ones"
        )
    for path, count, of_source in zip(train.source_paths, counts, taken):
        if count and not of_source:
            raise ConfigError(
                f"the weights or probabilities of data.train leave no example of {path} in an epoch, which has "
                f"{count}; raise its own, or remove it"
            )
    refuse([*stage.check_data(train)])
    budget = stage.config.batch.tokens_per_microbatch
    for data in (train, held_out):
        if data and budget != "auto":
            check_fits(int(data.lengths.max()), budget)


# ---------------------------------------------------------------- the trained model


def published_shape(config: Config) -> ModelConfig | None:
    """Return the published shape that model.path, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    shape = recognised(Path(config.model.path).name)
    return shape and ModelConfig.from_hf(shape.to_hf(), **config.model.rope.changes())


def read_shape(config: Config, need_weights: bool = True) -> tuple[ModelConfig, Path | None]:
    """Return the model's shape, and its folder or None for a shape given by name or keys.

    Without `need_weights` the weights of a hub id are not fetched.

    Raises ValueError or FileNotFoundError if there is no such model, or if it is not supported.
    """
    model = config.model
    folder = None
    raw = {}
    rope = model.rope.changes()
    if model.path:
        folder = resolve_model(model.path, model.revision, need_weights=need_weights)
    with error_context("model"):
        if folder is not None:
            shape = read_config(folder, **rope)
            # random weights are no part of a larger model, such as one with vision
            if model.init == "random":
                shape = replace(shape, around="")
            raw = shape.to_hf()
        elif model.arch:
            raw = architecture(model.arch).to_hf()
        if model.config or folder is None:
            if raw:  # model.config may write rotary settings in another style than config.json
                raw["rope_parameters"] = {}
            for name in model.config:  # `raw` may have the field under its other name
                raw.pop(name, None)
                raw.pop(SYNONYMS.get(name, ""), None)
            shape = ModelConfig.from_hf({**raw, **model.config}, **rope)
    family = shape.family
    fields = {*shape.to_hf(), *FIELD_KINDS, *NEUTRAL}
    fields |= {*family.defaults, *family.fixed, *family.aliases}
    for name in sorted(model.config.keys() - fields):
        near = f", did you mean {x[0]}" if (x := get_close_matches(name, fields, 1)) else ""
        raise ConfigError(
            f"{name} is no field of a {shape.model_type} model here{near}; correct or remove it",
            "model.config",
        )
    return shape, folder


def check_routers(model: ModelSection, shape: ModelConfig) -> Iterator[str]:
    """Yield which settings of experts have no effect."""
    for key, value in model.model_dump(include=ROUTERS, exclude_defaults=True).items():
        if not shape.moe:
            yield f"model.{key} is {value} but a {shape.model_type} model has no experts; remove it"
        elif key != "freeze_router" and (model.freeze_router or model.lora.rank):
            why = "model.freeze_router" if model.freeze_router else "model.lora.rank"
            yield f"model.{key} is {value:g} but {why} is set, which trains no router; set it to 0"


def check_window(stage: Stage, shape: ModelConfig, frozen: str = "") -> None:
    """Refuse sequences that are longer than a model's window, unless it is to extrapolate.

    Random weights may learn a longer window than they have.

    Args:
        frozen: the setting that names the model, if it is not the trained one.
    """
    config, longest = stage.config, stage.requirements.longest_example
    window, scaling = shape.max_position_embeddings, shape.rope_scaling
    learns = config.model.init == "random" and not frozen
    if longest <= window or learns or config.model.rope.extrapolate:
        return
    original = scaling.original_max_position_embeddings if scaling else window
    table, place = "model.rope", ""
    if frozen:
        table, place = "rope_scaling", " in its config.json"
    sampled = " or ppo.max_new_tokens" if longest > config.data.max_length else ""
    raise ConfigError(
        f"sequences may have {longest} tokens but the window of the model has {window}; set {table}.type = "
        f'"yarn" and {table}.factor = {-(-longest // original):.1f}{place}, lower data.max_length{sampled}, or '
        "insist with model.rope.extrapolate = true",
        frozen or "data.max_length",
    )


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
    matrices = [t for name, t in files.tensors.items() if name.endswith("_proj.weight")]
    any_packed = any(t.is_packed for t in matrices)
    all_packed = all(t.is_packed for t in matrices)
    if any_packed and (quantize != "nf4" or not all_packed):
        raise ValueError(
            f"{folder.absolute()} holds {'' if all_packed else 'some '}matrices quantised to NF4; set "
            'model.quantize = "nf4" and model.lora.rank if all matrices of the layers are, or use the model that they '
            "were made from"
        )
    expected = parameter_shapes(shape, reward=reward)
    files.check(expected, may_lack=("score.weight",) if reward else ())


def initial_weights(
    stage: Stage,
    shape: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate | None,
    folder: Path | None,
    tokenizer_path: Path,
) -> tuple[ModelConfig, InitialWeights]:
    """Return the shape as config.json of the export describes it, and the weights that training starts from."""
    config = stage.config
    pretrained = config.model.init == "pretrained"
    shape = stage.exported_config(shape, tokenizer)
    if template and not stage.reward:
        # config.json names every token that ends a turn: the template's, EOS and those that the model has learnt
        learnt = shape.eos_token_id if pretrained else ()
        ends = {template.end_of_turn, template.encoder.eos, *learnt}
        shape = replace(shape, eos_token_id=tuple(sorted(ends)))
    source = folder if pretrained else None
    continues = False
    if source and (source / ADAPTER_CONFIG).is_file():
        base, _ = name_of_base(source)
        continues = base == config.model.path
    rows = {}  # the new rows of the vocabulary's matrices, each with the tokens whose mean it is
    if added := config.model.add_tokens:
        before = load_tokenizer(tokenizer_path, **config.model.special_tokens)
        for text, row in zip(added, tokenizer.convert_tokens_to_ids(added)):
            pieces = rows[row] = before.encode(text, add_special_tokens=False)
        # rows that only fill the vocabulary up (model.pad_vocabulary) are made like the last token's
        for row in range(len(tokenizer), shape.vocab_size):
            rows[row] = pieces
    return shape, InitialWeights(
        shape,
        config.run.seed,
        source,
        config.model.quantize,
        new_rows=rows,
        continues=continues,
    )


# ---------------------------------------------------------------- tokenizer


def read_tokenizer(
    stage: Stage, shape: ModelConfig, folder: Path | None
) -> tuple[ModelConfig, PreTrainedTokenizerFast | None, Path | None, ChatTemplate | None]:
    """Return the shape with model.add_tokens, the tokenizer, where it was read and, for chats, its template.

    All but the shape is None if the tokenizer should come with the model, and that is absent.
    """
    config = stage.config
    if name := config.model.tokenizer:
        path = Path(name)
        if not path.exists():
            path = resolve_model(name, need_weights=False, key="model.tokenizer")
    elif folder:
        path = folder_with(folder, "tokenizer*")
    elif config.model.path:
        return shape, None, None, None
    else:
        raise AbsentError(
            "model.tokenizer is missing, and there is no model.path to take it from; set it to a folder, a hub id "
            "or a tokenizer.json"
        )
    if path.is_dir() and not any(chain(*map(path.glob, TOKENIZERS))):
        raise AbsentError(
            f"{path.absolute()} holds no tokenizer ({', '.join(TOKENIZERS)}); copy the model's own into it, or set "
            "model.tokenizer to a folder, a hub id or a tokenizer.json",
            "model.tokenizer",
        )
    with error_context("model.tokenizer"):
        tokenizer = load_tokenizer(path, **config.model.special_tokens)
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has {len(tokenizer)} tokens but the model's vocabulary has {shape.vocab_size}; "
            "use the model's own tokenizer or, for random weights, raise model.config.vocab_size"
        )
    if added := config.model.add_tokens:
        if len({*added} - {"", *tokenizer.get_vocab()}) < len(added):
            raise ConfigError(
                f"{added} has an empty token, one twice, or one that the tokenizer {path} knows; remove it",
                "model.add_tokens",
            )
        tokenizer.add_tokens(added)
        if len(tokenizer) > shape.vocab_size:
            multiple = config.model.pad_vocabulary
            shape = replace(shape, vocab_size=-(-len(tokenizer) // multiple) * multiple)
    template = None
    if stage.dataset_type != "text":
        with error_context("data.chat_template"):
            template = ChatTemplate(
                tokenizer, config.data.chat_template, config.data.chat_template_kwargs
            )
        samples = config.run.samples
        window = shape.max_position_embeddings
        with error_context("run.samples"):
            for text in samples if isinstance(samples, list) else ():
                prompt = template.render([Message("user", text)])
                if len(template.encoder.encode_batch(prompt)[0].ids) >= window:
                    raise ValueError(
                        f"the model's window of {window:,} tokens is too short for {text[:40]!r} and an answer"
                    )
    return shape, tokenizer, path, template
