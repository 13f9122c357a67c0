"""Exact statistics of partitioned gradients, and the plain torch view."""

import math

import pytest
import torch
from torch import nn

from tests.fake_ranks import LARGE, SHAPES, FakeWorld, context, parameters
from ulysses.gradients import (
    Gradients,
    TorchGradients,
    build_chain,
    preset_tables,
)


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


def test_idle_gradient_policies_need_one_collective_together():
    """All of them at once, conditions and groups included: nothing is measured twice, and nothing one by one."""
    groups = {"mlp.weight": "value"}
    tables = [
        *preset_tables("steady", 1e6),
        *preset_tables("ulysses-pro"),
        {"policy": "gradient_noise", "sigma": 1.0, "when": {"norm_z_below": -3.0}},
        {"policy": "clip_mean_abs", "limit": 1e6, "groups": ["value"]},
        {"policy": "clip_global_norm", "max_norm": 1e6, "groups": ["default"]},
        {"policy": "auto_clip", "percentile": 100.0},
        {"policy": "scale_small_gradients", "threshold": 0.0},
    ]
    named = parameters(SHAPES)
    before = {n: p.grad.clone() for n, p in named.items()}
    world = FakeWorld(2)
    for report in world.run(lambda rank: build_chain(tables).apply(world.view(named, rank, groups), context())):
        value = named["mlp.weight"].grad.double().abs().mean().item()
        rest = torch.cat([p.grad.double().flatten() for n, p in named.items() if n != "mlp.weight"]).norm().item()
        assert report["grad/value/mean_abs"] == pytest.approx(value, rel=1e-6)
        assert report["grad/default/norm"] == pytest.approx(rest, rel=1e-6)
    assert world.calls == 1
    assert all(torch.equal(p.grad, before[n]) for n, p in named.items())
    # row norms are another matter: one more, and no edit where no row is too long
    rows = [{"policy": "adaptive_gradient_clipping", "clipping": 1e6}]
    world.run(lambda rank: build_chain(rows).apply(world.view(named, rank), context()))
    assert world.calls == 3
    assert all(torch.equal(p.grad, before[n]) for n, p in named.items())


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
