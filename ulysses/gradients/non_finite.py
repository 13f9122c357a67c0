"""What to do when the loss or the gradient is not finite: stop (the default), or skip the step."""

from typing import Any, ClassVar

from ulysses.gradients.chain import (
    GradientPolicy,
    Report,
    StepContext,
    explain_non_finite,
    is_finite_step,
)
from ulysses.gradients.gradients import Gradients


class StopOnNonFinite(GradientPolicy):
    """Stop the run before the weights are touched, naming the step and the parameters.

    It reads the gradient norm, which ClipGlobalNorm reads again for free.
    """

    name: ClassVar[str] = "stop_on_non_finite"
    reads: tuple[str, ...] = ("norm",)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        if not is_finite_step(gradients, context):
            context.stop = explain_non_finite(gradients, context)
        return {"grad_norm": gradients.norm()}


class SkipNonFinite(GradientPolicy):
    """Skip the step, and stop after more than `limit` such steps in a row (bad weights never recover)."""

    name: ClassVar[str] = "skip_non_finite"
    reads: tuple[str, ...] = ("norm",)

    def __init__(self, limit: int = 3) -> None:
        if limit < 1:
            raise ValueError(
                f"limit is {limit} but must be at least 1; to stop at once use stop_on_non_finite"
            )
        self.limit = limit
        self.consecutive = 0
        self.total = 0

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        if is_finite_step(gradients, context):
            self.consecutive = 0
        else:
            self.consecutive += 1
            self.total += 1
            reason = explain_non_finite(gradients, context)
            if self.consecutive > self.limit:
                context.stop = f"{reason}; {self.consecutive} steps in a row were not finite (limit {self.limit})"
            else:
                context.skip = reason
        return {"grad_norm": gradients.norm(), "grad/non_finite_total": float(self.total)}

    def state_dict(self) -> dict[str, Any]:
        return {"consecutive": self.consecutive, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consecutive, self.total = int(state["consecutive"]), int(state["total"])
