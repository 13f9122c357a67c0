"""Remove the mean of every output's gradient."""

from typing import ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class GradientCentralization(GradientPolicy):
    """Subtract from each row of a matrix's gradient its mean over all axes but the first (2004.01461, eq. 1).

    Vectors are left alone. Row means are exact although rows straddle ranks. Reports the norm that was removed.
    """

    name: ClassVar[str] = "gradient_centralization"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        return {"grad/centered_norm": gradients.center()}
