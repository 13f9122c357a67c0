"""From the command line to a checked configuration: a TOML file, with settings written `--key value` laid over it.

--config dpo.toml --optimizer.lr 1e-6   ->   {"optimizer": {"lr": "1e-6", ...}, ...}   ->   Config
"""

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ulysses.config.explanations import sentences
from ulysses.config.schema import Config, Options
from ulysses.config.section import ConfigError, Values, absolute, existing, refuse

Table = TypeVar("Table", bound=BaseModel)


class CommandLine(NamedTuple):
    """What was asked for: the run's configuration and the options of the command."""

    config: Config
    options: Options


def parse_command_line(arguments: list[str], **overrides: object) -> CommandLine:
    """Read the options of the command, the TOML file and the settings that override it, the keyword arguments last.

    Raises ConfigError for anything that is not a valid configuration, all at once.
    """
    given = _read_arguments(arguments)
    asked = {name: given.pop(name) for name in Options.model_fields if name in given}
    options = check(asked, Options)
    if (options.gpus or options.gpu_memory or options.host_memory) and not options.dry_run:
        raise ConfigError(
            "--gpus, --gpu-memory and --host-memory describe a machine to plan for; add --dry-run or leave them out"
        )
    values = _read_file(options.config) if options.config else {}
    for key, value in (given | overrides).items():
        put(values, key, value)
    if not values:
        found = f"{options.config} is empty" if options.config else "there is no configuration"
        raise ConfigError(
            f"{found}; give one with --config FILE.toml (configs/ has one for every stage), or read "
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
            errors = sentences(error, known_keys(table))
    except RecursionError:
        errors = ["the settings are nested too deeply; write tables of one or two levels"]
    refuse(errors)


def known_keys(table: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Return pydantic's description of every setting by its dotted key, in the order of the schema."""
    keys: dict[str, FieldInfo] = {}
    for name, info in table.model_fields.items():
        if hasattr(info.annotation, "model_fields"):
            keys |= known_keys(info.annotation, f"{prefix}{name}.")
        else:
            keys[prefix + name] = info
    return keys


def _read_arguments(arguments: list[str]) -> Values:
    """Read `--key value`, `--key=value` and bare switches; a list that is given several times collects its values."""
    takes_of = {key: forms(info.annotation) for key, info in everything().items()}
    given, rest = {}, list(arguments)
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
        # an unknown key is refused with all others, when the settings are checked
        takes = takes_of.get(key, [])
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif key == "adjust_lr" or "bool" in takes or not takes:
                value = "1"
            else:
                raise ConfigError(f"--{key} needs a value")
        # what the text of a number or a word means, the schema decides
        if not takes or value.startswith(("[", "{")):
            value = _read_value(key, value)
        if "list" in takes and "int" not in takes:
            value = given.get(key, []) + (value if isinstance(value, list) else [value])
        given[key] = value
    return given


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
    """Set a dotted key in nested tables, in place of what was there."""
    *tables, name = key.split(".")
    for table in tables:
        if not isinstance(values.get(table), dict):
            values[table] = {}
        values = values[table]
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


def everything() -> dict[str, FieldInfo]:
    """Return what the command line knows: the options of the command, then the settings."""
    return known_keys(Options) | known_keys()


def forms(annotation: object) -> list[str]:
    """Return the forms that a setting may have, such as ["int", "auto"]."""
    if get_origin(annotation) in (UnionType, Union, Literal):
        members = (forms(member) for member in get_args(annotation))
        return [form for found in members for form in found if form != "NoneType"]
    if isinstance(annotation, str):
        return [annotation]
    return [getattr(annotation, "__origin__", annotation).__name__]
