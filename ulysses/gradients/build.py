"""Turn configuration tables into gradient policies.

[[gradients.policies]]
policy = "gradient_noise"            # the name, then the class's own arguments
sigma = 1e-4
when = { mean_abs_below = 1e-3 }     # optional: mean_abs_below/above, or norm_z_below/above (with decay, warmup)
late = { sigma = 1e-5 }              # optional: other arguments once step > late_after x total, or "off"
groups = ["policy"]                  # optional: only these parameter groups
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ulysses.gradients.adaptive_gradient_clipping import AdaptiveGradientClipping
from ulysses.gradients.auto_clip import AutoClip
from ulysses.gradients.boost_learning_rate import BoostLearningRate
from ulysses.gradients.chain import GradientPolicy, GradientPolicyChain, Scoped
from ulysses.gradients.clip_global_norm import ClipGlobalNorm
from ulysses.gradients.clip_mean_abs import ClipMeanAbs
from ulysses.gradients.conditions import Condition, MeanAbs, NormZ, When
from ulysses.gradients.gradient_centralization import GradientCentralization
from ulysses.gradients.gradient_noise import GradientNoise
from ulysses.gradients.non_finite import SkipNonFinite, StopOnNonFinite
from ulysses.gradients.scale_small_gradients import ScaleSmallGradients
from ulysses.gradients.skip_spike import SkipSpike
from ulysses.gradients.zclip import ZClip

GRADIENT_POLICIES: tuple[type[GradientPolicy], ...] = (
    StopOnNonFinite,
    SkipNonFinite,
    ClipGlobalNorm,
    SkipSpike,
    ZClip,
    AutoClip,
    AdaptiveGradientClipping,
    GradientCentralization,
    GradientNoise,
    ScaleSmallGradients,
    BoostLearningRate,
    ClipMeanAbs,
)
_WRAPPING = ("when", "late", "late_after", "groups")
_CONDITION_KEYS = (
    "mean_abs_below",
    "mean_abs_above",
    "norm_z_below",
    "norm_z_above",
    "decay",
    "warmup",
)


def build_chain(tables: Sequence[Mapping[str, Any]]) -> GradientPolicyChain:
    """Build the chain of `[[gradients.policies]]` tables; ValueError names the table and key that cannot be honoured.

    A chain that says nothing about non-finite gradients gets StopOnNonFinite in front.
    """
    policies = [_named(index, table) for index, table in enumerate(tables)]
    guards = (StopOnNonFinite.name, SkipNonFinite.name)
    if not any(t.get("policy") in guards and not (t.keys() & set(_WRAPPING)) for t in tables):
        policies.insert(0, StopOnNonFinite())
    return GradientPolicyChain(policies)


def build_policy(table: Mapping[str, Any]) -> GradientPolicy:
    """Build one gradient policy, with its condition, late behaviour and scope."""
    name = table.get("policy")
    kind = next((k for k in GRADIENT_POLICIES if k.name == name), None)
    if kind is None:
        known = [k.name for k in GRADIENT_POLICIES]
        raise ValueError(
            f"policy is {name!r}{_hint(str(name), known)} but must be one of {', '.join(known)}"
        )
    arguments = {k: v for k, v in table.items() if k != "policy" and k not in _WRAPPING}
    policy = _construct(kind, arguments)
    late: GradientPolicy | str | None = table.get("late")
    if isinstance(late, Mapping):
        late = _construct(kind, arguments | dict(late))
    if table.get("when") is not None or late is not None:
        condition = None if table.get("when") is None else build_condition(table["when"])
        policy = When(policy, condition, late, table.get("late_after", 0.9))
    elif "late_after" in table:
        raise ValueError("late_after is set but late is missing; say what changes late in the run")
    if table.get("groups") is not None:
        if isinstance(table["groups"], str):
            raise ValueError(
                f"groups is {table['groups']!r} but must be a list of parameter groups"
            )
        policy = Scoped(policy, table["groups"])
    return policy


def build_condition(table: Mapping[str, Any]) -> Condition:
    """Build a `when` table: mean_abs_below / mean_abs_above, or norm_z_below / norm_z_above with decay and warmup."""
    for key in table:
        if key not in _CONDITION_KEYS:
            raise ValueError(
                f"when has no {key!r}{_hint(key, _CONDITION_KEYS)}; it knows {', '.join(_CONDITION_KEYS)}"
            )
    absolute = {
        k.removeprefix("mean_abs_"): v for k, v in table.items() if k.startswith("mean_abs_")
    }
    relative = {
        k.removeprefix("norm_z_"): v for k, v in table.items() if not k.startswith("mean_abs_")
    }
    if absolute and relative:
        raise ValueError(
            f"when mixes {', '.join(table)} but must use either mean_abs_* or norm_z_*"
        )
    return MeanAbs(**absolute) if absolute else NormZ(**relative)


def _named(index: int, table: Mapping[str, Any]) -> GradientPolicy:
    try:
        return build_policy(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"gradients.policies[{index}]: {error}") from None


def _construct(kind: type[GradientPolicy], arguments: Mapping[str, Any]) -> GradientPolicy:
    known = [p for p in inspect.signature(kind).parameters if p not in ("args", "kwargs")]
    for key in arguments:
        if key not in known:
            listed = ", ".join(known) or "no settings"
            raise ValueError(
                f"{kind.name} has no {key!r}{_hint(key, [*known, *_WRAPPING])}; it knows {listed}"
            )
    return kind(**arguments)


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
