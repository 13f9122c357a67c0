"""Enlarge the gradients of parameters whose gradients are small."""

from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class ScaleSmallGradients(GradientPolicy):
    """Multiply by `factor` every parameter whose mean |g|, as it stands now, is below `threshold`.

    Under Adam a constant factor cancels; only a change of the factor is felt for a while.
    """

    name: ClassVar[str] = "scale_small_gradients"
    reads: tuple[str, ...] = ("mean_abs",)

    def __init__(self, threshold: float = 1e-4, factor: float = 1.5) -> None:
        if threshold < 0 or factor <= 0:
            raise ValueError(
                f"threshold is {threshold} and factor {factor} but they must be at least 0 and above 0"
            )
        self.threshold, self.factor = threshold, factor

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        small = [mean < self.threshold for mean in gradients.parameter_mean_abs().tolist()]
        if any(small):
            gradients.scale_parameters([self.factor if s else 1.0 for s in small])
        return {"grad/scaled_parameters": float(sum(small))}
