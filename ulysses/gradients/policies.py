"""The gradient policies of every run: stop at what is not finite, and clip. Others are imported when they are named."""

import math
from dataclasses import dataclass

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import GradientPolicy, Report, StepContext


@dataclass
class StopOnNonFinite(GradientPolicy):
    """Stop the run before the weights change, naming the step and the parameters."""

    name = "stop_on_non_finite"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        context.stop = what_is_not_finite(gradients, context)
        return {}


def what_is_not_finite(gradients: Gradients, context: StepContext) -> str | None:
    """Return a sentence that names the bad loss or up to three bad parameters; None if all is finite."""
    found = [] if math.isfinite(context.loss) else [f"the loss is {context.loss}"]
    if not math.isfinite(gradients.norm()):
        counts = gradients.nonfinite()
        bad = [entry.name for entry, count in zip(gradients.entries, counts) if count]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        found.append(
            f"{sum(counts):.0f} gradient elements are inf or nan, in {', '.join(bad[:3])}{more}"
            if bad
            else "the gradient norm overflows float32, though every element is finite"
        )
    # steps are counted from 1, as in metrics.jsonl
    return f"step {context.step + 1}: {' and '.join(found)}" if found else None


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
        scopes = [None] if self.together else list(gradients.factors)
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
