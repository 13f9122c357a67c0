"""Every gradient policy against its equation, on plain parameters and simulated partitions; chains and statistics."""

import json
import math
from itertools import combinations, zip_longest

import pytest
import torch
from torch import nn

from tests import ROOT
from tests.fake_ranks import LARGE, SHAPES, FakeWorld, act, grads_of, of_norm, parameters
from tests.memory_case import assert_same_gradients
from ulysses.gradients import (
    ClipGlobalNorm,
    GradientPolicyChain,
    StepContext,
    TorchGradients,
    build_chain,
)
from ulysses.gradients.gradients import Gradients, GradientSlice
from ulysses.gradients.policy import StopOnNonFinite
from ulysses.gradients.skipping import SkipNonFinite, SkipSpike
from ulysses.gradients.ulysses_pro import GradientNoise


def test_clip_global_norm_equals_torch():
    ours, theirs = parameters(scale=3.0), parameters(scale=3.0)
    report, _ = act(build_chain("default"), ours)
    total = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    assert_same_gradients(grads_of(ours), grads_of(theirs), 1e-6)
    assert report["grad_norm"] == pytest.approx(float(total)) and report["grad/clipped"] == 1
    for off in (0.0, 1e9):
        assert act(ClipGlobalNorm(off), theirs)[0] == {"grad/clip_factor": 1, "grad/clipped": 0}
        assert_same_gradients(grads_of(theirs), grads_of(ours), 1e-6)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_non_finite_stops_or_skips_naming_step_and_parameter(bad):
    named, policy = parameters(), SkipNonFinite(limit=2)
    named["mlp.weight"].grad[2, 3] = bad
    before, chain = grads_of(named), GradientPolicyChain([policy, ClipGlobalNorm(1e-3)])
    found = [act(chain, named, step)[1] for step in range(3)]
    assert found[0].skip == "step 1: 1 gradient elements are inf or nan, in mlp.weight"
    assert found[1].skip and not found[1].stop and "3 steps in a row" in found[2].stop
    # no later policy touched it
    torch.testing.assert_close(grads_of(named), before, equal_nan=True)
    act(policy, parameters())
    assert policy.consecutive == 0
    stop = StopOnNonFinite()
    assert act(stop, named, 17)[1].stop.startswith("step 18: 1 gradient elements")
    assert act(stop, parameters(), 5, math.nan)[1].stop == "step 6: the loss is nan"


def run_norms(policy, norms, losses=()):
    """Feed one-parameter gradients of given norms; return the reasons to skip and the norms left."""
    out = []
    for step, (norm, loss) in enumerate(zip_longest(norms, losses, fillvalue=1.0)):
        named = of_norm(norm)
        _, told = act(policy, named, step, loss)
        out.append((told.skip, float(named["p"].grad.norm())))
    return out


def test_skip_spike():
    wave = [1 + 0.1 * math.sin(i) for i in range(60)]

    def skips(norms, losses=()):
        reasons = run_norms(SkipSpike(warmup=16, window=32), norms, losses)
        return {step: reason for step, (reason, _) in enumerate(reasons) if reason}

    assert not skips(wave, wave)
    norm_spike = skips([*wave, 10.0, *wave])
    assert list(norm_spike) == [60] and "step 61: the gradient norm is 10" in norm_spike[60]
    assert "the loss is 9" in skips([1.0] * 61, [*wave, 9.0])[60]
    assert not skips([1.0, 1.1, 100.0])  # too early
    # a lasting change of level is accepted
    assert 119 not in skips([*wave, *(10 * w for w in wave)])


def test_noise_is_the_same_on_any_partitioning_and_different_elsewhere():
    def noise(size, seed=1, step=2):
        named, world = parameters(LARGE | SHAPES, scale=0.0), FakeWorld(size)
        context, policy = StepContext(step, total_steps=9, seed=seed), GradientNoise(sigma=1.0)
        world.run(lambda rank: policy.apply(world.view(named, rank), context))
        return grads_of(named)

    whole = noise(1)
    for size in (2, 3, 5):
        for name, value in noise(size).items():
            assert torch.equal(value, whole[name])
    flat = whole["wide.weight"].flatten()
    assert abs(flat.mean()) < 0.02 and abs(flat.std() - 1) < 0.02
    name = "norm.weight"
    others = [
        whole[name],
        flat[:9],
        flat[65_536:65_545],
        noise(1, step=3)[name],
        noise(1, seed=2)[name],
    ]
    assert not any(torch.equal(*two) for two in combinations(others, 2))


def test_noise_sizes():
    named = parameters(LARGE)
    before = named["wide.weight"].grad.clone()
    report, _ = act(GradientNoise(ratio=0.5), named)
    added = float((named["wide.weight"].grad - before).norm())
    assert added == pytest.approx(0.5 * float(before.norm()), rel=0.01)
    assert report["grad/noise_to_gradient"] == pytest.approx(0.5)


def test_scopes_are_clipped_separately():
    """As in PPO; the first scope's edit does not make the second one's norm be measured again."""
    named, world = parameters(), FakeWorld(2)
    before = {n: g.double() for n, g in grads_of(named).items()}
    scopes = {n: "value" if n in ("embed.weight", "norm.weight") else "policy" for n in named}
    report, wanted = world.act("default", 7.0, named=named, scopes=scopes), {}
    assert world.calls == 1
    for scope in ("policy", "value"):
        own = {n: g for n, g in before.items() if scopes[n] == scope}
        norm = math.hypot(*(float(g.norm()) for g in own.values()))
        names = [f"grad/{scope}/{what}" for what in ("norm", "clip_factor", "clipped")]
        assert norm > 7 and [report[n] for n in names] == pytest.approx([norm, 7 / norm, 1])
        wanted |= {n: g * 7 / norm for n, g in own.items()}
    assert_same_gradients(grads_of(named), wanted, 1e-6)


def test_state_survives_json_and_continues_exactly():
    tables = [{"policy": "skip_non_finite"}, {"policy": "skip_spike", "warmup": 4, "window": 8},
              {"policy": "clip_global_norm"}]  # fmt: skip
    norms = [math.nan if i in (8, 20) else 1 + 0.3 * math.sin(2 * i) for i in range(30)]

    def steps(chain, first, last):
        all_named = [(i, of_norm(norms[i])) for i in range(first, last)]
        return [repr((act(chain, named, i), named["p"].grad)) for i, named in all_named]

    whole, first, second = (build_chain(tables) for _ in range(3))
    steps(first, 0, 13)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert steps(second, 13, 30) == steps(whole, 0, 30)[13:] and second.skipped_total >= 2
    with pytest.raises(ValueError, match="the checkpoint's gradient policies are"):
        build_chain("default").load_state_dict(saved)


def test_chain_without_a_guard_gets_one_and_presets_have_theirs():
    def names(*given):
        return " ".join(
            policy.name for policy in build_chain([{"policy": p} for p in given]).policies
        )

    assert names() == "stop_on_non_finite"
    assert names("skip_spike") == "stop_on_non_finite skip_spike"
    assert names("skip_non_finite") == "skip_non_finite"
    assert [len(build_chain(name).policies) for name in ("default", "ulysses-pro")] == [2, 2]


def test_scaling_waits_for_the_optimizer_and_counts_in_every_statistic():
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    entries = [GradientSlice(n, g.shape, g, scope=n) for n, g in zip("ab", grads)]
    view = Gradients(entries)
    assert view.norm() == 13
    view.scale(0.5)
    view.scale(4.0, "b")
    assert torch.cat(grads).tolist() == [3, 4, 12]
    assert view.norm() == math.hypot(2.5, 24) and view.mean_abs() == (1.75 + 24) / 2
    assert view.factors == {"a": 0.5, "b": 2.0}
    # who changes the slices finds them multiplied
    assert [float(grad[0]) for grad in view.slices()] == [1.5, 24]
    assert view.factors == {"a": 1.0, "b": 1.0} and view.norm("a") == 2.5


def test_idle_gradient_policies_need_one_collective_together():
    """Presets and scopes included: nothing is measured twice, and nothing one by one."""
    tables = [
        {"policy": "skip_non_finite"}, {"policy": "skip_spike"}, {"policy": "ulysses_pro"},
        {"policy": "clip_global_norm", "max_norm": 1e6},
        {"policy": "scale_small_gradients", "threshold": 1e-30},
    ]  # fmt: skip
    named, world = parameters(), FakeWorld(2)
    before = grads_of(named)
    world.act(tables, named=named, scopes={"conv": "value"})
    assert world.calls == 1
    assert all(torch.equal(p.grad, before[n]) for n, p in named.items())


def test_what_was_measured_ahead_is_only_read_later():
    collectives = []

    def all_reduce(tensor):
        collectives.append(tensor)
        return 2 * tensor  # another rank has the same slices

    view = Gradients([GradientSlice("a", (2, 2), torch.tensor([3.0, 4.0]))], all_reduce)
    view.begin_to_measure("norm", "mean_abs")
    assert len(collectives) == 1
    view.scale(3.0)
    assert view.norm() == pytest.approx(3 * math.sqrt(50))
    assert view.mean_abs() == pytest.approx(3 * 14 / 4) and len(collectives) == 1
    view.begin_to_measure("norm")  # is remembered
    assert len(collectives) == 1
    view.slices()[0].zero_()  # what was measured is not so any more
    assert view.norm() == 0 and len(collectives) == 2


def test_plain_view_leaves_out_frozen_and_untouched_parameters():
    named = parameters({"a": (2, 3), "b": (2, 3), "c": (2, 3)})
    named["a"].requires_grad_(False)
    named["b"].grad = None
    named["c"].grad = torch.randn(3, 2).t()  # not contiguous
    view = TorchGradients(named.items())
    view.scale(0.0)
    assert [e.name for e in view.entries] == ["c"] and not named["c"].grad.any()
    sentence = "no parameter has a gradient; run the backward pass first"
    with pytest.raises(ValueError, match=sentence):
        TorchGradients([("a", named["a"])])
    rows = torch.nn.Embedding(3, 2, sparse=True)
    rows(torch.tensor([1])).sum().backward()
    sharded = torch.nn.Parameter(torch.ones(2))
    sharded.grad = torch.ones(2).as_subclass(type("DTensor", (torch.Tensor,), {}))
    for parameter in (rows.weight, sharded):
        with pytest.raises(ValueError, match="gradient of p is sharded or sparse but"):
            TorchGradients([("p", parameter)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_slices_are_summed_accurately(dtype):
    """torch's own CPU norm is off by parts in a thousand here."""
    p = nn.Parameter(torch.empty(40_000_003, dtype=dtype))
    p.grad = torch.empty_like(p).normal_()
    parts = [x.double() for x in p.grad.split(1 << 20)]
    norm, total = math.hypot(*(x.norm() for x in parts)), sum(x.abs().sum() for x in parts)
    found = (view := TorchGradients([("p", p)])).norm(), view.mean_abs()
    assert found == pytest.approx((norm, float(total) / len(p)), rel=1e-7)


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_setting_that_is_not_above_zero_is_refused(value):
    """A max_norm of nan did not clip, and said nothing."""
    said = f"max_norm is {value} but must be above 0"
    for policies in ("default", [{"policy": "clip_global_norm", "max_norm": value}]):
        with pytest.raises(ValueError, match=said):
            build_chain(policies, max_norm=value)


def test_the_documented_loop_obeys_a_policy_that_stops():
    _, text = (ROOT / "docs/gradients.md").read_text().split("```python\n")
    code = text.split("```")[0]
    exec(code, {})
    with pytest.raises(FloatingPointError, match="^step 1: the loss is nan"):
        exec(code.replace("torch.randn(4, 8)", "torch.full((4, 8), torch.nan)"), {})
