"""Several gradient policies in order, built from a preset or from the tables of a configuration file.

    measure (once for all policies) -> apply (in order; each policy sees what the one before it left)

The chain acts once per optimizer step on the accumulated, averaged gradient, just before the optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import (
    ClipGlobalNorm,
    GradientPolicy,
    Report,
    StepContext,
    StopOnNonFinite,
)


class GradientPolicyChain:
    """Apply gradient policies in order; the first one that skips or stops ends the chain of this step.

    All ranks call `apply` together. `reads` are the statistics that it asks for, by their names in Gradients.measure.
    """

    def __init__(self, policies: Sequence[GradientPolicy]) -> None:
        self.policies = list(policies)
        self.reads = ["norm", *(name for policy in self.policies for name in policy.reads)]
        self.skipped_total = 0

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Run the chain once and return the merged reports; act on `context` afterwards."""
        gradients.begin_to_measure(*self.reads)
        report = {"grad_norm": gradients.norm()}
        for policy in self.policies:
            report |= policy.apply(gradients, context)
            if context.skip or context.stop:
                break
        skipped = 0 if context.skip is None else 1
        self.skipped_total += skipped
        return report | {
            "grad/lr_scale": context.lr_scale,
            "grad/skipped": float(skipped),
            "grad/skipped_total": float(self.skipped_total),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return {"skipped_total": n, "policies": [{"name": .., state of the policy}, ..]}, plain JSON."""
        policies = [{"name": p.name} | p.state_dict() for p in self.policies]
        return {"skipped_total": self.skipped_total, "policies": policies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; ValueError if the checkpoint's chain consists of other policies."""
        saved, ours = [p["name"] for p in state["policies"]], [p.name for p in self.policies]
        if saved != ours:
            raise ValueError(
                f"the checkpoint's gradient policies are {saved} but this run has {ours}; "
                "use the same [gradients] section"
            )
        self.skipped_total = state["skipped_total"]
        for policy, entry in zip(self.policies, state["policies"]):
            policy.load_state_dict(entry)


def _skipping() -> ModuleType:
    import ulysses.gradients.skipping as skipping

    return skipping


def _pro() -> ModuleType:
    import ulysses.gradients.ulysses_pro as ulysses_pro

    return ulysses_pro


# The policies that a configuration may name. Only the first two are imported before one is named.
GRADIENT_POLICIES: dict[str, Callable[[], type[GradientPolicy]]] = {
    "stop_on_non_finite": lambda: StopOnNonFinite,
    "clip_global_norm": lambda: ClipGlobalNorm,
    "skip_non_finite": lambda: _skipping().SkipNonFinite,
    "skip_spike": lambda: _skipping().SkipSpike,
    "gradient_noise": lambda: _pro().GradientNoise,
    "gradient_centralization": lambda: _pro().GradientCentralization,
    "scale_small_gradients": lambda: _pro().ScaleSmallGradients,
    "boost_learning_rate": lambda: _pro().BoostLearningRate,
    "ulysses_pro": lambda: _pro().UlyssesPro,
}
PRESETS = {"default": "clip_global_norm", "ulysses-pro": "ulysses_pro"}


def build_chain(
    policies: str | Sequence[Mapping[str, Any]], max_norm: float = 1.0
) -> GradientPolicyChain:
    """Build a chain from a preset's name, or from tables such as {"policy": "skip_spike", "sigma": 6.0}.

    default: clip to max_norm. ulysses-pro: see UlyssesPro. Both stop on non-finite gradients.

    A table holds the policy's name and its constructor's arguments. A list without a policy for non-finite gradients
    gets StopOnNonFinite in front. `max_norm` is where a preset clips; 0 does not clip.
    Raises ValueError naming the table and the key that cannot be honoured.
    """
    if isinstance(policies, str):
        if policies not in PRESETS:
            raise ValueError(f"the preset is {policies!r} but must be {' or '.join(PRESETS)}")
        policies = [{"policy": PRESETS[policies], "max_norm": max_norm}]
    chain = [_build_policy(index, table) for index, table in enumerate(policies)]
    if not {"stop_on_non_finite", "skip_non_finite"} & {policy.name for policy in chain}:
        chain.insert(0, StopOnNonFinite())
    return GradientPolicyChain(chain)


def _build_policy(index: int, table: Mapping[str, Any]) -> GradientPolicy:
    settings = dict(table)
    name = settings.pop("policy", None)
    try:
        if name not in GRADIENT_POLICIES:
            raise ValueError(
                f"policy is {name!r} but must be one of {', '.join(GRADIENT_POLICIES)}"
            )
        policy_class = GRADIENT_POLICIES[name]()
        setting_names = [f.name for f in fields(policy_class) if f.init]
        for key in settings.keys() - setting_names:
            raise ValueError(
                f"{name} has no setting {key!r}; it has {', '.join(setting_names) or 'none'}"
            )
        return policy_class(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"gradients.policies[{index}]: {error}") from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"gradients: {name} needs {error.name}, which is not part of this installation"
        ) from None
