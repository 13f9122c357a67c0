"""Every check of a run, made before processes meet and memory is taken.

    settings -> data files -> model: shape and weights -> tokenizer -> the stage's other models -> attention kernel
             -> checkpoint to resume -> disk space

Each error is one sentence: what was given, what is required and what to change.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from models.arch import ARCHITECTURES, ModelConfig, architecture
from models.decoder import empty_model
from models.folders import folder_with, read_config, resolve_model
from models.hf_format import WeightFiles
from ulysses.check.continuation import find_checkpoint
from ulysses.check.disk_space import check_disk, check_folders
from ulysses.check.setting_checks import check_settings, expert_adapter_errors, router_errors
from ulysses.config.schema import Config, ModelSection
from ulysses.config.section import AbsentError, ConfigError, error_context, refuse
from ulysses.config.stage_sections import is_function
from ulysses.data.read.chat import ChatTemplate, load_tokenizer
from ulysses.data.read.sources import (
    missing_sources,
    parse_sources,
    repeated_data,
)
from ulysses.data.serve.dataset import TokenizedDataset, open_dataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader
from ulysses.parallel.kernels.choice import KernelChoice, resolve_kernel
from ulysses.registry import stage_of
from ulysses.run.build import InitialWeights
from ulysses.stages.base import AuxiliaryModel, Stage
from ulysses.zero.deepspeed_internals import wrong_version

# Tokens of sequences up to which torch's attention is as fast as flash4, whose import takes seconds.
SHORT = 1024
# Share of a vocabulary that its own tokenizer knows at least; the rest is padding.
LEAST_KNOWN = 0.9


# A folder that holds none of these has no tokenizer, whatever else describes one.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")


@dataclass
class Prepared:
    """What the checks of a run found; all of it is there unless a dry run reported findings."""

    config: Config
    stage: Stage
    shape: ModelConfig | None = None
    folder: Path | None = None  # of the model; None for a shape given by name or keys
    tokenizer: Any = None
    # the folder, or the tokenizer.json, that it was read from
    tokenizer_place: Path | None = None
    template: ChatTemplate | None = None  # None for plain text
    weights: InitialWeights | None = None
    # the stage's other models, by the settings that name them
    others: dict[str, InitialWeights] = field(default_factory=dict)
    kernel: KernelChoice | None = None
    attention: str = "auto"  # what the layers are told of it
    resume_from: Path | None = None
    disk_warning: str = ""

    def open_data(self) -> tuple[TokenizedDataset, TokenizedDataset | None]:
        """Open the training and held-out data, tokenising it once per node if needed.

        Raises ConfigError for data that is missing or broken.
        """
        data = self.config.data

        def opened(value: Any, held_out: bool = False) -> TokenizedDataset:
            sources = parse_sources(value)
            with error_context("data", absent=any(source.is_on_hub for source in sources)):
                found = open_dataset(
                    sources,
                    self.stage.dataset_type,
                    self.tokenizer,
                    data,
                    held_out=held_out,
                    share_prompts=self.config.batch.share_prompts,
                )
            # refuses an example that is longer than a micro-batch
            self.loader(found, self.budget(found))
            return found

        train, is_part = opened(data.train), bool(data.eval_fraction)
        held_out = data.train if is_part else data.eval
        return train, opened(held_out, is_part) if held_out else None

    @property
    def models(self) -> dict[str, InitialWeights]:
        """The weights that the run reads, by the settings that name them."""
        return {"model.path": self.weights, **self.others}

    def places(self) -> Iterator[tuple[str, Path]]:
        """Yield every file and folder that the run reads, after the setting that names it."""
        data = self.config.data
        for key, value in (("data.train", data.train), ("data.eval", data.eval)):
            yield from ((key, s.place) for s in parse_sources(value) if not s.is_on_hub)
        yield "data.cache", Path(data.cache)
        if self.folder:
            yield "model.path", self.folder
        for key, weights in self.models.items():
            yield from ((key, folder) for folder in {path.parent for path in weights.paths})

    @property
    def frozen(self) -> dict[str, InitialWeights]:
        """Those of `models` that its checkpoints do not hold."""
        others = self.stage.requirements.models
        initial = self.config.model.lora.rank or not all(other.path for other in others)
        return self.models if initial else self.others

    def budget(self, data: Any = None) -> int:
        """Return the tokens of a packed micro-batch as they are set, or the fewest that "auto" may choose.

        These are room for the longest example of the data or, if that is not known, for one that the settings allow.
        """
        stage, tokens = self.stage, self.config.batch.tokens_per_microbatch
        if tokens != "auto":
            return tokens
        if data is None or data.kind == "prompt":
            return stage.sequences_per_example * stage.requirements.longest_example
        return int(data.lengths.max())

    def remarks(self, loader: StepLoader) -> Iterator[str]:
        """Yield a line for every setting that has no effect, or not the one that its number promises."""
        if self.disk_warning:
            yield self.disk_warning
        config, total = self.config, self.stage.total_steps(loader)
        data = config.data
        if both := repeated_data(parse_sources(data.train), parse_sources(data.eval)):
            yield f"data.eval reads what data.train trains on, so it is not held out: {', '.join(both)}"
        rate, warmup = config.optimizer.lr, config.optimizer.warmup
        if not rate:
            yield "optimizer.lr is 0: no weight will change"
        elif warmup > max(total, 1):
            yield (
                f"optimizer.warmup is {warmup:g} steps but the run has {total}: the learning rate stays below {rate:g}"
            )
        if config.model.tokenizer and config.model.init == "pretrained":
            known, vocabulary = len(self.tokenizer), self.shape.vocab_size
            if known < LEAST_KNOWN * vocabulary:
                yield (
                    f"model.tokenizer has {known} tokens but the model's vocabulary has {vocabulary}: it may belong to "
                    "another model, whose tokens mean something else"
                )
        groups = loader.data_parallel_size
        examples = min(loader.examples_per_step, loader.examples_per_epoch)
        if examples < groups:
            yield (
                f"a step has {examples} examples for {groups} data-parallel groups: {groups - examples} of them "
                "compute nothing; raise batch.examples or parallel.sequence_parallel_size"
            )
        if loader.examples_per_step > loader.examples_per_epoch:
            yield (
                f"a step takes {loader.examples_per_step} examples (batch.examples) but the data has only "
                f"{loader.examples_per_epoch}: every step trains on all of them"
            )

    def loader(
        self,
        dataset: Any,
        tokens: int,
        groups: int = 1,
        group: int = 0,
        *,
        evaluation: bool = False,
        launched_tokens: float = 0.0,
    ) -> StepLoader:
        """Serve the dataset's steps, in micro-batches of so many tokens, to one of several data-parallel groups.

        Raises ConfigError for an example that is longer than a micro-batch whose size was set.
        """
        config = self.config
        if config.batch.tokens_per_microbatch == "auto":
            tokens = max(tokens, int(dataset.lengths.max()))
        with error_context():
            return StepLoader(
                dataset,
                self.stage.requirements.examples_per_load,
                tokens_per_microbatch=tokens,
                seed=config.run.seed,
                data_parallel_size=groups,
                dp_rank=group,
                shuffle=not evaluation,
                attention_length=ATTENTION_WIDTHS * self.shape.hidden_size,
                windows=self.shape.windows,
                launched_tokens=launched_tokens,
            )


def prepare(config: Config, world_size: int = 0, findings: list[str] | None = None) -> Prepared:
    """Check a configuration against the machine and the files, and read what they say about the model.

    Nothing is written, and no data are opened. With `run.deterministic`, torch's switches are set here.

    Args:
        world_size: number of processes; 0 asks the launcher.
        findings: collects, for a dry run, what is merely absent: weights, data, tokenizer, hub, disk space. Without it
            absence refuses the run like everything else. A dry run downloads no weights and checks no kernel.

    Raises:
        ConfigError: all errors about settings or, if there are none, about what they name.
    """
    check_settings(config, world_size)
    strict, stage, model, data = (
        findings is None,
        stage_of(config),
        config.model,
        config.data,
    )
    plan = Prepared(config, stage)
    errors: list[Any] = []
    collect = partial(error_context, errors=errors)
    if wrong := wrong_version():
        errors.append(wrong)
    with collect("data"):
        if missing := missing_sources(parse_sources(data.train) + parse_sources(data.eval)):
            raise FileNotFoundError("; ".join(missing))
        if not data.train:
            raise AbsentError(
                "data.train is empty; set it to a file, a folder, a hub dataset or a list of them"
            )
    pretrained = model.init == "pretrained"
    with collect():
        plan.shape, plan.folder = read_shape(config, need_weights=strict)
        if pretrained:
            with error_context("model.path"):
                check_weights(
                    plan.shape, plan.folder, reward=stage.reward, quantize=model.quantize
                )
    with collect("model"):
        plan.shape = plan.shape or published_shape(model)
    if plan.shape is None:
        refuse(errors, findings)
        return plan
    with collect():
        plan.shape = _fit_window(config, plan.shape, "data.max_length" if pretrained else "")
    with collect(""):  # whether an export can be loaded
        plan.shape.to_hf(reward=stage.reward)
    with collect("model.lora.rank"):
        if model.lora.rank > plan.shape.hidden_size:
            raise ValueError(
                f"is {model.lora.rank} but the model's matrices are {plan.shape.hidden_size} wide; set a smaller one "
                "(8 to 64 are usual), or 0 to train all weights"
            )
    errors += router_errors(config, plan.shape)
    errors += expert_adapter_errors(config, plan.shape)
    # otherwise it is absent with the model
    if plan.folder or model.tokenizer or not model.path:
        with collect():
            _read_tokenizer(plan)
    for other in stage.requirements.models:
        if not other.path:
            continue
        with collect():
            weights = read_other(other, need_weights=strict)
            plan.others[other.setting] = weights
            _fit_window(config, weights.shape, other.setting)
    if strict:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan.attention = model.attention
        short = stage.requirements.longest_example <= SHORT and model.attention == "auto"
        if short and device == "cuda" and model.dtype == "bfloat16":
            plan.attention = "torch"
        with collect("model.attention"):
            case = device, getattr(torch, config.model.dtype), plan.shape.head_dim
            for window in (
                *plan.shape.windows,
                None,
            ):  # the whole attention's is the one to report
                plan.kernel = resolve_kernel(plan.attention, *case, window=window)
        if model.quantize == "fp8" and device == "cuda":
            if torch.cuda.get_device_capability() < (8, 9):
                errors.append(
                    'model.quantize is "fp8" but this GPU does not multiply such numbers (compute capability 8.9); '
                    'set it to "nf4"'
                )
    for reward in filter(is_function, config.ppo.reward):
        with collect():
            _check_reward(reward, strict)
    # a dry run only says that the folder is taken
    if strict or config.run.resume != "never":
        with collect():
            plan.resume_from = find_checkpoint(config, plan.shape)
    if not errors:  # the last checks need everything that may be absent
        errors += stage.check_models(plan)
    if not errors:
        shape = stage.exported_config(plan.shape, plan.tokenizer)
        if plan.template and not stage.reward:
            # config.json names every token that ends a turn: the template's and those that the model has learnt
            learnt = shape.eos_token_id if pretrained else ()
            ends = {*plan.template.stop_tokens, *learnt}
            shape = replace(shape, eos_token_id=tuple(sorted(ends)))
        plan.shape = shape
        plan.weights = InitialWeights(
            shape, config.run.seed, plan.folder if pretrained else None, model.quantize
        )
        with collect():
            check_folders(config, plan.places())
            plan.disk_warning = check_disk(config, shape, resumes=bool(plan.resume_from))
    refuse(errors, findings)
    return plan


def read_shape(config: Config, *, need_weights: bool = True) -> tuple[ModelConfig, Path | None]:
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
            raw = read_config(folder, **rope).to_hf()
        elif model.arch:
            raw = architecture(model.arch).to_hf()
        raw.pop("rope_parameters", None)  # model.config may have either style
        return ModelConfig.from_hf({**raw, **model.config}, **rope), folder


def published_shape(model: ModelSection) -> ModelConfig | None:
    """Return the shape that model.path, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None."""
    name = re.sub(r"^([a-z-]+)-(\d)", r"\1\2", Path(model.path or "").name.lower())
    shape = next((shape for key, shape in ARCHITECTURES.items() if key in name), None)
    if shape is None:
        return None
    if "qwen2.5" in name and "instruct" in name:
        shape = replace(shape, max_position_embeddings=32768)
    return ModelConfig.from_hf(shape.to_hf(), **model.rope.changes())


def _fit_window(config: Config, shape: ModelConfig, key: str) -> ModelConfig:
    """Return the shape with a window that holds the run's longest sequence.

    Only random weights, which have no `key`, and a model that is to extrapolate learn a longer window; for others
    ConfigError refuses such a sequence.
    """
    longest = stage_of(config).requirements.longest_example
    window, scaling = shape.max_position_embeddings, shape.rope_scaling
    if longest > window and key and not config.model.rope.extrapolate:
        original = scaling.original_max_position_embeddings if scaling else window
        table = "model.rope" if key.startswith("data") else "rope_scaling"
        raise ConfigError(
            f"sequences may have {longest} tokens but the window of the model has {window}; set {table}.type = "
            f'"yarn" and {table}.factor = {-(-longest // original):.1f}, lower data.max_length, or insist with '
            "model.rope.extrapolate = true",
            key,
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
            f"{folder.absolute()} holds {'some ' * (len(packed) - 1)}matrices quantised to NF4; set model.quantize = "
            '"nf4" and model.lora.rank if all matrices of the layers are, or use the model that they were made from'
        )
    model = empty_model(shape, reward=reward)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    files.check(expected, may_lack=("score.weight",) if reward else ())


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


def _read_tokenizer(plan: Prepared) -> None:
    """Load the tokenizer, which must fit the model and, for chats, have a template."""
    config, given = plan.config, plan.config.model.tokenizer
    if given:
        place = Path(given).expanduser()
        if not place.exists():
            place = resolve_model(given, need_weights=False, key="model.tokenizer")
    elif plan.folder:
        place = folder_with(plan.folder, "tokenizer*")
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
    with error_context("data.chat_template"):
        if plan.stage.dataset_type != "text":
            plan.template = ChatTemplate(tokenizer, config.data.chat_template)
    if len(tokenizer) > plan.shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {place} has {len(tokenizer)} tokens but the model's vocabulary has "
            f"{plan.shape.vocab_size}; use the model's own tokenizer or, for random weights, raise "
            "model.config.vocab_size"
        )
    plan.tokenizer, plan.tokenizer_place = tokenizer, place


def _check_reward(reward: str, strict: bool) -> None:
    """Refuse a function that is not there; only a run that starts imports it, because that runs the user's code."""
    if strict:
        from ulysses.rl.rewards import load_function

        load_function(reward)
    elif "//" not in reward and find_spec(re.split("[.:]", reward)[0]) is None:
        raise ConfigError(
            f"ppo.reward is {reward!r} but there is no such module; name a function as module:function, with the "
            "module's folder on PYTHONPATH"
        )
