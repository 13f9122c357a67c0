"""Clip gradient norms that stand out from their own running statistics."""

import math
from typing import Any, ClassVar

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients


class ZClip(GradientPolicy):
    """If z = (||g|| - mu) / sd > threshold, scale the gradient to norm mu + threshold^2 / z * sd (2504.02507).

    mu and the variance are exponential averages (`decay`) of the norms after clipping; the first `warmup` norms only
    initialise them. The more extreme a norm, the closer to mu it lands. Put ClipGlobalNorm after it to cap norms.
    """

    name: ClassVar[str] = "zclip"
    reads: tuple[str, ...] = ("norm",)

    def __init__(self, threshold: float = 2.5, decay: float = 0.97, warmup: int = 25) -> None:
        if threshold <= 0 or not 0 < decay < 1 or warmup < 2:
            raise ValueError(
                f"threshold is {threshold}, decay {decay} and warmup {warmup} "
                "but they must be above 0, between 0 and 1, and at least 2"
            )
        self.threshold, self.decay, self.warmup = threshold, decay, warmup
        self.first: list[float] = []
        self.mean = 0.0
        self.variance = 0.0

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm = gradients.norm()
        if not math.isfinite(norm):
            return {"grad_norm": norm}
        if len(self.first) < self.warmup:
            self.first.append(norm)
            if len(self.first) == self.warmup:
                self.mean = math.fsum(self.first) / self.warmup
                self.variance = math.fsum((x - self.mean) ** 2 for x in self.first) / self.warmup
            return {"grad_norm": norm, "grad/zclip_z": 0.0, "grad/zclip_factor": 1.0}
        deviation = math.sqrt(self.variance) + 1e-6
        z = (norm - self.mean) / deviation
        target = self.mean + self.threshold**2 / z * deviation if z > self.threshold else norm
        factor = target / norm if target < norm else 1.0
        if factor < 1:
            gradients.scale(factor)
        self.mean = self.decay * self.mean + (1 - self.decay) * target
        self.variance = self.decay * self.variance + (1 - self.decay) * (target - self.mean) ** 2
        return {"grad_norm": norm, "grad/zclip_z": z, "grad/zclip_factor": factor}

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first), "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = list(map(float, state["first"]))
        self.mean, self.variance = float(state["mean"]), float(state["variance"])
