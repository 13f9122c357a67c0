"""What every table of the configuration is built from, and the error that refuses a setting."""

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A setting that cannot be honoured; its text is the one sentence that the user reads."""


class Section(BaseModel):
    """One table of the TOML file: unknown keys are refused, and values cannot change once checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
