"""Every gradient policy against its equation, on plain torch parameters and on simulated partitions."""

import math
from itertools import combinations, zip_longest

import pytest
import torch
from torch import nn

from tests.fake_ranks import LARGE, SHAPES, FakeWorld, act, grads_of, of_norm, parameters
from tests.memory_case import assert_same_gradients
from ulysses.gradients import ClipGlobalNorm, GradientPolicyChain, StepContext, build_chain
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
