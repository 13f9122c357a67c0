"""Read the settings of other trainers from their files: YAML, JSON, or the shell command that starts them."""

import re
import shlex
from functools import cache
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from ulysses.config.foreign_names import foreign_names
from ulysses.config.section import ConfigError, Values, existing

# What a shell would not pass on as it stands: variables anywhere; pipes, redirections and comments outside of quotes.
NOT_PLAIN = r"""[$`]|^(?:[^'"]|'[^']*'|"[^"]*")*?(?:[;|&<>()]|\s#)"""
NAMES = foreign_names()
MOST_REPEATED = 10  # how many times longer YAML may be with its aliases written out


def read_settings(path: Path) -> Values:
    """Read their settings from YAML, JSON, or the arguments of a command such as `trl dpo --config FILE --beta 0.2`."""
    text = existing(path).read_text(encoding="utf-8-sig")
    if path.suffix == ".toml":
        raise ConfigError("this is TOML, which ulysses train --config reads as it is")
    if path.suffix in (".yaml", ".yml", ".json"):
        values = read_yaml(text)
        if not isinstance(values, dict):
            raise ConfigError(
                "this file holds no settings; give the YAML that the trainer reads"
            )
        return {str(name): value for name, value in values.items()}
    method, arguments = _command(text)
    # a word before the first option is the file of `llamafactory-cli train FILE`
    name, words_of = "config", {"stage": [method]} if method else {}
    # a shell leaves a ~ in quotes or after = as it is; without ./ before it, it would become the home folder here
    for word in shlex.split(re.sub(r"""(["'=])(?=~)""", r"\1./", arguments)):
        if word.startswith("--"):
            name, _, word = word[2:].partition("=")
            name = name.replace("-", "_")
        words_of.setdefault(name, []).append(word)
    values = {name: [*filter(None, words)] or True for name, words in words_of.items()}
    for file in values.pop("config", []):
        values = read_settings(existing_path(file, path.parent)) | values
    return values


def read_yaml(text: str) -> Any:
    """Read YAML; ConfigError if its aliases would make it much longer than its text."""
    root = yaml.compose(text, yaml.SafeLoader)
    if root and _size(root) > MOST_REPEATED * (len(text) + 1):
        raise ConfigError(
            "its aliases repeat far more than stands there; write the settings out without them"
        )
    return yaml.safe_load(text)


@cache
def _size(part: Any) -> int:
    """Return the length of a part of YAML with its aliases written out; RecursionError if it holds itself."""
    if isinstance(part, str):
        return len(part)
    if isinstance(part, tuple):
        return 1 + sum(map(_size, part))
    return _size(part.value if isinstance(part.value, str) else tuple(part.value))


def _command(text: str) -> tuple[str, str]:
    """Return what a shell text's only command trains ("" if its file says it), and the command's arguments."""
    commands, scripts = NAMES["commands"], NAMES["scripts"]
    starts, programs = ("|".join(map(re.escape, table)) for table in (commands, scripts))
    lines = text.replace("\\\n", " ").splitlines()
    lines = [line for line in lines if not re.match(r"\s*(#|export\s|set\s|$)", line)]
    # a launcher's own options stand before the first script or module
    launched = rf"(?:{'|'.join(NAMES['launchers'])})\s+(?:(?!\S*\.py\s|-m\s)\S+\s+)*?(?:-m\s+)?(?:\S*/)?({programs})"
    command = re.match(
        rf"\s*(?:\w+=\S*\s+)*(?:({starts})|{launched})(?:\s+(.*)|$)", "\n".join(lines)
    )
    if not command:
        raise ConfigError(
            f"no command here starts a trainer; what can be read is one command {', '.join(commands)}, or one of "
            f"{', '.join(NAMES['launchers'])} with one of {', '.join(scripts)}"
        )
    start, script, arguments = command.groups(default="")
    if len(lines) > 1 or re.search(NOT_PLAIN, arguments):
        raise ConfigError(
            "leave one command alone in this file, without variables, pipes or comments behind it"
        )
    return (commands | scripts)[start or script], arguments


def existing_path(path: str, folder: Path) -> Path:
    """Return a path as it is, or as seen from `folder` or a folder above it, wherever the file exists first."""
    path, places = expanduser(path), (Path(), folder, *folder.absolute().parents)
    return next((place / path for place in places if (place / path).exists()), Path(path))
