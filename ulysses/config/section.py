"""The base class of the configuration's tables, and the errors that refuse a setting."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

# Texts that no setting may hold.
CREDENTIALS = re.compile(
    r"""
    # what stands in an address beside host, port and path, but for the revision in hf://...@main
    (?<!hf)://[^\s"'?#;@&=]*[?#;@&=][^\s"']+
    # parameters, and a name with a password, of an address without its beginning
    | [?#;&]\w*(key|token|secret|passw\w*|sig\w*)=[^\s"']+
    | \b\w+:[^\s:/@"',]+@\w[^\s"']*
    # keys of well-known services
    | \b(hf_|sk-(\w+-)*|gh[opsu]_|github_pat_|glpat-|xai-|gsk_|nvapi-|AKIA|AIza|eyJ)[A-Za-z0-9]{16,}[\w.-]*
    """,
    re.I | re.X,
)
# Texts that no output shows.
SECRETS = re.compile(
    CREDENTIALS.pattern
    + r"""
    | \bBearer\s+[^\s"']+
    # keys of Weights & Biases; older ones have 40 hexadecimal digits, as a revision of a model, which is shown
    | \bwandb_v\d+_\w+
    | \blocal-[0-9a-f]{40}
    | (?<![\w/-])(?<!revision\ )(?<!revision\ =\ ")[0-9a-f]{40}(?![\w/-])
    """,
    re.I | re.X,
)
Values = dict[str, Any]  # unchecked settings by their names, as TOML, YAML or JSON hold them
# half of a pair of UTF-16, which is no character by itself
SURROGATE = re.compile("[\ud800-\udfff]")
# Values that settings had once, by the setting's last name, and what to use instead.
GONE = {
    ("preset", "steady"): (
        'it has gone, because it trained no better than clipping; use "default"'
    ),
    ("recompute", "pair"): (
        'it has gone, because host memory reaches further; use "block" with memory.offload = "auto"'
    ),
    ("offload", "checkpoints"): (
        'it has gone, because "auto" moves as much as is needed; use "auto"'
    ),
}
LARGEST = 2**53  # up to here every whole number has its own float


class ConfigError(ValueError):
    """A setting that cannot be honoured. Its text is the one sentence that the user reads.

    Args:
        sentence: what was given, what is required and what to change.
        key: the setting at fault, such as "dpo.reference"; the text then begins with it.
    """

    def __init__(self, sentence: object, key: str = "") -> None:
        text = f"{key}: {sentence}" if key else str(sentence)
        super().__init__(SECRETS.sub("***", text))


def visible(text: str, *, lines: bool = False) -> str:
    """Return the text with control characters written out, so that no file name or row can steer a terminal.

    `lines` keeps line breaks and tabs.
    """
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]" if lines else r"[\x00-\x1f\x7f-\x9f]",
        lambda found: repr(found[0])[1:-1],
        text,
    )


class UserCodeError(ValueError):
    """A function or server of the user's has failed. Its sentence says all, so no stack trace is printed."""


class AbsentError(ConfigError):
    """A setting that is right but names something that is not on this machine; a dry run reports it and goes on."""


def existing(path: Path, key: str = "") -> Path:
    """Return the path of a file or folder; AbsentError if there is none."""
    if not path.exists():
        raise AbsentError(f"there is no {path.absolute()}; correct the path", key)
    return path


def refuse(errors: list[object], findings: list[str] | None = None) -> None:
    """Raise one ConfigError for all errors, which are exceptions or sentences, if there are any.

    Args:
        findings: of a dry run: collects the sentences about what is absent, which then refuse nothing.
    """
    if findings is not None:
        findings += [str(error) for error in errors if isinstance(error, AbsentError)]
        errors = [error for error in errors if not isinstance(error, AbsentError)]
    if len(errors) > 1:
        sentences = "".join(f"\n  {sentence}" for sentence in errors)
        raise ConfigError(
            f"{len(errors)} settings are wrong:{sentences}\n"
            "change all of them; ulysses train --help explains every setting"
        )
    for error in errors:
        raise error if isinstance(error, ConfigError) else ConfigError(error)


def absolute(path: str) -> str:
    """Return the absolute path, which stays right in whatever folder a process is; refuse an address."""
    if "://" in path:
        raise ConfigError(f"{path} is an address, but a path on this machine is needed")
    return os.path.abspath(os.path.expanduser(path))


def _local(value: object) -> object:
    """Make each path that exists on this machine absolute; other texts are names, such as hub ids, and stay."""
    if isinstance(value, list):
        return [_local(each) for each in value]
    if isinstance(value, dict):
        return {key: _local(each) if key == "path" else each for key, each in value.items()}
    exists = isinstance(value, str) and (value.startswith("~") or os.path.exists(value))
    return absolute(value) if exists and value not in WORDS else value


def _template(value: str) -> str:
    """Make the path of a chat template absolute; the name of one, and the text of one, stay."""
    is_text = "{{" in value or "{%" in value
    is_path = "/" in value or value.endswith(".jinja")
    return absolute(value) if is_path and not is_text else value


Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
# Values that mean no path, even where there is a file of this name.
WORDS = ("", "never", "auto", "cached", "live")
LocalPath = Annotated[str, AfterValidator(absolute)]
PathOrWord = Annotated[str, AfterValidator(lambda x: x if x in WORDS else absolute(x))]
LOCAL = AfterValidator(_local)
PathOrName = Annotated[str, LOCAL]
TemplateName = Annotated[str, AfterValidator(_template)]


class Section(BaseModel):
    """One table of the TOML file. Unknown keys are refused, and values do not change once they are checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_meant(
        cls, value: object, check: Callable[[object], object], info: ValidationInfo
    ) -> object:
        """Refuse what pydantic would take although it cannot be meant."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = str(annotation)
        if isinstance(value, bool) and "bool" not in types and "Any" not in types:
            raise PydanticCustomError("switch", "this is a number or a text, not true or false")
        if isinstance(value, str) and (instead := GONE.get((info.field_name, value))):
            raise PydanticCustomError("gone", instead)
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError(
                "nul", "this holds a NUL character, which no path or name has"
            )
        written = json.dumps(value, ensure_ascii=False, default=str)
        if not hasattr(annotation, "model_fields") and SURROGATE.search(written):
            raise PydanticCustomError(
                "surrogate",
                "this holds an unpaired surrogate or bytes that are not UTF-8; write it as Unicode",
            )
        checked = check(value)
        if isinstance(checked, int | float) and abs(checked) > LARGEST:
            raise PydanticCustomError("size", "no number can be meant that is beyond 2^53")
        return checked


def flat(tables: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested tables as one table whose keys are dotted; an empty table is a value."""
    table = {}
    for key, value in tables.items():
        nested = isinstance(value, Mapping) and value
        table |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return table


@contextmanager
def error_context(key: str = "", *, absent: bool = False) -> Iterator[None]:
    """Raise an error about a value or a file as a ConfigError about the setting `key`.

    `absent` takes every error for an AbsentError, and not only that of a file which does not exist.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        absent = absent or isinstance(error, FileNotFoundError)
        raise (AbsentError if absent else ConfigError)(visible(str(error)), key) from None


@contextmanager
def collecting(errors: list[object]) -> Iterator[None]:
    """Add an error to a list, as the ConfigError of `error_context`, in place of raising it."""
    try:
        with error_context():
            yield
    except ConfigError as error:
        errors.append(error)
