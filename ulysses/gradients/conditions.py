"""When a gradient policy acts: under a condition on the untouched gradient, and otherwise late in the run.

When(GradientNoise(1e-4), MeanAbs(below=1e-3), late=GradientNoise(1e-5))
"""

import math
from typing import Any, ClassVar, Protocol

from ulysses.gradients.chain import GradientPolicy, Report, StepContext
from ulysses.gradients.gradients import Gradients

EARLY_NORMS = 25


class Condition(Protocol):
    """Judge the untouched gradient once per step, on all ranks alike; `reads` as in GradientPolicy."""

    reads: tuple[str, ...]

    def holds(self, gradients: Gradients, context: StepContext) -> bool: ...

    def report(self) -> Report: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


def _outside(value: float, below: float | None, above: float | None) -> bool:
    return (below is not None and value < below) or (above is not None and value > above)


class MeanAbs(Condition):
    """Hold while mean |g| is below `below` (vanishing) or above `above` (exploding).

    Mean |g| is the mean over parameters of each one's. Absolute thresholds depend on the model's size: a gradient of
    norm 1 over N elements has mean |g| of about 0.8 / sqrt(N).
    """

    reads: tuple[str, ...] = ("mean_abs",)

    def __init__(self, below: float | None = None, above: float | None = None) -> None:
        if below is None and above is None:
            raise ValueError("a mean |g| condition needs mean_abs_below or mean_abs_above")
        self.below, self.above = below, above
        self.seen = 0.0

    def holds(self, gradients: Gradients, context: StepContext) -> bool:
        self.seen = gradients.mean_abs()
        return _outside(self.seen, self.below, self.above)

    def report(self) -> Report:
        return {"grad/mean_abs": self.seen}


class NormZ(Condition):
    """Hold while the z-score of log ||g|| against its own running statistics is below `below` or above `above`.

    The statistics are exponential averages over finite steps; `warmup` steps pass before the condition can hold. What
    enters them is cut at 3 deviations, so that one spike does not widen them; a deviation is at least 1%.
    """

    reads: tuple[str, ...] = ("norm",)

    def __init__(
        self,
        below: float | None = None,
        above: float | None = None,
        decay: float = 0.97,
        warmup: int = EARLY_NORMS,
    ) -> None:
        if below is None and above is None:
            raise ValueError("a norm condition needs norm_z_below or norm_z_above")
        if not 0 < decay < 1 or warmup < 2:
            raise ValueError(
                f"decay is {decay} and warmup {warmup} but they must lie between 0 and 1 and be at least 2"
            )
        self.below, self.above, self.decay, self.warmup = below, above, decay, warmup
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0
        self.seen = 0.0

    def holds(self, gradients: Gradients, context: StepContext) -> bool:
        norm = gradients.norm()
        if not math.isfinite(norm) or norm <= 0:
            self.seen = math.nan
            return self.below is not None and norm == 0 and self.count >= self.warmup
        value = math.log(norm)
        deviation = max(math.sqrt(self.variance), 0.01)
        ready = self.count >= self.warmup
        self.seen = (value - self.mean) / deviation if ready else 0.0
        if ready:
            value = min(max(value, self.mean - 3 * deviation), self.mean + 3 * deviation)
        # the first steps weigh equally, later ones exponentially
        weight = max(1 / (self.count + 1), 1 - self.decay) if not ready else 1 - self.decay
        step = value - self.mean
        self.mean += weight * step
        self.variance = (1 - weight) * (self.variance + weight * step * step)
        self.count += 1
        return ready and _outside(self.seen, self.below, self.above)

    def report(self) -> Report:
        return {"grad/log_norm_z": self.seen}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.variance = (
            int(state["count"]),
            float(state["mean"]),
            float(state["variance"]),
        )


class When(GradientPolicy):
    """Let a gradient policy act only while a condition holds, and late in the run another instead, or none.

    Late is step > late_after * total_steps. `late` None keeps the policy, "off" silences it, another one
    replaces it.
    """

    name: ClassVar[str] = "when"

    def __init__(
        self,
        policy: GradientPolicy,
        condition: Condition | None = None,
        late: GradientPolicy | str | None = None,
        late_after: float = 0.9,
    ) -> None:
        if isinstance(late, str) and late != "off":
            raise ValueError(
                f'late is {late!r} but must be "off" or other settings for {policy.name}'
            )
        if not 0 <= late_after <= 1:
            raise ValueError(
                f"late_after is {late_after} but must lie in [0, 1], a share of the run"
            )
        self.policy, self.condition, self.late, self.late_after = (
            policy,
            condition,
            late,
            late_after,
        )
        self.reads = condition.reads if condition else policy.reads
        self._active = True

    def observe(self, gradients: Gradients, context: StepContext) -> None:
        self._active = self.condition is None or self.condition.holds(gradients, context)
        if acting := self._acting(context):
            acting.observe(gradients, context)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        acting = self._acting(context)
        report = self.condition.report() if self.condition else {}
        report[f"grad/active/{self.policy.name}"] = float(self._active and acting is not None)
        if self._active and acting is not None:
            report |= acting.apply(gradients, context)
        return report

    def _acting(self, context: StepContext) -> GradientPolicy | None:
        if self.late is None or not context.is_late(self.late_after):
            return self.policy
        return None if isinstance(self.late, str) else self.late

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.policy.name,
            "policy": self.policy.state_dict(),
            "condition": self.condition.state_dict() if self.condition else {},
            "late": {}
            if self.late is None or isinstance(self.late, str)
            else self.late.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["name"] != self.policy.name:
            raise ValueError(
                f"the checkpoint's conditional gradient policy is {state['name']} but this run has {self.policy.name}; "
                "use the same [gradients] section"
            )
        self.policy.load_state_dict(state["policy"])
        if self.condition:
            self.condition.load_state_dict(state["condition"])
        if self.late is not None and not isinstance(self.late, str):
            self.late.load_state_dict(state["late"])
