"""What a gradient policy is, and how several act in order.

    measure (once for all) -> observe (all policies, untouched gradient)
                           -> apply (in order; each sees what the one before left) -> refresh

Policies act once per optimizer step on the accumulated, averaged gradient, just before the optimizer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from ulysses.gradients.gradients import Gradients

Report = dict[str, float]


@dataclass
class StepContext:
    """Describe the step to gradient policies, and collect what they decide.

    step: steps taken before this one. loss: global mean of the step's objective. lr: the schedule's value.
    Decisions: `lr_scale` (all groups) and `group_lr_scale` multiply the scheduled learning rate of this step alone;
    `skip` leaves the weights untouched for this step, `stop` ends the run before they are touched; both hold a reason.
    """

    step: int
    total_steps: int
    loss: float = 0.0
    lr: float = 0.0
    seed: int = 0
    lr_scale: float = 1.0
    group_lr_scale: dict[str, float] = field(default_factory=dict)
    skip: str | None = None
    stop: str | None = None

    def is_late(self, after: float = 0.9) -> bool:
        """Tell whether the step lies in the last part of the run: step > after * total_steps."""
        return self.step > after * self.total_steps

    def scaled_lr(self, group: str = "default") -> float:
        """Return this step's learning rate for a parameter group whose scheduled value is `lr`."""
        return self.lr * self.lr_scale * self.group_lr_scale.get(group, 1.0)


class GradientPolicy(Protocol):
    """See, and possibly change, the reduced gradient once per optimizer step.

    Decisions must come from the floats that `Gradients` returns (equal on all ranks), the context and own state.
    State is plain JSON. The report's keys begin with "grad/". `reads` names what it always asks of the untouched
    gradient ("norm", "mean_abs"), so that a chain takes everything by one collective and one read on the host; a
    statistic that is not named there still works, by itself.
    """

    name: ClassVar[str]
    reads: tuple[str, ...] = ()

    def observe(self, gradients: Gradients, context: StepContext) -> None:
        """Look at the gradient before any policy has changed it; called on all policies first."""
        return None

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Act, and report what was seen and done."""
        ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(
                f"the gradient policy {self.name} keeps no state but the checkpoint holds {sorted(state)}"
            )


Watch = Callable[[Gradients, StepContext], Report]


class GradientPolicyChain:
    """Apply gradient policies in order; the first that skips or stops ends the step's chain.

    With an empty chain nothing is measured. All ranks call `apply` together. `watch`, if given, sees the untouched
    gradient first, on all ranks, and has no state: with or without it, a run and its checkpoints are the same.
    """

    def __init__(self, policies: Sequence[GradientPolicy], watch: Watch | None = None) -> None:
        self.policies = list(policies)
        self.watch = watch
        self.skipped_total = 0

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Run the chain once; return the merged reports. Act on `context` afterwards."""
        gradients.measure(*(statistic for policy in self.policies for statistic in policy.reads))
        report: Report = {} if self.watch is None else self.watch(gradients, context)
        for policy in self.policies:
            policy.observe(gradients, context)
        for policy in self.policies:
            found = policy.apply(gradients, context)
            # the step's norm is the first one measured: later policies see what earlier ones left
            report |= {
                key: value
                for key, value in found.items()
                if key != "grad_norm" or key not in report
            }
            if context.skip or context.stop:
                break
        gradients.refresh()
        if self.policies:
            self.skipped_total += context.skip is not None
            report["grad/lr_scale"] = context.lr_scale
            report["grad/skipped"] = float(context.skip is not None)
            report["grad/skipped_total"] = float(self.skipped_total)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return {"skipped_total": n, "policies": [{"name": .., "state": ..}, ..]}, plain JSON."""
        policies = [{"name": p.name, "state": p.state_dict()} for p in self.policies]
        return {"skipped_total": self.skipped_total, "policies": policies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; ValueError if the checkpoint's chain consists of other policies."""
        saved, ours = [p["name"] for p in state["policies"]], [p.name for p in self.policies]
        if saved != ours:
            raise ValueError(
                f"the checkpoint's gradient policies are {saved} but this run has {ours}; "
                "use the same [gradients] section"
            )
        self.skipped_total = int(state["skipped_total"])
        for policy, entry in zip(self.policies, state["policies"]):
            policy.load_state_dict(entry["state"])


class Scoped(GradientPolicy):
    """Let a gradient policy see and change only the parameters of some groups; its report moves to grad/<groups>/..."""

    name: ClassVar[str] = "scoped"

    def __init__(self, policy: GradientPolicy, groups: Sequence[str]) -> None:
        if not groups:
            raise ValueError("groups is empty but must name at least one parameter group")
        self.policy = policy
        self.reads = policy.reads
        self.groups = tuple(groups)

    def observe(self, gradients: Gradients, context: StepContext) -> None:
        self.policy.observe(gradients.scoped(self.groups), context)

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        inner = replace(context, lr_scale=1.0, group_lr_scale={})
        report = self.policy.apply(gradients.scoped(self.groups), inner)
        context.skip, context.stop = inner.skip, inner.stop
        if inner.lr_scale != 1.0:
            for group in self.groups:
                context.group_lr_scale[group] = (
                    context.group_lr_scale.get(group, 1.0) * inner.lr_scale
                )
        label = "+".join(self.groups)
        return {
            key.replace("grad_norm", "grad/norm").replace("grad/", f"grad/{label}/", 1): value
            for key, value in report.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.policy.name,
            "groups": list(self.groups),
            "state": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["name"], tuple(state["groups"])) != (self.policy.name, self.groups):
            raise ValueError(
                f"the checkpoint scopes {state['name']} to {state['groups']} but this run {self.policy.name} to "
                f"{list(self.groups)}; use the same [gradients] section"
            )
        self.policy.load_state_dict(state["state"])


def is_finite_step(gradients: Gradients, context: StepContext) -> bool:
    """Tell whether the loss and the gradient norm are finite, on every rank alike."""
    return math.isfinite(context.loss) and math.isfinite(gradients.norm())


def explain_non_finite(gradients: Gradients, context: StepContext) -> str:
    """Say in one sentence what is not finite: the loss, elements (naming up to three parameters), or only the norm."""
    parts = []
    if not math.isfinite(context.loss):
        parts.append(f"the loss is {context.loss}")
    if not math.isfinite(gradients.norm()):
        counts = gradients.nonfinite_counts().tolist()
        found = [(name, int(count)) for name, count in zip(gradients.names, counts) if count]
        if found:
            named = ", ".join(name for name, _ in found[:3]) + (
                f" and {len(found) - 3} more" if len(found) > 3 else ""
            )
            parts.append(
                f"{sum(count for _, count in found)} gradient elements are inf or nan, in {named}"
            )
        else:
            parts.append("the gradient norm overflows float32, though every element is finite")
    return f"step {context.step + 1}: " + " and ".join(parts)  # counted as in metrics.jsonl
