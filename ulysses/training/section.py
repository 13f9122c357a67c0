"""The base class of the configuration's tables, and the errors that refuse a setting."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A setting that cannot be honoured. Its text is the one sentence that the user reads.

    Args:
        sentence: what was given, what is required and what to change.
        key: the setting at fault, such as "dpo.reference"; the text then begins with it.
    """

    def __init__(self, sentence: object, key: str = "") -> None:
        super().__init__(f"{key}: {sentence}" if key else str(sentence))
        self.key = key


class AbsentError(ConfigError):
    """A setting that is right but names something that is not on this machine; a dry run reports it and goes on."""


@contextmanager
def collecting(findings: list[str] | None = None) -> Iterator[list[str]]:
    """Yield a list for complaints, and raise them together in one ConfigError at the end of the block.

    Args:
        findings: the list of a dry run, which is yielded instead and refuses nothing.
    """
    complaints: list[str] = []
    yield complaints if findings is None else findings
    if len(complaints) > 1:
        complaints = [
            f"{len(complaints)} settings are wrong:",
            *(f"  {sentence}" for sentence in complaints),
            "change all of them; train.py --help explains every setting",
        ]
    if complaints:
        raise ConfigError("\n".join(complaints))


class Section(BaseModel):
    """One table of the TOML file. Unknown keys are refused, and values do not change after they were checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table whose keys are dotted; an empty table is a value."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


@contextmanager
def blame(
    key: str = "",
    findings: list[str] | None = None,
    *,
    absent: bool = False,
    every: bool = False,
) -> Iterator[None]:
    """Turn an error about a value or a file into a ConfigError about the setting `key`.

    Args:
        findings: collects, for a dry run, the sentences about what is absent; without it they refuse the run too.
        every: findings collects the sentences about everything else, too.
        absent: any error means that something is absent, not only a file that does not exist.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        absent = absent or isinstance(error, AbsentError | FileNotFoundError)
        if not isinstance(error, ConfigError):
            error = (AbsentError if absent else ConfigError)(error, key)
        if findings is None or not (every or isinstance(error, AbsentError)):
            raise error from None
        findings.append(str(error))
