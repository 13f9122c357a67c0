"""Everything that can refuse a run, checked before processes meet and memory is taken; the result is the run's plan.

Each check is one sentence: what was given, what is required, what to change.
"""

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from losses.dpo import DPO_LOSS_TYPES, REFERENCE_FREE, dpo_loss
from models.arch import ModelConfig as Shape
from models.hf_format import WeightFiles, copy_side_files, read_config, resolve_model
from ulysses.data.chat import ChatTemplate, load_tokenizer
from ulysses.data.dataset import TokenizedDataset, open_dataset
from ulysses.data.encode import DataSettings
from ulysses.data.records import DataError
from ulysses.data.sources import Source, missing_sources, parse_sources, source_digest
from ulysses.data.steps import StepLoader
from ulysses.parallel.kernels import resolve_kernel
from ulysses.training.build import check_weights, read_shape
from ulysses.training.config import DTYPES, Config
from ulysses.training.determinism import require_determinism
from ulysses.training.memory import (
    check_head_chunks,
    check_memory,
    other_models,
    planner_model,
    reference_beside,
)
from ulysses.training.resume import find_checkpoint
from ulysses.training.rewards import is_function, load_function
from ulysses.training.section import ConfigError
from ulysses.training.stages.dpo import loss_options
from ulysses.zero.settings import check_raw

KINDS = {
    "pt": "text",
    "sft": "sequence",
    "dpo": "pair",
    "rm": "pair",
    "kto": "unpaired",
    "ppo": "prompt",
}


@dataclass
class Plan:
    """What the checks found: shape, tokenizer, data and where to start."""

    config: Config
    world_size: int
    shape: Shape
    folder: Path | None
    tokenizer: Any
    kernel: str
    kernel_reason: str
    resume_from: Path | None
    num_heads: tuple[int, ...] = ()  # query heads of the models that will run

    @property
    def kind(self) -> str:
        return KINDS[self.config.stage]

    @property
    def budget(self) -> int:
        """Tokens per packed micro-batch."""
        tokens = self.config.batch.tokens_per_microbatch
        if tokens == "auto" and self.config.stage == "ppo":
            return self.config.data.max_length + self.config.ppo.max_new_tokens
        if tokens == "auto":
            return self.config.data.max_length * (2 if self.kind == "pair" else 1)
        return int(tokens)

    def datasets(self) -> tuple[TokenizedDataset, TokenizedDataset | None]:
        """Open (tokenise once per node if needed) the training and held-out data."""
        data = self.config.data
        settings = DataSettings(data.max_length, data.truncation, data.train_on, data.bad_rows)

        def opened(value: Any) -> TokenizedDataset:
            try:
                return open_dataset(
                    parse_sources(value),
                    self.kind,
                    self.tokenizer,
                    settings,
                    data.cache,
                    chat_template=data.chat_template,
                )
            except DataError as error:
                raise ConfigError(f"data: {error}") from None

        train = opened(data.train)
        if self.config.stage == "kto" and self.config.kto.loss_type == "kto" and len(train) < 2:
            raise ConfigError(
                "data.train has one example but kto's baseline pairs each example with another; give it more"
            )
        return train, opened(data.eval) if data.eval else None

    def loader(
        self, dataset: Any, dp_size: int, dp_rank: int, *, evaluation: bool = False
    ) -> StepLoader:
        """Serve the dataset's steps to one data-parallel group."""
        try:
            return StepLoader(
                dataset,
                (self.config.stage == "ppo" and self.config.ppo.prompts_per_rollout)
                or self.config.batch.examples,
                tokens_per_microbatch=self.budget,
                seed=self.config.run.seed,
                data_parallel_size=dp_size,
                dp_rank=dp_rank,
                shuffle=not evaluation,
                attention_length=12.0 * self.shape.hidden_size,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def steps_per_epoch(self, loader: StepLoader) -> int:
        """Optimizer steps of a pass over the data; PPO takes several on each step's prompts."""
        ppo = self.config.ppo
        return loader.steps_per_epoch * (
            ppo.epochs * ppo.minibatches if self.config.stage == "ppo" else 1
        )

    def total_steps(self, loader: StepLoader) -> int:
        run = self.config.run
        return run.steps or max(1, round(run.epochs * self.steps_per_epoch(loader)))

    def save_tokenizer(self, folder: Path) -> None:
        """Keep tokenizer and generation config with the run, so that an export needs nothing else."""
        if self.folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            copy_side_files(self.folder, folder)
        if self.config.data.chat_template != "tokenizer" and self.kind != "text":
            self.tokenizer.chat_template = ChatTemplate(
                self.tokenizer, self.config.data.chat_template
            ).text
        self.tokenizer.save_pretrained(str(folder))


def check_run(config: Config, world_size: int) -> Plan:
    """Check a configuration against the machine and the files; touch nothing but torch's switch for deterministic kernels.

    Raises ConfigError: the first complaint.
    """
    if config.run.deterministic:  # before anything starts CUDA, and before a kernel is chosen
        try:
            require_determinism()
        except ValueError as error:
            raise ConfigError(f"run.deterministic: {error}") from None
    check_numbers(config, world_size)
    if not config.data.train:
        raise ConfigError(
            "data.train is empty; give a file, a folder, a hub dataset or a list of them"
        )
    missing = missing_sources(read_sources(config))  # before weights are fetched
    if missing:
        raise ConfigError(f"data: {missing[0]}")
    shape, folder = read_shape(config)
    if config.model.init == "pretrained" and folder is not None:
        check_weights(shape, folder, reward=config.stage == "rm")
    check_head_chunks(config, shape)
    tokenizer = read_tokenizer(config, folder, shape)
    if config.stage == "ppo":
        stop_tokens(config, tokenizer, shape)
    others = [
        reward_shape(config, shape)[0]
        if key == "ppo.reward"
        else reference_shape(config, shape, tokenizer)[0]
        for key in other_models(config)
    ]
    if config.stage == "rm":
        shape = replace(shape, pad_token_id=scoring_pad(tokenizer, shape))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kernel, reason = resolve_kernel(
            config.model.attention,
            device,
            DTYPES[config.model.dtype],
            shape.head_dim,
            deterministic=config.run.deterministic,
        )
    except ValueError as error:
        raise ConfigError(f"model.attention: {error}") from None
    heads = tuple(s.num_attention_heads for s in (shape, *others))
    plan = Plan(
        config,
        world_size,
        shape,
        folder,
        tokenizer,
        kernel,
        reason,
        find_checkpoint(config, shape),
        heads,
    )
    check_disk(plan)
    return plan


def check_numbers(config: Config, world_size: int) -> None:
    """Refuse what can be refused from the configuration alone."""
    sp = config.parallel.sequence_parallel_size
    if world_size % sp:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise ConfigError(
            f"parallel.sequence_parallel_size is {sp} but must divide the {world_size} processes; set it to one of {divisors}"
        )
    if config.stage == "dpo":
        check_dpo(config)
    if config.stage == "kto":
        check_kto(config)
    if config.stage == "ppo":
        check_ppo(config)
    check_packages(config)
    check_memory(config)
    try:
        check_raw(config.deepspeed)
        config.gradients.chain(config.scopes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_packages(config: Config) -> None:
    lora = config.model.lora
    for key, wanted, package in (
        ("model.lora.rank", lora.rank, "peft"),
        ("run.wandb", config.run.wandb, "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} is set but the package {package} is not installed; pip install {package}"
            )
    if lora.rank and not lora.targets:
        raise ConfigError(
            "model.lora.targets is empty; name the modules that get an adapter, or set model.lora.rank = 0"
        )


def check_dpo(config: Config) -> None:
    dpo = config.dpo
    if dpo.loss_type not in DPO_LOSS_TYPES:
        raise ConfigError(
            f"dpo.loss_type is {dpo.loss_type!r} but must be one of {', '.join(DPO_LOSS_TYPES)}"
        )
    x = torch.zeros(1)
    reference = None if dpo.loss_type in REFERENCE_FREE else x
    try:
        dpo_loss(
            x - 1,
            x - 1,
            reference,
            reference,
            chosen_lengths=x + 1,
            rejected_lengths=x + 1,
            **loss_options(dpo),
        )
    except ValueError as error:
        raise ConfigError(f"dpo: {error}") from None
    check_reference(config)


def check_kto(config: Config) -> None:
    if config.kto.loss_type == "kto" and config.batch.examples < 2:
        raise ConfigError(
            f"batch.examples is {config.batch.examples} but kto's baseline pairs each example with another one of its "
            'step; set it to at least 2, or kto.loss_type to "apo_zero_unpaired"'
        )
    if not config.kto.desirable_weight and not config.kto.undesirable_weight:
        raise ConfigError(
            "kto.desirable_weight and kto.undesirable_weight are both 0; nothing would be trained, raise one"
        )
    check_reference(config)


def check_ppo(config: Config) -> None:
    ppo, budget = config.ppo, config.batch.tokens_per_microbatch
    if not ppo.reward:
        raise ConfigError(
            "ppo.reward is missing; name a function as module:function, or a reward model's folder or hub id"
        )
    try:
        if is_function(ppo.reward):
            load_function(ppo.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    prompts = ppo.prompts_per_rollout or config.batch.examples
    if prompts < ppo.minibatches:
        raise ConfigError(
            f"ppo.minibatches is {ppo.minibatches} but a rollout has {prompts} prompts; lower it, or raise batch.examples"
        )
    longest = config.data.max_length + ppo.max_new_tokens
    if budget != "auto" and int(budget) < longest:
        raise ConfigError(
            f"batch.tokens_per_microbatch is {budget} but data.max_length (prompts) + ppo.max_new_tokens is {longest}; "
            f"raise it to at least {longest}, or lower one of them"
        )
    if ppo.kl_coefficient:
        check_reference(config)


def stop_tokens(config: Config, tokenizer: Any, shape: Shape) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of ppo.stop_tokens, the chat template, the tokenizer and the model.

    Raises ConfigError for a stop token that is not one token of the tokenizer.
    """
    ends = shape.eos_token_id if isinstance(shape.eos_token_id, tuple) else (shape.eos_token_id,)
    template = ChatTemplate(tokenizer, config.data.chat_template)
    found = {int(t) for t in (*ends, *template.stop_tokens) if t is not None}
    known = tokenizer.get_vocab()
    for text in config.ppo.stop_tokens:
        if text not in known:
            raise ConfigError(
                f"ppo.stop_tokens has {text!r} but the tokenizer has no such token; name whole tokens"
            )
        found.add(int(known[text]))
    return tuple(sorted(found))


def reward_shape(config: Config, shape: Shape) -> tuple[Shape, Path]:
    """Read the reward model named by ppo.reward; it must read the policy's tokens."""
    try:
        folder = resolve_model(config.ppo.reward)
        found = read_config(folder)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"ppo.reward: {str(error).replace('model.path', 'ppo.reward')}; name a function as module:function, or a reward model"
        ) from None
    check_weights(found, folder, reward=True, key="ppo.reward")
    if "score.weight" not in WeightFiles(folder):
        raise ConfigError(
            f"ppo.reward {config.ppo.reward} has no score.weight, so it is no reward model; train one with stage rm"
        )
    if found.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"ppo.reward {config.ppo.reward} has {found.vocab_size} tokens and the policy {shape.vocab_size}, but it must read "
            "the policy's tokens; train the reward model from the same base model"
        )
    return found, folder


def check_reference(config: Config) -> None:
    """Refuse a stage's reference that is no known word and no model."""
    reference = getattr(config, config.stage).reference
    words = ("live",) if config.stage == "ppo" else ("cached", "live")
    known = ", ".join(f'"{word}"' for word in words)
    if reference not in words and not Path(reference).exists() and "/" not in reference:
        raise ConfigError(
            f"{config.stage}.reference is {reference!r} but must be {known} or a model's folder or hub id"
        )


def read_tokenizer(config: Config, folder: Path | None, shape: Shape) -> Any:
    """Load the tokenizer and check that it fits the model and has a chat template where one is needed."""
    place = config.model.tokenizer or (str(folder) if folder else None)
    if place is None:
        raise ConfigError(
            "model.tokenizer is missing: a model given by arch or config brings none; set it to a folder, a hub id or a tokenizer.json"
        )
    try:
        tokenizer = load_tokenizer(place, **config.model.special_tokens)
        if KINDS[config.stage] != "text":
            ChatTemplate(tokenizer, config.data.chat_template)
    except DataError as error:
        raise ConfigError(f"model.tokenizer: {error}") from None
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {place} has {len(tokenizer)} tokens but the model's vocabulary holds {shape.vocab_size}; "
            f"set model.config.vocab_size or use the model's own"
        )
    return tokenizer


def scoring_pad(tokenizer: Any, shape: Shape) -> int | None:
    """Return the padding token that an exported reward model's config.json names, or None.

    transformers reads the score at the last token that is not padding, so a padding token that also ends sequences
    would move it; without one, transformers scores one sequence at a time, at its last token as here.
    """
    eos = shape.eos_token_id if isinstance(shape.eos_token_id, tuple) else (shape.eos_token_id,)
    pad = tokenizer.pad_token_id
    return None if pad in (*eos, tokenizer.eos_token_id) else pad


def check_disk(plan: Plan) -> None:
    """Refuse to start if the disk cannot hold the checkpoints that rotation keeps, one more while saving, and the export.

    What the run folder holds already counts as free: it is counted among them, or goes.
    """
    config, run, numel = plan.config, plan.config.run, plan.shape.num_parameters()
    each = 12 * planner_model(config, plan.shape).trained
    saves = run.steps // run.save_every if run.steps and run.save_every else run.keep
    count = (
        1
        + (run.save_last or run.save_every > 0)
        + (min(run.keep or saves, saves) if run.save_every else 0)
    )
    need = each * count + (numel * DTYPES[config.model.dtype].itemsize if run.export else 0)
    place = config.output.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"run.output {config.output.absolute()} cannot be written: {place} is no folder or not yours; set another one"
        )
    own = [
        config.output / "export",
        *([config.output / "checkpoints"] if run.keep or run.steps else []),
    ]
    free = shutil.disk_usage(place).free + sum(
        f.stat().st_size for folder in own for f in folder.rglob("*") if f.is_file()
    )
    if need > free:
        raise ConfigError(
            f"run.output {place} has {free / 2**30:.1f} GiB free but {count} checkpoints and the export need {need / 2**30:.1f} GiB; "
            "lower run.keep, set run.export = false, or use another disk"
        )


def reference_shape(config: Config, shape: Shape, tokenizer: Any) -> tuple[Shape, Path]:
    """Read the model that dpo.reference, kto.reference or ppo.reference names; it must know the policy's tokens."""
    key, place = f"{config.stage}.reference", reference_beside(config)
    try:
        folder = resolve_model(place)
        found = read_config(folder)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error).replace("model.path", key)) from None
    needed = (
        shape.vocab_size if config.stage == "ppo" else len(tokenizer)
    )  # PPO's policy may say any of its tokens
    if found.vocab_size < needed:
        raise ConfigError(
            f"{key} {place} has {found.vocab_size} tokens but the policy {needed}; use a model with the policy's tokenizer"
        )
    check_weights(found, folder, reward=False, key=key)
    return found, folder


def read_sources(config: Config) -> list[Source]:
    """Return the training and held-out data's sources; ConfigError for a table that is none."""
    try:
        return [*parse_sources(config.data.train or []), *parse_sources(config.data.eval or [])]
    except DataError as error:
        raise ConfigError(f"data: {error}") from None


def data_digest(plan: Plan) -> list[str]:
    """Identify the data files' contents, to compare between ranks."""
    return [str(source_digest(s)) for s in read_sources(plan.config)]
