"""Named chains of gradient policies, as the tables one would write by hand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

PRESETS = ("default", "steady", "ulysses-pro")
VANISHING = {"mean_abs_below": 1e-3}
EXPLODING = {"mean_abs_above": 5.0}


def preset_tables(name: str, max_norm: float = 1.0) -> list[dict[str, Any]]:
    """Return the `[[gradients.policies]]` tables of a preset; `max_norm` is `gradients.max_norm` (0: never clip).

    default: stop on non-finite gradients, clip to max_norm.
    steady (recommended): skip isolated non-finite steps and spikes, clip what stands out from the run's own recent
    norms, then clip to max_norm. Only relative triggers; on a healthy run little but the last clip acts.
    ulysses-pro: the multi-strategy handling of March 2025 with its absolute thresholds. From one measurement of mean
    |g| before any change: while vanishing, noise, scaling of small gradients, a boosted learning rate and
    centralization, in this order; when exploding, clipping. Reproduced for comparison; on large models its noise
    exceeds the gradient (see `explain_thresholds`).
    Raises ValueError on an unknown name.
    """
    clip = {"policy": "clip_global_norm", "max_norm": max_norm}
    if name == "default":
        return [{"policy": "stop_on_non_finite"}, clip]
    if name == "steady":
        return [
            {"policy": "skip_non_finite", "limit": 3},
            {"policy": "skip_spike", "sigma": 6.0, "window": 128, "warmup": 32},
            {"policy": "zclip", "threshold": 2.5, "decay": 0.97, "warmup": 25},
            clip,
        ]
    if name == "ulysses-pro":
        return [
            {"policy": "stop_on_non_finite"},
            {"policy": "gradient_noise", "sigma": 1e-4, "when": VANISHING, "late": {"sigma": 1e-5}},
            {
                "policy": "scale_small_gradients", "threshold": 1e-4, "factor": 1.5,
                "when": VANISHING, "late": {"factor": 1.1},
            },
            {"policy": "boost_learning_rate", "factor": 1.2, "when": VANISHING, "late": "off"},
            {"policy": "gradient_centralization", "when": VANISHING},
            clip | {"when": EXPLODING},
        ]  # fmt: skip
    raise ValueError(f"gradients.preset is {name!r} but must be one of {', '.join(PRESETS)}")


def tables_to_toml(tables: Sequence[Mapping[str, Any]]) -> str:
    """Render chain tables as TOML to copy and edit."""
    blocks = [
        "\n".join(["[[gradients.policies]]", *(f"{k} = {_toml(v)}" for k, v in t.items())])
        for t in tables
    ]
    return "\n\n".join(blocks) + "\n"


def preset_toml(name: str, max_norm: float = 1.0) -> str:
    """Render a preset as TOML to copy and edit."""
    return f'# the preset "{name}", written out\n{tables_to_toml(preset_tables(name, max_norm))}'


def explain_thresholds(tables: Sequence[Mapping[str, Any]], numel: int) -> list[str]:
    """Say what a chain's absolute thresholds mean for a model of `numel` trained elements; [] if it has none.

    Gaussian arithmetic: a gradient of norm 1 has mean |g| = sqrt(2 / pi) / sqrt(numel).
    """
    lines = []
    typical = math.sqrt(2 / math.pi / max(numel, 1))
    for table in tables:
        sigma = table.get("sigma") or math.sqrt(
            table.get("eta") or 0
        )  # annealed noise: of the first step
        if table.get("policy") == "gradient_noise" and sigma:
            ratio = sigma * math.sqrt(numel)
            line = f"gradient noise of sigma {sigma:g} on {numel:,} elements is {ratio:.3g} times a gradient of norm 1"
            lines.append(line + (": it drowns the gradient" if ratio >= 1 else ""))
    for key, word in (("mean_abs_below", "below"), ("mean_abs_above", "above")):
        for limit in sorted(
            {
                t["when"][key]
                for t in tables
                if isinstance(t.get("when"), Mapping) and key in t["when"]
            }
        ):
            lines.append(
                f"mean |g| of a gradient of norm 1 is about {typical:.2g} here; "
                f"the condition '{word} {limit:g}' changes at gradient norm {limit / typical:.3g}"
            )
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
