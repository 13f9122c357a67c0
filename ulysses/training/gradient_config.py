"""The [gradients] section."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class GradientsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_norm: float = Field(1.0, ge=0)
    """Clip the gradient to this global norm; 0 does not clip."""
    preset: str = ""
    """A named chain of gradient policies: "ulysses-pro" or "steady"; empty is clipping alone."""
    policies: list[dict[str, Any]] = []
    """The chain written out: tables {name, ...}; replaces preset and max_norm."""
