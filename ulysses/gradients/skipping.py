"""Gradient policies that skip a step: one for gradients that are not finite, one for spikes."""

import math
import statistics
from dataclasses import dataclass, field

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import GradientPolicy, Report, StepContext, describe_non_finite


@dataclass
class SkipNonFinite(GradientPolicy):
    """Skip the step, and stop the run after more than `limit` such steps in a row (bad weights never recover)."""

    limit: int = 3
    consecutive: int = field(default=0, init=False)
    name = "skip_non_finite"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        reason = describe_non_finite(gradients, context)
        self.consecutive = self.consecutive + 1 if reason else 0
        if self.consecutive > self.limit:
            context.stop = f"{reason}; {self.consecutive} steps in a row were not finite (limit {self.limit})"
        else:
            context.skip = reason
        return {}


@dataclass
class SkipSpike(GradientPolicy):
    """Skip a step whose loss or norm lies more than `sigma` deviations above its mean of the last `window` steps.

    Source: OLMo's skip-step optimizer (6 and 128 there). Nothing is skipped before the window holds `warmup` steps.
    Every finite step enters the window, a skipped one too, so that a lasting change of level is accepted after a while.
    A deviation is at least 1% of the mean, so that small changes after a flat stretch do not look like spikes.
    """

    sigma: float = 6.0
    window: int = 128
    warmup: int = 32
    # the loss and the gradient norm of each of the last steps
    recent: list[list[float]] = field(default_factory=list, init=False)
    name = "skip_spike"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.warmup <= self.window:
            raise ValueError(
                f"window is {self.window} and warmup {self.warmup} but 2 <= warmup <= window is required"
            )

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        now, deviations = [context.loss, gradients.norm()], [0.0, 0.0]
        history = zip(*self.recent) if len(self.recent) >= self.warmup else ()
        for i, past in enumerate(history):
            mean = statistics.fmean(past)
            spread = max(statistics.stdev(past), 0.01 * abs(mean), 1e-12)
            deviations[i] = z = (now[i] - mean) / spread
            if z > self.sigma:
                context.skip = (
                    f"step {context.step + 1}: the {('loss', 'gradient norm')[i]} is {now[i]:.4g}, {z:.1f} deviations "
                    "above its recent mean"
                )
        if all(map(math.isfinite, now)):
            self.recent = [*self.recent, now][-self.window :]
        return {"grad/loss_z": deviations[0], "grad/norm_z": deviations[1]}
