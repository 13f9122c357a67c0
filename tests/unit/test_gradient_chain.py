"""Gradient policies in company: scope, conditions, late behaviour, state, configuration, presets."""

import json
import math
import tomllib

import pytest
import torch
from torch import nn

from tests.fake_ranks import SHAPES, assert_same_gradients, context, grads_of, parameters
from ulysses.gradients import (
    PRESETS,
    BoostLearningRate,
    ClipGlobalNorm,
    GradientNoise,
    GradientPolicyChain,
    MeanAbs,
    NormZ,
    Scoped,
    TorchGradients,
    When,
    build_chain,
    build_condition,
    build_policy,
    explain_thresholds,
    gradient_table,
    preset_tables,
    preset_toml,
)


def test_scope_limits_sight_and_reach():
    named = parameters(SHAPES)
    groups = {"embed.weight": "value", "norm.weight": "value"}
    before = grads_of(named)
    value_norm = math.sqrt(sum(float(before[n].double().square().sum()) for n in groups))
    chain = GradientPolicyChain(
        [
            Scoped(ClipGlobalNorm(0.5), ["value"]),
            Scoped(BoostLearningRate(2.0), ["value"]),
            Scoped(ClipGlobalNorm(1e9), ["default"]),
        ]
    )
    ctx = context()
    report = chain.apply(TorchGradients(named.items(), groups), ctx)
    want = {n: g * (0.5 / (value_norm + 1e-6) if n in groups else 1.0) for n, g in before.items()}
    assert_same_gradients(grads_of(named), want)
    assert report["grad/value/norm"] == pytest.approx(value_norm, rel=1e-6) and report["grad/default/clipped"] == 0
    assert ctx.lr_scale == 1 and ctx.scaled_lr("value") == 2e-3 and ctx.scaled_lr("default") == 1e-3
    with pytest.raises(
        ValueError, match=r"parameter groups \['reward'\] hold no parameter; this run has default, value"
    ):
        Scoped(ClipGlobalNorm(), ["reward"]).apply(TorchGradients(named.items(), groups), context())


def test_conditions_judge_the_untouched_gradient():
    """Noise lifts mean |g| over the threshold, yet the policy behind it still acts."""
    named = parameters(SHAPES, scale=1e-5)
    chain = GradientPolicyChain(
        [When(GradientNoise(sigma=1.0), MeanAbs(below=1e-3)), When(BoostLearningRate(1.2), MeanAbs(below=1e-3))]
    )
    ctx = context()
    report = chain.apply(TorchGradients(named.items()), ctx)
    assert ctx.lr_scale == 1.2 and ctx.lr == 1e-3 and report["grad/active/boost_learning_rate"] == 1
    assert report["grad/mean_abs"] < 1e-3 < TorchGradients(named.items()).mean_abs()


def test_late_behaviour():
    def sigma(step, late):
        named = parameters(SHAPES)
        policy = When(GradientNoise(sigma=1.0), late=late)
        return GradientPolicyChain([policy]).apply(TorchGradients(named.items()), context(step)).get("grad/noise_sigma")

    assert [sigma(90, "off"), sigma(91, "off"), sigma(91, GradientNoise(sigma=0.5)), sigma(91, None)] == [
        1,
        None,
        0.5,
        1,
    ]
    with pytest.raises(ValueError, match="late is 'never'"):
        When(GradientNoise(sigma=1.0), late="never")


def judge(condition, norms):
    held = []
    for step, norm in enumerate(norms):
        p = nn.Parameter(torch.zeros(4))
        p.grad = torch.full((4,), norm / 2)
        held.append(condition.holds(TorchGradients([("p", p)]), context(step)))
    return held


def test_relative_condition():
    wave = [1 + 0.1 * math.sin(i) for i in range(50)]
    assert not any(judge(NormZ(below=-4, above=4), wave))
    assert not any(judge(NormZ(below=-4, above=4), [1e-9 * w for w in wave]))  # small but steady is not vanishing
    assert judge(NormZ(below=-4), [*wave, 0.01])[-1] and not any(judge(NormZ(below=-4), [*wave[:20], 0.01]))
    assert judge(NormZ(above=4), [*wave, 50.0])[-1]
    held = judge(NormZ(above=4), [*wave, float("nan"), float("inf"), *wave])
    assert not any(held)


def test_state_survives_json_and_continues_exactly():
    tables = [
        {"policy": "skip_non_finite"},
        {"policy": "skip_spike", "warmup": 4, "window": 8},
        {"policy": "zclip", "warmup": 4},
        {"policy": "auto_clip", "percentile": 80.0, "groups": ["default"]},
        {"policy": "boost_learning_rate", "when": {"norm_z_below": -1.0, "warmup": 4}},
    ]
    norms = [1 + 0.3 * math.sin(2 * i) for i in range(30)]
    norms[12] = norms[22] = 0.05  # boosted steps on both sides of the save

    def step(chain, i):
        p = nn.Parameter(torch.zeros(4))
        p.grad = torch.full((4,), norms[i] / 2)
        ctx = context(i)
        return chain.apply(TorchGradients([("p", p)]), ctx), ctx.lr_scale, p.grad.tolist()

    straight = build_chain(tables)
    want = [step(straight, i) for i in range(30)]
    first = build_chain(tables)
    for i in range(13):
        step(first, i)
    saved = json.loads(json.dumps(first.state_dict()))
    second = build_chain(tables)
    second.load_state_dict(saved)
    assert [step(second, i) for i in range(13, 30)] == want[13:]
    assert want[12][1] == want[22][1] == 1.2 and want[13][1] == 1.0
    with pytest.raises(ValueError, match="the checkpoint's gradient policies are"):
        build_chain(preset_tables("default")).load_state_dict(saved)
    with pytest.raises(ValueError, match="keeps no state"):
        ClipGlobalNorm().load_state_dict({"x": 1})


def test_chain_without_a_guard_gets_one():
    assert [p.name for p in build_chain([]).policies] == ["stop_on_non_finite"]
    assert [p.name for p in build_chain([{"policy": "zclip"}]).policies] == ["stop_on_non_finite", "zclip"]
    assert [p.name for p in build_chain([{"policy": "skip_non_finite"}]).policies] == ["skip_non_finite"]
    assert build_chain([{"policy": "skip_non_finite", "groups": ["value"]}]).policies[0].name == "stop_on_non_finite"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back_from_their_toml(name):
    assert tomllib.loads(preset_toml(name, 0.5))["gradients"]["policies"] == preset_tables(name, 0.5)
    build_chain(preset_tables(name, 0.5))


def test_steady_is_harmless_on_a_steady_run():
    chain, default = build_chain(preset_tables("steady")), build_chain(preset_tables("default"))
    for step in range(80):
        ours, theirs = (parameters(SHAPES, seed=step, scale=0.05) for _ in range(2))
        ctx = context(step, loss=2 + 0.05 * math.sin(step))
        report = chain.apply(TorchGradients(ours.items()), ctx)
        default.apply(TorchGradients(theirs.items()), context(step))
        assert ctx.skip is None and ctx.stop is None and ctx.lr_scale == 1
        if report["grad/zclip_factor"] == 1:
            assert_same_gradients(grads_of(ours), grads_of(theirs))
        assert report["grad/zclip_factor"] > 0.9


def test_thresholds_are_explained():
    lines = explain_thresholds(preset_tables("ulysses-pro"), 8_030_261_248)
    assert lines[0] == (
        "gradient noise of sigma 0.0001 on 8,030,261,248 elements is 8.96 times a gradient of norm 1: "
        "it drowns the gradient"
    )
    (annealed,) = explain_thresholds([{"policy": "gradient_noise", "eta": 1e-4}], 10**6)
    assert annealed.startswith("gradient noise of sigma 0.01 on 1,000,000 elements is 10 times a gradient of norm 1")
    assert "8.9e-06" in lines[1] and "'below 0.001' changes at gradient norm 112" in lines[1]
    assert explain_thresholds(preset_tables("steady"), 10**9) == []


def test_table_names_the_largest_the_smallest_and_the_broken():
    named = parameters({f"layer{i}": (4, 4) for i in range(30)})
    for i, p in enumerate(named.values()):
        p.grad.fill_(float(i + 1))
    named["layer7"].grad[0, 0] = float("nan")
    text = gradient_table(TorchGradients(named.items()), rows=2)
    lines = text.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["layer29", "layer28", "...", "layer1", "layer0", "layer7"]
    assert "1 of 16 elements are inf or nan" in lines[-1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"policy": "clip_global_nrom"}, r"policy is 'clip_global_nrom' \(did you mean 'clip_global_norm'\?\)"),
        ({"policy": "clip_global_norm", "max_nrom": 1.0}, r"has no 'max_nrom' \(did you mean 'max_norm'\?\)"),
        ({"policy": "gradient_centralization", "x": 1}, "has no 'x'; it knows no settings"),
        ({"policy": "zclip", "when": {"mean_abs": 1.0}}, "when has no 'mean_abs'"),
        ({"policy": "zclip", "when": {"mean_abs_below": 1.0, "norm_z_above": 2.0}}, "either mean_abs_"),
        ({"policy": "zclip", "when": {}}, "needs norm_z_below or norm_z_above"),
        ({"policy": "zclip", "late": "never"}, "late is 'never'"),
        ({"policy": "zclip", "late_after": 0.5}, "late is missing"),
        ({"policy": "zclip", "groups": []}, "groups is empty"),
        ({"policy": "zclip", "groups": "value"}, "groups is 'value' but must be a list"),
        ({"policy": "boost_learning_rate", "factor": 0}, "factor is 0"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        build_policy(table)
    with pytest.raises(ValueError, match=r"gradients\.policies\[1\]: "):
        build_chain([{"policy": "skip_non_finite"}, table])


def test_unknown_preset_and_condition():
    with pytest.raises(ValueError, match="must be one of default, steady, ulysses-pro"):
        preset_tables("pro")
    assert isinstance(build_condition({"norm_z_above": 3.0, "warmup": 5}), NormZ)
