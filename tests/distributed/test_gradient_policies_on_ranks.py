"""Gradient policies over real processes: partitions of odd shapes give what one process gives."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import device, run_distributed
from ulysses.gradients import (
    Gradients,
    GradientSlice,
    StepContext,
    TorchGradients,
    build_chain,
    preset_tables,
)

SHAPES = {"embed": (11, 7), "wide": (450, 300), "norm": (9,), "one": (1,)}
ALL = [
    {"policy": "skip_non_finite"},
    {"policy": "gradient_noise", "ratio": 0.1},
    {"policy": "scale_small_gradients", "threshold": 0.5, "factor": 1.5},
    {"policy": "gradient_centralization"},
    {"policy": "adaptive_gradient_clipping", "clipping": 0.5},
    {"policy": "clip_mean_abs", "limit": 0.3},
    {"policy": "boost_learning_rate", "when": {"mean_abs_below": 0.5}},
    {"policy": "clip_global_norm", "max_norm": 1.0},
]


def parameters(step):
    g = torch.Generator().manual_seed(step)
    named = {}
    for name, shape in SHAPES.items():
        named[name] = nn.Parameter(torch.randn(shape, generator=g).to(device()))
        named[name].grad = ((0.1 if step % 2 else 1.0) * torch.randn(shape, generator=g)).to(device())
    return named


def partitioned(named):
    rank, world = dist.get_rank(), dist.get_world_size()

    def all_reduce(tensor, op):
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return tensor

    entries = []
    for name, p in named.items():
        size = -(-p.numel() // world)
        low, high = min(rank * size, p.numel()), min((rank + 1) * size, p.numel())
        piece = p.grad.view(-1)[low:high].clone()
        entries.append(GradientSlice(name, tuple(p.shape), p.numel(), piece, low, weight=p.detach().view(-1)[low:high]))
    return Gradients(entries, all_reduce)


def steps(tables, bad_rank=None):
    chain, out = build_chain(tables), []
    for step in range(3):
        view = partitioned(parameters(step))
        if bad_rank == dist.get_rank() and step == 1:
            view.entries[1].grad[5] = float("nan")
        context = StepContext(step, 100, loss=1.0, lr=1e-3, seed=4)
        report = chain.apply(view, context)
        pieces = {e.name: (e.start, e.grad) for e in view}
        out.append((pieces, report, (context.lr_scale, context.skip, context.stop)))
    return out


def steps_whole(tables):
    """The same on one rank that holds everything; noise is drawn alike on devices of one type only."""
    chain, out = build_chain(tables), []
    for step in range(3):
        named = parameters(step)
        context = StepContext(step, 100, loss=1.0, lr=1e-3, seed=4)
        report = chain.apply(TorchGradients(named.items()), context)
        out.append(({n: p.grad for n, p in named.items()}, report, (context.lr_scale, context.skip, context.stop)))
    return out


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "tables", [ALL, preset_tables("ulysses-pro"), preset_tables("steady")], ids=["all", "pro", "steady"]
)
def test_partitioned_equals_whole(world, tables):
    ranks = run_distributed(steps, world, tables)
    (alone,) = run_distributed(steps_whole, 1, tables)
    for step, (gradients, report, decided) in enumerate(alone):
        for pieces, their_report, decisions in (rank[step] for rank in ranks):
            assert decisions == decided
            assert their_report == pytest.approx(report, rel=1e-5, abs=1e-9)
            for name, (start, piece) in pieces.items():
                whole = gradients[name].view(-1)
                atol = 1e-6 * float(whole.abs().max())
                torch.testing.assert_close(piece, whole[start : start + piece.numel()], rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("preset", "word"), [("default", "stop"), ("steady", "skip")])
def test_a_nan_on_one_rank_is_everyones_decision(preset, word):
    for rank in run_distributed(steps, 2, preset_tables(preset), bad_rank=1):
        scale, skip, stop = rank[1][2]
        reason = stop if word == "stop" else skip
        assert reason == "step 2: 1 gradient elements are inf or nan, in wide"
        assert (stop if word == "skip" else skip) is None and scale == 1
        assert rank[2][2][1:] == (None, None)
