"""Clip the gradient to a percentile of the norms seen so far."""

import math
from typing import Any, ClassVar

import torch

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class AutoClip(GradientPolicy):
    """Clip to the `percentile`-th percentile of all norms so far, this one included (2007.14469; 10 in the paper).

    `history` bounds how many norms are kept (the paper keeps all).
    """

    name: ClassVar[str] = "auto_clip"
    reads: tuple[str, ...] = ("norm",)

    def __init__(self, percentile: float = 10.0, history: int = 10_000) -> None:
        if not 0 <= percentile <= 100 or history < 1:
            raise ValueError(
                f"percentile is {percentile} and history {history} but they must lie in [0, 100] and be at least 1"
            )
        self.percentile, self.history = percentile, history
        self.norms: list[float] = []

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm = gradients.norm()
        if not math.isfinite(norm):
            return {"grad_norm": norm}
        self.norms = [*self.norms, norm][-self.history :]
        limit = float(
            torch.quantile(torch.tensor(self.norms, dtype=torch.float64), self.percentile / 100)
        )
        factor = gradients.clip_norm(limit) if norm > limit else 1.0
        return {"grad_norm": norm, "grad/auto_clip_limit": limit, "grad/auto_clip_factor": factor}

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = list(map(float, state["norms"]))
