"""Exact statistics of partitioned gradients, and the plain torch view."""

import math

import pytest
import torch
from torch import nn

from tests.fake_ranks import FakeWorld, grads_of, parameters
from ulysses.gradients import TorchGradients
from ulysses.gradients.gradients import Gradients, GradientSlice


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_slices_are_summed_accurately(dtype):
    """torch's own CPU norm is off by parts in a thousand here."""
    p = nn.Parameter(torch.empty(40_000_003, dtype=dtype))
    p.grad = torch.empty_like(p).normal_()
    parts = [x.double() for x in p.grad.split(1 << 20)]
    norm, total = math.hypot(*(x.norm() for x in parts)), sum(x.abs().sum() for x in parts)
    found = (view := TorchGradients([("p", p)])).norm(), view.mean_abs()
    assert found == pytest.approx((norm, float(total) / len(p)), rel=1e-7)
