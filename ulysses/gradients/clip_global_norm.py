"""Clip the gradient to a global norm."""

from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class ClipGlobalNorm(GradientPolicy):
    """g *= min(1, max_norm / (||g|| + 1e-6)), the norm taken over all parameters (Pascanu et al., 1211.5063).

    max_norm 0 switches clipping off; the norm is still reported.
    """

    name: ClassVar[str] = "clip_global_norm"
    reads: tuple[str, ...] = ("norm",)

    def __init__(self, max_norm: float = 1.0) -> None:
        if max_norm < 0:
            raise ValueError(
                f"max_norm is {max_norm} but must be at least 0 (0 switches clipping off)"
            )
        self.max_norm = max_norm

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm = gradients.norm()
        factor = gradients.clip_norm(self.max_norm) if self.max_norm else 1.0
        return {"grad_norm": norm, "grad/clip_factor": factor, "grad/clipped": float(factor < 1)}
