"""Gradient policies that bound the gradient: by its norm, or by the norms of recent steps."""

import math
import statistics
from dataclasses import dataclass, field

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import GradientPolicy, Report, StepContext


@dataclass
class ClipGlobalNorm(GradientPolicy):
    """g *= min(1, max_norm / (||g|| + 1e-6)), as torch's clip_grad_norm_ (Pascanu et al., 1211.5063).

    A run has one scope, except for PPO, where the policy's and the value's parameters are clipped each by its own norm.
    `together` clips all of them by their common norm. max_norm 0 does not clip.
    """

    max_norm: float = 1.0
    together: bool = False
    name = "clip_global_norm"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        scopes = [None] if self.together else dict.fromkeys(entry.group for entry in gradients)
        norms = {scope: gradients.norm(scope) for scope in scopes}  # before any edit
        report: Report = {}
        for scope, norm in norms.items():
            factor = 1.0
            if self.max_norm and math.isfinite(norm):
                factor = min(1.0, self.max_norm / (norm + 1e-6))
            gradients.scale(factor, scope)
            label = "grad"
            if len(norms) > 1:
                label = f"grad/{scope}"
                report[f"{label}/norm"] = norm
            report |= {f"{label}/clip_factor": factor, f"{label}/clipped": float(factor < 1)}
        return report


@dataclass
class ZClip(GradientPolicy):
    """If z = (||g|| - mu) / sd > threshold, scale the gradient to the norm mu + threshold^2 / z * sd (2504.02507).

    mu and the variance are exponential averages (`decay`) of the norms after clipping; the first `warmup` norms only
    initialise them. The more extreme a norm is, the closer it lands to mu. ClipGlobalNorm after it bounds all norms.
    """

    threshold: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    first: list[float] = field(default_factory=list, init=False)
    mean: float = field(default=0.0, init=False)
    variance: float = field(default=0.0, init=False)
    name = "zclip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay >= 1 or self.warmup < 2:
            raise ValueError(
                f"decay is {self.decay} and warmup {self.warmup} "
                "but decay must be below 1 and warmup at least 2"
            )

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        norm, z, factor = gradients.norm(), 0.0, 1.0
        if not math.isfinite(norm):
            return {}
        if len(self.first) < self.warmup:
            self.first = [*self.first, norm]
            self.mean = statistics.fmean(self.first)
            self.variance = statistics.pvariance(self.first)
        else:
            deviation = math.sqrt(self.variance) + 1e-6
            z = (norm - self.mean) / deviation
            if z > self.threshold:
                factor = (self.mean + self.threshold**2 / z * deviation) / norm
                gradients.scale(factor)
            clipped, share = factor * norm, 1 - self.decay
            self.mean += share * (clipped - self.mean)
            self.variance += share * ((clipped - self.mean) ** 2 - self.variance)
        return {"grad/zclip_z": z, "grad/zclip_factor": factor}
