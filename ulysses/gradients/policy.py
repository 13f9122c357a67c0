"""What a gradient policy is, and the two that every run has: stop at a gradient that is not finite, and clip.

The files of other policies are imported when a configuration names one of them (chain.py).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ulysses.gradients.gradients import Gradients

Report = dict[str, float]  # metric name -> value


@dataclass
class StepContext:
    """Describe one optimizer step to the gradient policies, and collect their decisions.

    step: optimizer steps taken before this one. loss: global mean of the step's objective. lr: the schedule's value.
    Decisions: `lr_scale` multiplies the learning rate of this step alone. `skip` leaves the weights unchanged in this
    step, and `stop` ends the run before they change; each holds the reason, or None.
    """

    step: int
    total_steps: int
    loss: float = 0.0
    lr: float = 0.0
    seed: int = 0
    lr_scale: float = 1.0
    skip: str | None = None
    stop: str | None = None


@dataclass
class GradientPolicy:
    """See, and possibly change, the reduced gradient once per optimizer step.

    A policy is a dataclass. The fields that its constructor takes are its settings; a number whose default is above 0
    must be above 0, except max_norm, where 0 means no clipping. The fields with `init=False` are its state, which
    checkpoints hold as plain JSON. Decisions may depend only on these, on the context and on the floats that
    `Gradients` returns (equal on all ranks), so that all ranks decide alike. `reads` names the statistics besides
    "norm" that `apply` asks for in every step ("mean_abs"): the chain measures those of all its policies at once.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            is_positive = f.init and isinstance(f.default, float | int) and f.default > 0
            does_not_clip = f.name == "max_norm" and value == 0
            # nan is not above 0 either
            if is_positive and not value > 0 and not does_not_clip:
                raise ValueError(f"{f.name} is {value} but must be above 0")

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Act, and return what was seen and done as metrics, whose names begin with "grad/"."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.init}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])


@dataclass
class StopOnNonFinite(GradientPolicy):
    """Stop the run before the weights change, naming the step and the parameters."""

    name = "stop_on_non_finite"

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        context.stop = describe_non_finite(gradients, context)
        return {}


def describe_non_finite(gradients: Gradients, context: StepContext) -> str | None:
    """Return a sentence that names the bad loss or up to three bad parameters; None if all is finite."""
    faults = [] if math.isfinite(context.loss) else [f"the loss is {context.loss}"]
    if not math.isfinite(gradients.norm()):
        counts = gradients.nonfinite()
        bad = [entry.name for entry, count in zip(gradients.entries, counts) if count]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        faults.append(
            f"{sum(counts):.0f} gradient elements are inf or nan, in {', '.join(bad[:3])}{more}"
            if bad
            else "the gradient norm overflows float32, though every element is finite"
        )
    # steps are counted from 1, as in metrics.jsonl
    return f"step {context.step + 1}: {' and '.join(faults)}" if faults else None


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
