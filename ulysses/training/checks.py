"""Everything that can refuse a run, checked before processes meet and memory is taken; the result is the run's plan.

Each check is one sentence: what was given, what is required, what to change.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from models.arch import ModelConfig as Shape
from models.hf_format import folder_with
from ulysses.data import DataError
from ulysses.data.chat import ChatTemplate, load_tokenizer
from ulysses.data.sources import Source, missing_sources, parse_sources
from ulysses.parallel.kernels import resolve_kernel
from ulysses.training.build import check_weights, read_other, read_shape
from ulysses.training.config import DTYPES, Config
from ulysses.training.determinism import require_determinism
from ulysses.training.memory import (
    check_memory,
    planner_model,
)
from ulysses.training.resume import find_checkpoint
from ulysses.training.section import ConfigError
from ulysses.zero.settings import check_raw


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
    stage = config.stage_class
    if not config.data.train:
        raise ConfigError(
            "data.train is empty; give a file, a folder, a hub dataset or a list of them"
        )
    missing = missing_sources(read_sources(config))  # before weights are fetched
    if missing:
        raise ConfigError(f"data: {missing[0]}")
    shape, folder = read_shape(config)
    if config.model.init == "pretrained" and folder is not None:
        check_weights(shape, folder, reward=stage.reward)
    tokenizer = read_tokenizer(config, folder, shape)
    others = {other.setting: read_other(other)[0] for other in stage.other_models(config)}
    refuse(stage.check_model(config, shape, tokenizer, others))
    shape = stage.final_shape(shape, tokenizer)
    if stage.kind != "text" and not stage.reward:
        shape = replace(shape, eos_token_id=turn_ends(config, shape, tokenizer))
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
    heads = tuple(s.num_attention_heads for s in (shape, *others.values()))
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


def refuse(complaints: Iterator[str]) -> None:
    """Raise ConfigError for the first complaint, if there is one."""
    for complaint in complaints:
        raise ConfigError(complaint)


def check_numbers(config: Config, world_size: int) -> None:
    """Refuse what can be refused from the configuration alone."""
    sp = config.parallel.sequence_parallel_size
    if world_size % sp:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise ConfigError(
            f"parallel.sequence_parallel_size is {sp} but must divide the {world_size} processes; set it to one of {divisors}"
        )
    refuse(config.stage_class.check(config))
    check_packages(config)
    check_memory(config)
    try:
        check_raw(config.deepspeed)
        config.gradients.chain()
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


def read_tokenizer(config: Config, folder: Path | None, shape: Shape) -> Any:
    """Load the tokenizer and check that it fits the model and has a chat template where one is needed."""
    if not (config.model.tokenizer or folder):
        raise ConfigError(
            "model.tokenizer is missing: a model given by arch or config brings none; set it to a folder, a hub id or a tokenizer.json"
        )
    place = config.model.tokenizer or str(folder_with(folder, "tokenizer*"))
    try:
        tokenizer = load_tokenizer(place, **config.model.special_tokens)
        if config.stage_class.kind != "text":
            ChatTemplate(tokenizer, config.data.chat_template)
    except DataError as error:
        raise ConfigError(f"model.tokenizer: {error}") from None
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {place} has {len(tokenizer)} tokens but the model's vocabulary holds {shape.vocab_size}; "
            f"set model.config.vocab_size or use the model's own"
        )
    return tokenizer


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


def turn_ends(config: Config, shape: Shape, tokenizer: Any) -> int | tuple[int, ...]:
    """Return every token that ends a turn, for config.json: the template's and those that the model has learnt."""
    learnt = shape.eos_token_id if config.model.init == "pretrained" else None
    ends = learnt if isinstance(learnt, tuple) else (learnt,)
    template = ChatTemplate(tokenizer, config.data.chat_template)
    found = sorted({*template.stop_tokens, *(end for end in ends if end is not None)})
    return tuple(found) if len(found) > 1 else found[0]


def read_sources(config: Config) -> list[Source]:
    """Return the training and held-out data's sources; ConfigError for a table that is none."""
    try:
        return [*parse_sources(config.data.train or []), *parse_sources(config.data.eval or [])]
    except DataError as error:
        raise ConfigError(f"data: {error}") from None
