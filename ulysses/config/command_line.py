"""From the command line to a checked configuration: a TOML file, with settings written `--key value` laid over it.

--config dpo.toml --optimizer.lr 1e-6   ->   {"optimizer": {"lr": "1e-6", ...}, ...}   ->   Config

Here too are the sentences that refuse a wrong configuration, and what --help prints.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, reduce
from operator import attrgetter, getitem
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ulysses.config.schema import Config, Options
from ulysses.config.section import (
    CREDENTIALS,
    GONE,
    ConfigError,
    Values,
    absolute,
    existing,
    flat,
    refuse,
)
from ulysses.config.stage_sections import LEARNING_RATES

MOST_LR = 10.0
# Beside CREDENTIALS, what the JSON of ppo.sampler_reload, which goes to servers, may not hold.
SECRET_FIELDS = re.compile(
    r"""
    # a path with parameters
    "/[^"]*[?#;@&=]
    # a field that holds a secret
    | "[^"]*(key|token|secret|passw(or)?d|pwd|auth(orization)?|bearer|credentials?|cookie)":
    """,
    re.I | re.X,
)
Table = TypeVar("Table", bound=BaseModel)


class CommandLine(NamedTuple):
    """What was asked for: the run's configuration and the options of the command."""

    config: Config
    options: Options


def parse_command_line(arguments: list[str], **overrides: object) -> CommandLine:
    """Read the options of the command, the TOML file and the settings that override it, the keyword arguments last.

    Raises ConfigError for anything that is not a valid configuration, all at once.
    """
    settings = _read_arguments(arguments)
    of_command = {name: settings.pop(name) for name in Options.model_fields if name in settings}
    options = check(of_command, Options)
    if (options.gpus or options.gpu_memory or options.host_memory) and not options.dry_run:
        raise ConfigError(
            "--gpus, --gpu-memory and --host-memory describe a machine to plan for; add --dry-run or leave them out"
        )
    values = _read_file(options.config) if options.config else {}
    for key, value in (settings | overrides).items():
        put(values, key, value)
    if not values:
        fault = f"{options.config} is empty" if options.config else "there is no configuration"
        raise ConfigError(
            f"{fault}; give one with --config FILE.toml (configs/ has one for every stage), or read "
            "ulysses train --help"
        )
    put(values, "optimizer.lr", check(values).optimizer.lr * options.adjust_lr)
    return CommandLine(check(values), options)


def check(values: dict[str, object], table: type[Table] = Config) -> Table:
    """Validate nested tables of settings, and return a `table` that holds them.

    Raises ConfigError: a sentence for every error, with the key, what was given and what is required.
    """
    try:
        try:
            return table.model_validate(values)
        except ValidationError as error:
            errors = _sentences(error, known_keys(table))
    except RecursionError:
        errors = ["the settings are nested too deeply; write tables of one or two levels"]
    refuse(errors)


def _sentences(error: ValidationError, keys: dict[str, FieldInfo]) -> list[str]:
    """Put each of pydantic's errors into one sentence, those about unknown keys before all others."""
    unknown = []
    # one sentence for each key, though pydantic tells an error for each type that its value may have
    wrong = {}
    for problem in error.errors():
        message, given = problem["msg"], repr(problem["input"])
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            names = flat({key: problem["input"]})
            unknown += [explain_unknown(name, list(keys)) for name in names]
            continue
        # the description says the forms without a pattern
        if problem["type"] == "string_pattern_mismatch":
            message = "this is of none of these forms"
        if problem["type"] == "missing":  # a setting, or an entry of a list
            given = "missing" if key in keys else f"{given}, too short"
        while key not in keys and "." in key:  # a position in a list, or a member of a union
            key = key.rpartition(".")[0]
        start = f"{wrong[key]}, or " if key in wrong else f"{key} is {given}: "
        wrong[key] = start + message[0].lower() + message[1:]
    about = {key: info.description.rstrip(".").replace("\n", " ") for key, info in keys.items()}
    hints = (f"{text} ({about.get(key, 'a table of settings')})" for key, text in wrong.items())
    return [*unknown, *hints]


@cache
def foreign_names() -> Values:
    """Read what other trainers call their settings, and what to do about each; the migration reads it, too."""
    names = tomllib.loads(Path(__file__).with_name("foreign_names.toml").read_text())
    rules = names["ours"].items()
    names["ours"] = {n: rule if isinstance(rule, dict) else {"key": rule} for n, rule in rules}
    kinds = ("ours", "not_needed", "by_hand", "not_supported")
    names["rules"] = {
        name: (kind, rule) for kind in kinds for name, rule in names[kind].items()
    }
    return names


def explain_unknown(key: str, keys: list[str]) -> str:
    """Return one sentence about an unknown setting: what it is called here, or why it is not there.

    Args:
        keys: all of our settings.
    """
    names = foreign_names()
    last = key.rpartition(".")[2]
    for name in (key, last):
        kind, rule = names["rules"].get(name, ("", {}))
        if kind == "ours":
            note = f" ({rule['note']})" if "note" in rule else ""
            end = rule["key"].removeprefix("STAGE")
            ours = " or ".join(ours for ours in keys if ours.endswith(end))
            return f"{key}: unknown; here it is {ours}{note}"
        if kind == "not_needed":
            return f"{key}: not needed here ({rule}); leave it out"
        if kind:
            return f"{key}: not supported; {rule}"
    same_name = [ours for ours in keys if ours.endswith(f".{last}")]
    if near := same_name or difflib.get_close_matches(key, keys, 1, 0.8):
        return f"{key}: unknown; did you mean {' or '.join(near)}?"
    return f"{key}: unknown; ulysses train --help lists the settings"


def still_known(values: Values) -> Values:
    """Return those of a checkpoint's settings that this version has; the version that wrote it may have had others."""
    kept = {}
    for key in known_keys():
        # a table whose keys the user chose is one setting; another version may have had a value in a table's place
        with suppress(KeyError, TypeError):
            value = reduce(getitem, key.split("."), values)
            if (key.rpartition(".")[2], str(value)) not in GONE:
                put(kept, key, value)
    return kept


def known_keys(table: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Return pydantic's description of every setting by its dotted key, in the order of the schema."""
    keys = {}
    for name, info in table.model_fields.items():
        if hasattr(info.annotation, "model_fields"):
            keys |= known_keys(info.annotation, f"{prefix}{name}.")
        else:
            keys[prefix + name] = info
    return keys


def _read_arguments(arguments: list[str]) -> Values:
    """Read `--key value`, `--key=value` and bare switches; a list that is given several times collects its values."""
    forms_of = {
        key: forms(info.annotation)
        for key, info in (known_keys(Options) | known_keys()).items()
    }
    settings = {}
    rest = list(arguments)
    while rest:
        argument, equals, value = rest.pop(0).partition("=")
        key = argument.removeprefix("--")
        if key == argument:
            _refuse_yaml(key)
            raise ConfigError(
                f"{argument!r} has no key before it; write --config {argument} for a file, and settings as --key value"
            )
        if "." not in key:
            key = key.replace("-", "_")
        # an unknown key, which has no forms, is refused with all other errors, when the settings are checked
        allowed = forms_of.get(key, [])
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif key == "adjust_lr" or "bool" in allowed or not allowed:
                value = "1"
            else:
                raise ConfigError(f"--{key} needs a value")
        # the schema decides what the text of a number or a word means; a chat template may begin like a table
        if not allowed or (allowed != ["str"] and value.startswith(("[", "{"))):
            value = _read_value(key, value)
        if "list" in allowed and "int" not in allowed:  # run.samples may be a number instead
            value = settings.get(key, []) + (value if isinstance(value, list) else [value])
        settings[key] = value
    return settings


def _read_value(key: str, text: str) -> object:
    """Read a list, a table or the value of an unknown key as JSON or as TOML; other text stays as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, RecursionError):
        return tomllib.loads(f"value = {text}")["value"]
    if text.startswith(("[", "{")):
        raise ConfigError(
            f'{key} is {text}, which is neither JSON nor TOML; write a table as {{path = "a.jsonl"}}, all of it in '
            "single quotes for the shell"
        )
    return text


def put(values: Values, key: str, value: object) -> None:
    """Set a dotted key in nested tables, in place of what was there; ConfigError if one of them is no table."""
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{table} is {values!r} but must be a table, as {key} is set too")
    values[name] = value


def _read_file(path: str) -> dict[str, object]:
    _refuse_yaml(path)
    file = existing(Path(absolute(path)), "--config")
    try:
        content = file.read_bytes()
        return tomllib.loads(content.decode(json.detect_encoding(content)))
    except (OSError, ValueError, RecursionError) as error:
        sentence = f"{file} cannot be read as one table of settings: {error}"
        raise ConfigError(sentence, "--config") from None


def _refuse_yaml(path: str) -> None:
    if path.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{path} is YAML, but settings are written in TOML; `ulysses migrate {path}` translates files of "
            "LLaMA-Factory, TRL and axolotl"
        )


def help_text() -> str:
    """Return what --help prints: every option and setting with its forms, its explanation and its default."""
    text = """Train a language model on long sequences: ulysses train --config FILE.toml [--key value ...]

On several GPUs: torchrun --nproc_per_node 8 -m ulysses.train --config FILE.toml [--key value ...]

Options, and settings, which are also the keys of the TOML file:"""
    for key, info in (known_keys(Options) | known_keys()).items():
        has_default = not info.is_required() and info.default is not None
        default = f" (default {info.default!r})" if has_default else ""
        shown = key if "." in key else key.replace("_", "-")
        lines = f"{info.description}{default}".replace("\n", f"\n{' ' * 8}")
        text += f"\n  --{shown} {'|'.join(forms(info.annotation))}\n        {lines}"
    return text


def forms(annotation: object) -> list[str]:
    """Return the forms that a setting may have, such as ["int", "auto"]."""
    if get_origin(annotation) in (UnionType, Union, Literal):
        members = (forms(member) for member in get_args(annotation))
        return [form for of_member in members for form in of_member if form != "NoneType"]
    if isinstance(annotation, str):
        return [annotation]
    return [getattr(annotation, "__origin__", annotation).__name__]


def contradictions(config: Config, stage: Any = None) -> Iterator[str]:
    """Yield what is wrong with a combination of settings, each of which is right by itself.

    Args:
        stage: the configuration's; its own checks come last. `ulysses migrate` has none.
    """
    model, data, run, memory = config.model, config.data, config.run, config.memory
    if model.path and model.arch:
        yield "model.path and model.arch are both set; set only one of them"
    elif not model.path and (model.init == "pretrained" or not (model.arch or model.config)):
        yield (
            "the model is missing; set model.path to a folder or hub id, or model.arch with model.init = "
            '"random"'
        )
    elif model.init == "pretrained" and model.config:
        yield (
            "model.config changes the shape, which pretrained weights do not fit; remove it, or set model.init = "
            '"random"'
        )
    if model.quantize != "none" and not model.lora.rank:
        yield (
            f'model.quantize is "{model.quantize}" but all weights are trained, which needs them as they are; set '
            'model.lora.rank, or model.quantize = "none"'
        )
    if model.add_tokens and model.lora.rank and not model.lora.train:
        yield (
            "model.add_tokens makes rows of the embedding, which adapters alone neither train nor hold; set "
            'model.lora.train = ["embeddings"]'
        )
    if config.optimizer.lr > MOST_LR:
        yield f"optimizer.lr is {config.optimizer.lr:g}, after which nothing of a model is left; rates lie below 1e-2"
    if memory.weights == "resident" and memory.offload_parameters:
        yield (
            'memory.weights is "resident" but memory.offload_parameters keeps them in host memory; set '
            'memory.weights to "auto", or memory.offload_parameters to false'
        )
    for name, settings in config.model_dump(exclude={"stage"}).items():
        for key, value in settings.items():
            text = json.dumps(value, ensure_ascii=False)
            if CREDENTIALS.search(text) or (
                key == "sampler_reload" and SECRET_FIELDS.search(text)
            ):
                yield (
                    f"{name}.{key} holds a key, a name or parameters beside host, port and path of an address, which "
                    "the log and config.json would show; take them out, and set the environment variable "
                    f"{'ULYSSES_API_KEY, which servers get as their key' if name == 'ppo' else 'HF_TOKEN'}"
                )
    if bool(run.steps) == bool(run.epochs):
        yield (
            f"run.steps is {run.steps} and run.epochs is {run.epochs:g}, but exactly one of them must be above "
            "0; set the one that you mean"
        )
    if data.eval and data.eval_fraction:
        yield f"data.eval_fraction is {data.eval_fraction:g} but data.eval names held-out data; remove one of them"
    tables = {*LEARNING_RATES} - {config.stage}
    if stage and stage.requirements.rollout:
        tables -= {"ppo"}  # where the settings of sampling stand
    # reasons why settings are not read, each with the beginnings of those settings' names
    unread = {**stage.unread} if stage else {}
    unread |= {
        f"stage {config.stage!r} reads no settings of {name}; remove them, or set stage = {name!r}": (
            f"{name}.",
        )
        for name in tables
    }
    if not model.lora.rank:
        reason = "model.lora.rank is 0, which trains all weights; set the rank, or remove them"
        unread[reason] = ("model.lora.",)
    if stage:
        name = f"stage {config.stage!r}"
        if stage.dataset_type in ("text", "ranked"):
            unread[f"{name} answers no prompts; remove it"] = ("run.samples",)
        if stage.dataset_type == "text":
            reason = f"{name} trains every token, longer documents in pieces; remove it"
            unread[reason] = ("data.train_on", "data.truncation")
        elif stage.dataset_type != "sequence":
            unread[f"{name} trains the last answer only; remove it"] = ("data.train_on",)
    if not (data.eval or data.eval_fraction):
        reason = (
            "there is nothing to evaluate; set data.eval or data.eval_fraction, or remove it"
        )
        unread[reason] = ("run.eval_every", "run.samples")
    if not run.eval_every:
        reason = "only the end of the run is evaluated; set run.eval_every, or remove it"
        unread[reason] = ("run.patience",)
    # defaults are no wish of the user's: the config.json of a run has them all
    wished = {
        key for key, info in known_keys().items() if attrgetter(key)(config) != info.default
    }
    for reason, beginnings in unread.items():
        if in_vain := {key for key in wished if key.startswith(beginnings)}:
            yield f"{', '.join(sorted(in_vain))}: {reason}"
        wished -= in_vain  # each is told once, for the reason that stands first
    if stage:
        yield from stage.check()
