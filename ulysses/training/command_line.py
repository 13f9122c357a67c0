"""From command-line arguments to a checked Config: TOML < arguments, unknown names refused with the nearest known one."""

import argparse
import difflib
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import CliSettingsSource

from ulysses.training.config import Config
from ulysses.training.section import ConfigError
from ulysses.zero.settings import merge

# Names that people bring along from other systems, and what they are called here.
FOREIGN_NAMES = {
    "pref_beta": "dpo.beta",
    "pref_loss": "dpo.loss_type",
    "pref_ftx": "dpo.sft_weight",
    "rpo_alpha": "dpo.sft_weight",
    "simpo_gamma": "dpo.simpo_gamma",
    "beta": "dpo.beta",
    "loss_type": "dpo.loss_type",
    "ld_alpha": "dpo.ld_alpha",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "f_divergence_type": "dpo.f_divergence",
    "f_alpha_divergence_coef": "dpo.f_alpha",
    "ref_model": "dpo.reference",
    "precompute_ref_log_probs": "dpo.reference",
    "kto_chosen_weight": "kto.desirable_weight",
    "kto_rejected_weight": "kto.undesirable_weight",
    "center_rewards_coefficient": "rm.center_coefficient",
    "reward_model": "ppo.reward",
    "ppo_epochs": "ppo.epochs",
    "num_ppo_epochs": "ppo.epochs",
    "cliprange": "ppo.clip",
    "vf_coef": "ppo.value_coefficient",
    "kl_coef": "ppo.kl_coefficient",
    "ppo_target": "ppo.kl_target",
    "neftune_noise_alpha": "sft.neftune_alpha",
    "label_smoothing_factor": "sft.label_smoothing",
    "use_dft_loss": "sft.loss_type",
    "interleave_probs": "data.train (tables take weight)",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "flash_attn": "model.attention",
    "attn_implementation": "model.attention",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "eval_dataset": "data.eval",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_length": "data.max_length",
    "template": "data.chat_template",
    "mask_history": "data.train_on",
    "train_on_prompt": "data.train_on",
    "assistant_only_loss": "data.train_on",
    "max_samples": "data.train (tables take max_examples)",
    "tokenized_path": "data.cache",
    "sequence_parallel_size": "parallel.sequence_parallel_size",
    "ulysses_sequence_parallel_size": "parallel.sequence_parallel_size",
    "cp_size": "parallel.sequence_parallel_size",
    "per_device_train_batch_size": "batch.examples",
    "gradient_accumulation_steps": "batch.examples",
    "train_batch_size": "batch.examples",
    "train_micro_batch_size_per_gpu": "batch.tokens_per_microbatch",
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup",
    "warmup_steps": "optimizer.warmup",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "gradients.max_norm",
    "gradient_clipping": "gradients.max_norm",
    "gradient_checkpointing": "memory.recompute",
    "disable_gradient_checkpointing": "memory.recompute",
    "offload_optimizer": "memory.offload_optimizer",
    "offload_param": "memory.offload_parameters",
    "num_train_epochs": "run.epochs",
    "max_steps": "run.steps",
    "output_dir": "run.output",
    "logging_steps": "run.log_every",
    "eval_steps": "run.eval_every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "resume_from_checkpoint": "run.resume",
    "overwrite_output_dir": "run.overwrite",
    "seed": "run.seed",
    "report_to": "run.wandb",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target": "model.lora.targets",
}


@dataclass
class CommandLine:
    """What the arguments said besides the configuration."""

    config: Config
    debug: bool = False
    dry_run: bool = False
    inspect: int = 0
    planner: dict[str, float] = field(default_factory=dict)


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key of the schema with its pydantic field."""
    keys: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        keys[prefix + name] = info
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys |= known_keys(info.annotation, prefix + name + ".")
    return keys


def unknown_key_sentence(key: str) -> str:
    """Say which known key an unknown one most likely means."""
    last = key.split(".")[-1]
    for name in (key, last):
        if name in FOREIGN_NAMES and FOREIGN_NAMES[name] != key:
            return f"{key}: unknown; here it is {FOREIGN_NAMES[name]}"
    keys = list(known_keys())
    exact_last = [k for k in keys if k.split(".")[-1] == last]
    near = exact_last or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        by_last = {k.split(".")[-1]: k for k in keys}
        near = [by_last[m] for m in difflib.get_close_matches(last, by_last, n=1, cutoff=0.5)]
    return f"{key}: unknown; " + (
        f"did you mean {near[0]}?" if near else "train.py --help lists the keys"
    )


def parse_command_line(arguments: list[str]) -> CommandLine:
    """Read `--config FILE.toml` and overrides such as `--optimizer.lr 1e-6`.

    Raises ConfigError with one sentence, for anything that is not a valid configuration.
    """
    own = _own_parser()
    try:
        flags, rest = own.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    if flags.help:
        print(own.format_help())
        print(_settings_help())
        raise SystemExit(0)
    if flags.local_rank is not None and str(flags.local_rank) != os.environ.get(
        "LOCAL_RANK", str(flags.local_rank)
    ):
        raise ConfigError(
            f"--local_rank is {flags.local_rank} but LOCAL_RANK is {os.environ['LOCAL_RANK']}; start through one launcher only"
        )
    values = _read_toml(flags.config) if flags.config else {}
    given = _read_arguments(rest)
    for key in set(values.get("data", {})) & set(given.get("data", {})):
        del values["data"][
            key
        ]  # another source replaces the file's, of which no column or weight may remain
    merge(values, given)
    if flags.deepspeed:
        values["deepspeed"] = merge(dict(values.get("deepspeed", {})), _read_json(flags.deepspeed))
    config = check(values)
    if flags.adjust_lr != 1.0:
        lr = config.optimizer.lr * flags.adjust_lr
        config = config.model_copy(
            update={"optimizer": config.optimizer.model_copy(update={"lr": lr})}
        )
    if flags.inspect is not None and flags.inspect < 1:
        raise ConfigError(f"--inspect is {flags.inspect} but must be at least 1 sample")
    planner = {
        k: v
        for k, v in (
            ("gpus", flags.gpus),
            ("gpu_memory", flags.gpu_memory),
            ("host_memory", flags.host_memory),
        )
        if v
    }
    if planner and not flags.dry_run:
        raise ConfigError(
            "--gpus, --gpu-memory and --host-memory describe a machine to plan for; use them with --dry-run"
        )
    debug = flags.debug or os.environ.get("ULYSSES_DEBUG", "0") not in ("", "0")
    return CommandLine(config, debug, flags.dry_run, flags.inspect or 0, planner)


def check(values: dict[str, Any]) -> Config:
    """Validate a nested dictionary; every complaint is one sentence.

    Raises ConfigError naming the key, what was given and what is required.
    """
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    except TypeError as error:
        raise ConfigError(str(error)) from None


def _sentence(error: ValidationError) -> str:
    found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = found[0]
    location = [str(p) for p in first["loc"]]
    keys = known_keys()
    while location and ".".join(location) not in keys and first["type"] != "extra_forbidden":
        location.pop()  # union members and list positions that pydantic adds
    key = ".".join(location) or "configuration"
    if first["type"] == "extra_forbidden":
        return unknown_key_sentence(
            ".".join(
                str(p) for p in first["loc"] if not str(p).startswith(("list[", "dict[", "str"))
            )
        )
    if first["type"] == "missing":
        return f"{key} is missing; {_description(keys.get(key))}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        names_a_key = any(word.strip(",.;:()") in keys for word in message.split())
        return message if names_a_key else f"{key}: {message}"
    return f"{key} is {first['input']!r}: {message[0].lower() + message[1:]} ({_description(keys.get(key))})"


def _description(info: Any) -> str:
    return (getattr(info, "description", None) or "see train.py --help").rstrip(".")


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "train.py",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        description="Train a model on long sequences.",
    )
    parser.add_argument("-h", "--help", action="store_true", help="show every option and exit")
    parser.add_argument("--config", metavar="FILE.toml", help="the run's settings")
    parser.add_argument("--deepspeed", metavar="FILE.json", help="raw DeepSpeed keys to merge")
    parser.add_argument(
        "--adjust-lr",
        metavar="FACTOR",
        nargs="?",
        type=float,
        default=1.0,
        const=1.0,
        help="multiply the learning rate",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the plan and exit; needs no weights and no GPU",
    )
    parser.add_argument(
        "--inspect",
        metavar="N",
        type=int,
        help="print N samples with the trained tokens highlighted and exit",
    )
    parser.add_argument(
        "--gpus", metavar="N", type=int, default=0, help="with --dry-run: plan for N GPUs"
    )
    parser.add_argument(
        "--gpu-memory",
        metavar="GIB",
        type=float,
        default=0.0,
        help="with --dry-run: memory of each GPU",
    )
    parser.add_argument(
        "--host-memory",
        metavar="GIB",
        type=float,
        default=0.0,
        help="with --dry-run: host memory of each node",
    )
    parser.add_argument(
        "--debug", action="store_true", help="print more, per process, and stack traces"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS
    )
    return parser


def _settings_help() -> str:
    lines = ["settings (TOML keys; on the command line --key value):"]
    for key, info in known_keys().items():
        nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        if nested:
            lines.append(f"\n  [{key}] {info.description}")
            continue
        default = (
            ""
            if info.is_required()
            else f" (default {info.get_default(call_default_factory=True)!r})"
        )
        lines.append(f"  --{key}\n        {info.description}{default}")
    return "\n".join(lines)


def _read_arguments(rest: list[str]) -> dict[str, Any]:
    keys = known_keys()
    for argument in rest:
        name = argument.split("=")[0].removeprefix("--")
        if (
            argument.startswith("--")
            and name not in keys
            and not name.startswith(("deepspeed.", "model.config."))
        ):
            raise ConfigError(unknown_key_sentence(name))
    values: dict[str, Any] = {}
    raw = list(rest)
    # Free-form tables (deepspeed, model.config) take dotted keys. Data sources may be lists of tables, which the schema's own
    # parser would merge into one; it reads the rest.
    kept: list[str] = []
    sources: dict[str, list[Any]] = {}
    while raw:
        argument = raw.pop(0)
        name, given, value = argument.partition("=")
        if name.startswith(("--deepspeed.", "--model.config.")) or name in (
            "--data.train",
            "--data.eval",
        ):
            if not given:
                if not raw or raw[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value")
                value = raw.pop(0)
            if name.startswith("--data."):
                sources.setdefault(name.removeprefix("--data."), []).append(_loose(value))
                continue
            merge(values, _nest(name.removeprefix("--").split("."), _loose(value)))
        else:
            kept.append(argument)
            is_switch = (
                argument.startswith("--")
                and not given
                and keys[name.removeprefix("--")].annotation is bool
            )
            if is_switch and (not raw or raw[0].startswith("--")):
                kept.append("true")
    for name, items in sources.items():
        flat = [entry for item in items for entry in (item if isinstance(item, list) else [item])]
        values.setdefault("data", {})[name] = items[0] if len(items) == 1 else flat
    if kept:
        try:
            source = CliSettingsSource(
                Config, cli_parse_args=kept, cli_exit_on_error=False, cli_prog_name="train.py"
            )
            merge(values, _drop_none(source()))
        except Exception as error:  # argparse and pydantic-settings raise several kinds; all mean the same to the user
            raise ConfigError(
                f"{str(error).removeprefix('error parsing CLI: ')} (in: {' '.join(kept)})"
            ) from None
    return values


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        k: _drop_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None
    }


def _loose(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nest(path: list[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config: there is no file {Path(path).absolute()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {Path(path).absolute()} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from None


def _read_json(path: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"--deepspeed: there is no file {Path(path).absolute()}") from None
    except ValueError as error:
        raise ConfigError(f"--deepspeed: {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--deepspeed: {path} must hold one JSON object")
    return value
