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

# What the shell would not pass on as it stands: variables anywhere, the rest outside of quotes.
NOT_PLAIN = r"""[$`]|^(?:[^'"]|'[^']*'|"[^"]*")*?(?:[;|&<>()]|\s#)"""
NAMES = foreign_names()
MOST_REPEATED = 10  # times its length that YAML may be with its aliases written out


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
    # llamafactory-cli train FILE
    name, given = "config", {"stage": [method]} if method else {}
    # the shell leaves a quoted ~, and one after =, as it is, which here would be a home
    for word in shlex.split(re.sub(r"""(["'=])(?=~)""", r"\1./", arguments)):
        if word.startswith("--"):
            name, _, word = word[2:].partition("=")
            name = name.replace("-", "_")
        given.setdefault(name, []).append(word)
    values = {name: [word for word in words if word] or True for name, words in given.items()}
    for file in values.pop("config", []):
        values = read_settings(found_at(file, path.parent)) | values
    return values


def read_yaml(text: str) -> Any:
    """Read YAML; ConfigError if its aliases make much more of it than stands there."""
    root = yaml.compose(text, yaml.SafeLoader)
    if root and _size(root) > MOST_REPEATED * (len(text) + 1):
        raise ConfigError(
            "its aliases repeat far more than stands there; write the settings out without them"
        )
    return yaml.safe_load(text)


@cache
def _size(part: Any) -> int:
    """Return how much a part of YAML is with its aliases written out; RecursionError if it holds itself."""
    if isinstance(part, str):
        return len(part)
    if isinstance(part, tuple):
        return 1 + sum(map(_size, part))
    return _size(part.value if isinstance(part.value, str) else tuple(part.value))


def _command(text: str) -> tuple[str, str]:
    """Return the method that a shell text's only command trains by ("" if its file says it), and its arguments."""
    commands, scripts = NAMES["commands"], NAMES["scripts"]
    starts, programs = ("|".join(map(re.escape, table)) for table in (commands, scripts))
    lines = text.replace("\\\n", " ").splitlines()
    lines = [line for line in lines if not re.match(r"\s*(#|export\s|set\s|$)", line)]
    # a launcher's own options lie before the first script or module
    launched = rf"(?:{'|'.join(NAMES['launchers'])})\s+(?:(?!\S*\.py\s|-m\s)\S+\s+)*?(?:-m\s+)?(?:\S*/)?({programs})"
    found = re.match(
        rf"\s*(?:\w+=\S*\s+)*(?:({starts})|{launched})(?:\s+(.*)|$)", "\n".join(lines)
    )
    if not found:
        raise ConfigError(
            f"no command here starts a trainer; what can be read is one command {', '.join(commands)}, or one of "
            f"{', '.join(NAMES['launchers'])} with one of {', '.join(scripts)}"
        )
    start, script, arguments = found.groups(default="")
    # the shell would change them, or start something else besides
    if len(lines) > 1 or re.search(NOT_PLAIN, arguments):
        raise ConfigError(
            "leave one command alone in this file, without variables, pipes or comments behind it"
        )
    return (commands | scripts)[start or script], arguments


def found_at(path: str, folder: Path) -> Path:
    """Return a path as it is, or as seen from `folder` or one above it, wherever the file exists."""
    path, places = expanduser(path), (Path(), folder, *folder.absolute().parents)
    return next((place / path for place in places if (place / path).exists()), Path(path))
