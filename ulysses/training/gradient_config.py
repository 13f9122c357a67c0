"""The [gradients] section: a preset, or the chain of gradient policies written out."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ulysses.gradients.build import build_chain
from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.presets import preset_tables


class GradientsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_norm: float = Field(1.0, ge=0)
    """Clip the gradient to this global norm; 0 does not clip."""
    preset: str = "default"
    """A named chain of gradient policies: "default" (stop on non-finite, clip), "steady" or "ulysses-pro"."""
    policies: list[dict[str, Any]] = []
    """The chain written out as tables {policy = name, ...}; replaces preset and max_norm."""
    table_every: int = Field(50, ge=1)
    """With --debug: steps between tables of the largest and smallest gradients by parameter."""

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The chain's tables; ValueError for an unknown preset."""
        return self.policies or preset_tables(self.preset, self.max_norm)

    def scoped_tables(self, scopes: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the chain's tables for a stage whose parameters fall into `scopes`.

        A preset's last clip to max_norm is applied to the parameters of every scope by themselves.
        """
        if self.policies or not scopes:
            return self.tables
        clip = [t for t in self.tables if t["policy"] == "clip_global_norm" and "when" not in t]
        rest = [t for t in self.tables if t not in clip]
        return [*rest, *({**t, "groups": [scope]} for t in clip for scope in scopes)]

    def chain(self, scopes: Sequence[str] = ()) -> GradientPolicyChain:
        """Build the gradient policies; ValueError names what cannot be honoured."""
        tables, known = self.scoped_tables(scopes), list(scopes) or ["default"]
        chain = build_chain(tables)
        for index, table in enumerate(tables):
            if not set(table.get("groups") or known) <= set(known):
                raise ValueError(
                    f"gradients.policies[{index}]: groups is {table['groups']} but this stage's are {known}"
                )
        return chain
