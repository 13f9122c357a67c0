"""Multiply one step's learning rate."""

from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class BoostLearningRate(GradientPolicy):
    """Take this step with schedule value x factor; meant to be used with a condition, such as vanishing gradients.

    The schedule itself is never written to, so nothing compounds and the next step starts from the schedule again.
    """

    name: ClassVar[str] = "boost_learning_rate"

    def __init__(self, factor: float = 1.2) -> None:
        if factor <= 0:
            raise ValueError(f"factor is {factor} but must be above 0")
        self.factor = factor

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        context.lr_scale *= self.factor
        return {"grad/lr_scale": context.lr_scale}
