"""Clip the gradient by its mean absolute value."""

from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class ClipMeanAbs(GradientPolicy):
    """g *= min(1, limit / mean|g|), with mean |g| the mean over parameters of each one's mean |g|."""

    name: ClassVar[str] = "clip_mean_abs"
    reads: tuple[str, ...] = ("mean_abs",)

    def __init__(self, limit: float = 5.0) -> None:
        if limit <= 0:
            raise ValueError(f"limit is {limit} but must be above 0")
        self.limit = limit

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        mean = gradients.mean_abs()
        factor = self.limit / mean if mean > self.limit else 1.0
        if factor < 1:
            gradients.scale(factor)
        return {"grad/mean_abs": mean, "grad/mean_abs_factor": factor}
