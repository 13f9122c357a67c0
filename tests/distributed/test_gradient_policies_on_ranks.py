"""Gradient policies over real processes: partitions of odd shapes give what one process gives."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.fake_ranks import context, parameters, slices
from tests.harness import device, run_distributed
from ulysses.gradients import Gradients, TorchGradients, build_chain

SHAPES = {"embed": (11, 7), "wide": (450, 300), "norm": (9,), "one": (1,)}
ALL = [
    {"policy": "skip_non_finite"},
    {"policy": "gradient_noise", "ratio": 0.1},
    {"policy": "scale_small_gradients", "threshold": 0.5, "factor": 1.5},
    {"policy": "gradient_centralization"},
    {"policy": "adaptive_gradient_clipping", "clipping": 0.5},
    {"policy": "clip_mean_abs", "limit": 0.3},
    {"policy": "boost_learning_rate"},
    {"policy": "clip_global_norm", "max_norm": 1.0},
]


def gradients_of(step):
    named = parameters(SHAPES, seed=step, scale=0.1 if step % 2 else 1.0)
    for p in named.values():
        p.data, p.grad = p.data.to(device()), p.grad.to(device())
    if dist.get_world_size() == 1:  # noise is drawn alike on devices of one type only, so this runs there too
        return TorchGradients(named.items())

    def all_reduce(tensor, op):
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return tensor

    return Gradients(slices(named, dist.get_rank(), dist.get_world_size()), all_reduce)


def steps(policies, bad_rank=None):
    chain, out = build_chain(policies), []
    for step in range(3):
        view, ctx = gradients_of(step), context(step)
        if bad_rank == dist.get_rank() and step == 1:
            view.entries[1].grad[5] = math.nan
        report = chain.apply(view, ctx)
        out.append(([(e.start, e.grad) for e in view], report, (ctx.lr_scale, ctx.skip, ctx.stop)))
    return out


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policies", [ALL, "ulysses-pro", "steady"], ids=["all", "pro", "steady"])
def test_partitioned_equals_whole(world, policies):
    ranks, (alone,) = (run_distributed(steps, size, policies) for size in (world, 1))
    for step, (gradients, report, decided) in enumerate(alone):
        for pieces, their_report, decisions in (rank[step] for rank in ranks):
            assert decisions == decided
            assert their_report == pytest.approx(report, rel=1e-5, abs=1e-9)
            for (start, piece), (_, whole) in zip(pieces, gradients, strict=True):
                atol = 1e-6 * float(whole.abs().max())
                torch.testing.assert_close(piece, whole[start : start + piece.numel()], rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("preset", "word"), [("default", "stop"), ("steady", "skip")])
def test_a_nan_on_one_rank_is_everyones_decision(preset, word):
    for rank in run_distributed(steps, 2, preset, bad_rank=1):
        scale, skip, stop = rank[1][2]
        reason, other = (stop, skip) if word == "stop" else (skip, stop)
        assert reason == "step 2: 1 gradient elements are inf or nan, in wide" and other is None and scale == 1
        assert rank[2][2][1:] == (None, None)
