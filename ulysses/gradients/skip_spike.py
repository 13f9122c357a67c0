"""Skip steps whose loss or gradient norm leaves its recent range."""

import math
from typing import Any, ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class SkipSpike(GradientPolicy):
    """Skip the step if loss or norm stands over `sigma` standard deviations above its mean of the last `window` steps.

    Source: OLMo's skip-step optimizer (6 and 128 there). Nothing is skipped before `warmup` steps are known. Every
    finite step enters the window, skipped ones too, so a lasting change of level is accepted after a while. A deviation
    is at least 1% of the mean, so that a flat history does not make trifles look like spikes.
    """

    name: ClassVar[str] = "skip_spike"
    reads: tuple[str, ...] = ("norm",)

    def __init__(self, sigma: float = 6.0, window: int = 128, warmup: int = 32) -> None:
        if sigma <= 0 or not 2 <= warmup <= window:
            raise ValueError(
                f"sigma is {sigma}, window {window} and warmup {warmup} "
                "but sigma must be above 0 and 2 <= warmup <= window"
            )
        self.sigma, self.window, self.warmup = sigma, window, warmup
        self.losses: list[float] = []
        self.norms: list[float] = []

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm = gradients.norm()
        loss_z, norm_z = (
            self._deviation(self.losses, context.loss),
            self._deviation(self.norms, norm),
        )
        if loss_z > self.sigma or norm_z > self.sigma:
            which, value, z = (
                ("loss", context.loss, loss_z)
                if loss_z > norm_z
                else ("gradient norm", norm, norm_z)
            )
            context.skip = f"step {context.step + 1}: the {which} is {value:.4g}, {z:.1f} deviations above its recent mean"
        if math.isfinite(context.loss) and math.isfinite(norm):
            self.losses = [*self.losses, context.loss][-self.window :]
            self.norms = [*self.norms, norm][-self.window :]
        return {"grad_norm": norm, "grad/loss_z": loss_z, "grad/norm_z": norm_z}

    def _deviation(self, history: list[float], value: float) -> float:
        if len(history) < self.warmup:
            return 0.0
        mean = math.fsum(history) / len(history)
        variance = math.fsum((x - mean) ** 2 for x in history) / (len(history) - 1)
        return (value - mean) / max(math.sqrt(variance), 0.01 * abs(mean), 1e-12)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = (
            list(map(float, state["losses"])),
            list(map(float, state["norms"])),
        )
