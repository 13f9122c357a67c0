"""Gradient policies on plain torch parameters, and the same on simulated partitions."""

import json
import math
import tomllib

import pytest
import torch
from torch import nn

from tests.fake_ranks import FakeWorld
from ulysses.gradients import (
    GRADIENT_POLICIES,
    PRESETS,
    AdaptiveGradientClipping,
    AutoClip,
    BoostLearningRate,
    ClipGlobalNorm,
    ClipMeanAbs,
    GradientCentralization,
    GradientNoise,
    GradientPolicyChain,
    Gradients,
    GradientSlice,
    MeanAbs,
    NormZ,
    ScaleSmallGradients,
    Scoped,
    SkipNonFinite,
    SkipSpike,
    StepContext,
    StopOnNonFinite,
    TorchGradients,
    When,
    ZClip,
    build_chain,
    build_condition,
    build_policy,
    explain_thresholds,
    gradient_table,
    preset_tables,
    preset_toml,
)

# rows of 7, 13 and 300 straddle any even split; one matrix is longer than two noise blocks; one vector has one element
SHAPES = {"embed.weight": (11, 7), "mlp.weight": (5, 13), "norm.weight": (9,), "conv": (3, 2, 5), "scalar": (1,)}
LARGE = {"wide.weight": (450, 300)}


def parameters(shapes, seed=0, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        made[name] = nn.Parameter(torch.randn(shape, generator=g).to(dtype))
        made[name].grad = (scale * torch.randn(shape, generator=g)).to(dtype)
    return made


def context(step=0, total=100, **kwargs):
    return StepContext(step=step, total_steps=total, **({"loss": 1.0, "lr": 1e-3, "seed": 3} | kwargs))


def grads_of(named):
    return {n: p.grad.clone() for n, p in named.items()}


def assert_same_gradients(got, want, rtol=1e-6):
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=1e-6 * float(want[name].abs().max()) + 1e-12)


# statistics


def literal_statistics(named):
    flat = torch.cat([p.grad.double().flatten() for p in named.values()])
    means = torch.stack([p.grad.double().abs().mean() for p in named.values()])
    return {
        "norm": flat.norm().item(),
        "mean_abs": means.mean().item(),
        "element_mean_abs": flat.abs().mean().item(),
        "max_abs": flat.abs().max().item(),
        "nonfinite_count": 0,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_statistics_are_exact_with_one_collective_each(size):
    named = parameters(SHAPES | LARGE)
    want = literal_statistics(named)
    norms = torch.stack([p.grad.double().norm() for p in named.values()])
    for name in want:
        world = FakeWorld(size)

        def measure(rank, name=name, world=world):
            view = world.view(named, rank)
            return getattr(view, name)(), getattr(view, name)()

        for first, second in world.run(measure):
            assert first == pytest.approx(want[name], rel=1e-6) and first == second
        assert world.calls == 1, name
    world = FakeWorld(size)
    for got in world.run(lambda rank: world.view(named, rank).parameter_norms()):
        torch.testing.assert_close(got, norms, rtol=1e-6, atol=0)


def test_statistics_follow_edits():
    named = parameters(SHAPES)
    view = TorchGradients(named.items())
    before = view.norm()
    assert not view.changed
    view.scale(2.0)
    assert view.changed and view.norm() == pytest.approx(2 * before)
    view.scale_parameters([0.0] * len(view))
    assert view.norm() == view.mean_abs() == view.max_abs() == 0
    calls = []
    engine = Gradients(list(view), refresh=lambda: calls.append(1))
    engine.refresh()
    engine.scale(1.0)
    engine.refresh()
    engine.refresh()
    assert calls == [1]
    with pytest.raises(ValueError, match="2 factors were given for 5 parameters"):
        view.scale_parameters([1.0, 1.0])


def test_plain_view_leaves_out_frozen_and_untouched_parameters():
    named = parameters({"a": (2, 3), "b": (2, 3), "c": (2, 3)})
    named["a"].requires_grad_(False)
    named["b"].grad = None
    named["c"].grad = torch.randn(3, 2).t()  # not contiguous
    view = TorchGradients(named.items())
    assert view.names == ["c"]
    view.scale(0.0)
    assert not named["c"].grad.any()


def test_bfloat16_gradients_are_measured_in_float32():
    named = {"a": nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))}
    named["a"].grad = torch.ones_like(named["a"])
    view = TorchGradients(named.items())
    assert view.element_mean_abs() == 1.0 and view.norm() == pytest.approx(math.sqrt(5000), rel=1e-6)


def test_large_slices_are_summed_accurately():
    """torch's own CPU norm is off by parts in a thousand here."""
    p = nn.Parameter(torch.empty(0))
    g = torch.Generator().manual_seed(0)
    p.data, p.grad = torch.empty(40_000_003), None
    p.grad = torch.empty(40_000_003).normal_(generator=g)
    view = TorchGradients([("p", p)])
    pieces = p.grad.split(1 << 20)
    assert view.norm() == pytest.approx(math.sqrt(sum(float(x.double().square().sum()) for x in pieces)), rel=1e-7)
    assert view.mean_abs() == pytest.approx(sum(float(x.double().abs().sum()) for x in pieces) / 40_000_003, rel=1e-7)


def test_no_parameters():
    view = Gradients([])
    assert view.norm() == 0 and len(view) == 0
    report = build_chain(preset_tables("default")).apply(view, context())
    assert report["grad/skipped"] == 0


# every policy, whole and partitioned


POLICIES = {
    "clip_global_norm": lambda: ClipGlobalNorm(0.5),
    "skip_non_finite": lambda: SkipNonFinite(),
    "stop_on_non_finite": lambda: StopOnNonFinite(),
    "skip_spike": lambda: SkipSpike(),
    "zclip": lambda: ZClip(warmup=2),
    "auto_clip": lambda: AutoClip(50),
    "adaptive_gradient_clipping": lambda: AdaptiveGradientClipping(0.3, exclude=("conv",)),
    "gradient_centralization": lambda: GradientCentralization(),
    "gradient_noise": lambda: GradientNoise(sigma=0.1),
    "scale_small_gradients": lambda: ScaleSmallGradients(0.8, 1.5),
    "boost_learning_rate": lambda: BoostLearningRate(1.2),
    "clip_mean_abs": lambda: ClipMeanAbs(0.3),
}


def test_every_policy_is_listed_here():
    assert set(POLICIES) == {k.name for k in GRADIENT_POLICIES}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_policies_do_the_same_on_any_partitioning(name, size):
    """Five steps, the fourth with a gradient ten times as large: gradients, reports, decisions and states agree."""

    def steps(view_of, policy):
        seen = []
        for step in range(5):
            named = parameters(SHAPES | LARGE, seed=step, scale=10.0 if step == 3 else 1.0)
            seen.append((named, context(step)))
        out = []
        for named, ctx in seen:
            chain = GradientPolicyChain([policy])
            report = chain.apply(view_of(named), ctx)
            out.append((named, report, ctx, policy.state_dict()))
        return out

    whole = steps(lambda named: TorchGradients(named.items()), POLICIES[name]())
    world = FakeWorld(size)
    shared = [parameters(SHAPES | LARGE, seed=s, scale=10.0 if s == 3 else 1.0) for s in range(5)]

    def one_rank(rank):
        policy, out = POLICIES[name](), []
        for step, named in enumerate(shared):
            ctx = context(step)
            out.append((GradientPolicyChain([policy]).apply(world.view(named, rank), ctx), ctx, policy.state_dict()))
        return out

    ranks = world.run(one_rank)
    for step, (named, report, ctx, state) in enumerate(whole):
        assert_same_gradients(grads_of(shared[step]), grads_of(named))
        for rank in ranks:
            for key, value in report.items():  # a z-score divides by a small spread, which magnifies rounding
                assert rank[step][0][key] == pytest.approx(value, rel=1e-4 if key.endswith("_z") else 1e-6, abs=1e-9)
            assert rank[step][1].lr_scale == ctx.lr_scale
            assert (rank[step][1].skip, rank[step][1].stop) == (ctx.skip, ctx.stop) == (None, None)
        assert all(r[step][2] == ranks[0][step][2] for r in ranks)
        json.dumps(state)


# single policies against their equations


def test_clip_global_norm_equals_torch():
    ours, theirs = parameters(SHAPES, scale=3.0), parameters(SHAPES, scale=3.0)
    report = ClipGlobalNorm(1.0).apply(TorchGradients(ours.items()), context())
    total = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    assert_same_gradients(grads_of(ours), grads_of(theirs))
    assert report["grad/norm"] == pytest.approx(float(total)) and report["grad/clipped"] == 1
    for off in (0.0, 1e9):
        untouched = parameters(SHAPES)
        before = grads_of(untouched)
        assert ClipGlobalNorm(off).apply(TorchGradients(untouched.items()), context())["grad/clipped"] == 0
        assert all(torch.equal(untouched[n].grad, before[n]) for n in before)
    with pytest.raises(ValueError, match="max_norm is -1"):
        ClipGlobalNorm(-1)


def test_default_chain_measures_once():
    """One collective, one host read: the check for non-finite values and clipping share the norm."""
    named = parameters(SHAPES)
    world = FakeWorld(2)
    world.run(lambda rank: build_chain(preset_tables("default")).apply(world.view(named, rank), context()))
    assert world.calls == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_stops_or_skips_naming_step_and_parameter(bad):
    named = parameters(SHAPES)
    named["mlp.weight"].grad[2, 3] = bad
    world = FakeWorld(4)
    contexts = [context(17) for _ in range(4)]
    world.run(lambda rank: build_chain(preset_tables("default")).apply(world.view(named, rank), contexts[rank]))
    for ctx in contexts:
        assert ctx.stop == "step 17: 1 gradient elements are inf or nan, in mlp.weight" and ctx.skip is None
    before = grads_of(named)
    policy = SkipNonFinite(limit=2)
    for attempt in range(3):
        ctx = context(attempt)
        chain = GradientPolicyChain([policy, ClipGlobalNorm(1e-3)])
        chain.apply(TorchGradients(named.items()), ctx)
        assert (ctx.skip is not None, ctx.stop is not None) == (attempt < 2, attempt == 2)
    assert "3 steps in a row" in ctx.stop
    torch.testing.assert_close(grads_of(named), before, equal_nan=True)  # no later policy touched it
    good = parameters(SHAPES)
    policy.apply(TorchGradients(good.items()), context())
    assert policy.consecutive == 0 and policy.total == 3
    loss = context(5, loss=float("nan"))
    StopOnNonFinite().apply(TorchGradients(good.items()), loss)
    assert loss.stop == "step 5: the loss is nan"


def test_norm_that_overflows_is_told_from_bad_elements():
    named = {"a": nn.Parameter(torch.zeros(4))}
    named["a"].grad = torch.full((4,), 1e30)
    ctx = context(2)
    StopOnNonFinite().apply(TorchGradients(named.items()), ctx)
    assert ctx.stop is None or "every element is finite" in ctx.stop
    assert math.isfinite(TorchGradients(named.items()).max_abs())


def run_norms(policy, norms, losses=None):
    """Feed one-parameter gradients of given norms; return contexts, the norms left, and reports."""
    out = []
    for step, norm in enumerate(norms):
        p = nn.Parameter(torch.zeros(4))
        p.grad = torch.full((4,), norm / 2)
        ctx = context(step, loss=losses[step] if losses else 1.0)
        report = policy.apply(TorchGradients([("p", p)]), ctx)
        out.append((ctx, float(p.grad.norm()), report))
    return out


def test_skip_spike():
    wave = [1 + 0.1 * math.sin(i) for i in range(60)]
    quiet = run_norms(SkipSpike(warmup=16, window=32), wave, wave)
    assert not any(ctx.skip for ctx, _, _ in quiet)
    norm_spike = run_norms(SkipSpike(warmup=16, window=32), [*wave, 10.0, *wave], [1.0] * 121)
    assert [i for i, (ctx, _, _) in enumerate(norm_spike) if ctx.skip] == [60]
    assert "step 60: the gradient norm is 10" in norm_spike[60][0].skip
    loss_spike = run_norms(SkipSpike(warmup=16, window=32), [1.0] * 61, [*wave, 9.0])
    assert "the loss is 9" in loss_spike[-1][0].skip
    early = run_norms(SkipSpike(warmup=16, window=32), [1.0, 1.1, 100.0])
    assert not any(ctx.skip for ctx, _, _ in early)
    level = run_norms(SkipSpike(warmup=16, window=32), [*wave, *(10 * w for w in wave)], [1.0] * 120)
    assert not level[-1][0].skip  # a lasting change of level is accepted
    with pytest.raises(ValueError, match="2 <= warmup <= window"):
        SkipSpike(window=4, warmup=8)


def test_zclip_equals_its_equation():
    norms = [1 + 0.2 * math.sin(3 * i) for i in range(40)]
    norms[30] = 5.0
    got = run_norms(ZClip(2.5, 0.9, warmup=10), norms)
    mean = sum(norms[:10]) / 10
    var = sum((x - mean) ** 2 for x in norms[:10]) / 10
    for i in range(10, 40):
        sd = math.sqrt(var) + 1e-6
        z = (norms[i] - mean) / sd
        target = mean + 2.5 / (z / 2.5) * sd if z > 2.5 else norms[i]
        assert got[i][1] == pytest.approx(target, rel=1e-5)
        mean = 0.9 * mean + 0.1 * target
        var = 0.9 * var + 0.1 * (target - mean) ** 2
    assert got[30][1] < 1.5 and got[31][1] == pytest.approx(norms[31], rel=1e-5)


def test_auto_clip_equals_its_equation():
    norms = [1.0, 3.0, 2.0, 10.0, 0.5]
    got = run_norms(AutoClip(50), norms)
    for i, (_, left, _) in enumerate(got):
        median = torch.tensor(norms[: i + 1], dtype=torch.float64).quantile(0.5).item()
        assert left == pytest.approx(min(norms[i], median), rel=1e-5)


def test_adaptive_gradient_clipping_equals_its_equation():
    named = parameters(SHAPES, scale=2.0)
    want = {}
    for name, p in named.items():
        w, g = p.detach().double(), p.grad.double()
        axes = tuple(range(1, w.dim())) if w.dim() > 1 else (0,)
        limit = 0.3 * w.square().sum(axes, keepdim=True).sqrt().clamp(min=1e-3)
        size = g.square().sum(axes, keepdim=True).sqrt()
        want[name] = g if name == "conv" else g * torch.minimum(torch.ones_like(size), limit / size)
    AdaptiveGradientClipping(0.3, exclude=("conv",)).apply(TorchGradients(named.items()), context())
    assert_same_gradients(grads_of(named), {n: t.float() for n, t in want.items()})
    bare = Gradients([GradientSlice("a", (2, 2), 4, torch.ones(4))])
    with pytest.raises(ValueError, match="carries no weights"):
        AdaptiveGradientClipping().apply(bare, context())


def test_centralization_equals_its_equation():
    named = parameters(SHAPES | LARGE)
    want = {
        n: p.grad - p.grad.mean(tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else p.grad.clone()
        for n, p in named.items()
    }
    removed = math.sqrt(sum(float((named[n].grad - want[n]).double().square().sum()) for n in want))
    report = GradientCentralization().apply(TorchGradients(named.items()), context())
    assert_same_gradients(grads_of(named), want, rtol=1e-5)
    assert report["grad/centered_norm"] == pytest.approx(removed, rel=1e-5)


def test_noise_is_the_same_on_any_partitioning_and_different_elsewhere():
    def noise(size, **key):
        named = parameters(LARGE | SHAPES)
        for p in named.values():
            p.grad.zero_()
        world = FakeWorld(size)
        world.run(lambda rank: world.view(named, rank).add_noise(1.0, **({"seed": 1, "step": 2} | key)))
        return grads_of(named)

    whole = noise(1)
    for size in (2, 3, 5):
        for name, value in noise(size).items():
            assert torch.equal(value, whole[name])
    flat = whole["wide.weight"].flatten()
    assert abs(flat.mean()) < 0.02 and abs(flat.std() - 1) < 0.02
    blocks = flat[: 2 * 65_536].view(2, -1)
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(noise(1, step=3)["norm.weight"], whole["norm.weight"])
    assert not torch.equal(noise(1, seed=2)["norm.weight"], whole["norm.weight"])
    assert not torch.equal(whole["norm.weight"], whole["embed.weight"].flatten()[:9])


def test_noise_sizes():
    named = parameters(LARGE)
    view = TorchGradients(named.items())
    norm, before = view.norm(), named["wide.weight"].grad.clone()
    report = GradientNoise(ratio=0.5).apply(view, context())
    added = float((named["wide.weight"].grad - before).norm())
    assert added == pytest.approx(0.5 * norm, rel=0.01) and report["grad/noise_to_gradient"] == pytest.approx(0.5)
    annealed = GradientNoise(eta=0.3).apply(TorchGradients(named.items()), context(step=9))
    assert annealed["grad/noise_sigma"] == pytest.approx(math.sqrt(0.3 / 10**0.55))
    for wrong in ({}, {"sigma": 1.0, "eta": 1.0}):
        with pytest.raises(ValueError, match="needs one of sigma, ratio or eta"):
            GradientNoise(**wrong)


def test_scale_small_gradients_and_clip_mean_abs():
    named = parameters(SHAPES)
    named["conv"].grad *= 1e-6
    before = grads_of(named)
    report = ScaleSmallGradients(1e-4, 1.5).apply(TorchGradients(named.items()), context())
    assert report == {"grad/scaled_parameters": 1.0}
    assert_same_gradients(grads_of(named), before | {"conv": 1.5 * before["conv"]})
    view = TorchGradients(named.items())
    ClipMeanAbs(0.1).apply(view, context())
    assert view.mean_abs() == pytest.approx(0.1)


# composition


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
