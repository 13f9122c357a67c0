"""The preset "ulysses-pro" against a literal implementation on one process, whole and partitioned."""

import hashlib
import math
from itertools import product

import pytest
import torch

from tests.fake_ranks import FakeWorld, grads_of, parameters
from tests.memory_case import assert_same_gradients
from ulysses.gradients import StepContext, build_chain

STEPS, MAX_NORM, SEED = 50, 1.0, 11
SHAPES = {"embed": (37, 12), "wide": (300, 250), "norm": (10,), "proj": (6, 5, 2), "bias": (1,)}


def block_noise(name, numel, step):
    blocks = []
    for block in range(math.ceil(numel / 65_536)):
        key = hashlib.sha256(f"{SEED}:{step}:{name}:{block}".encode()).digest()[:8]
        g = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        blocks.append(torch.randn(65_536, generator=g))
    return torch.cat(blocks)[:numel]


def literal(named, lr, step):
    """The multi-strategy handling, written straight down; returns the step's learning rate."""
    grads = {n: p.grad for n, p in named.items()}
    mean_abs = sum(float(g.abs().double().mean()) for g in grads.values()) / len(grads)
    late = step > 0.9 * STEPS
    vanishing, exploding = mean_abs < 1e-3, mean_abs > 5.0
    if vanishing:
        for name, g in grads.items():
            g.add_((1e-5 if late else 1e-4) * block_noise(name, g.numel(), step).view_as(g))
        for g in grads.values():
            if float(g.abs().double().mean()) < 1e-4:
                g.mul_(1.1 if late else 1.5)
        if not late:
            lr = lr * 1.2
        for g in grads.values():
            if g.dim() > 1:
                g.sub_(g.mean(tuple(range(1, g.dim())), keepdim=True))
    if exploding:
        total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        if total > MAX_NORM:
            for g in grads.values():
                g.mul_(MAX_NORM / (total + 1e-6))
    return lr


def phase(step):
    """Vanishing in two strengths, normal, exploding, and all of them again in the last tenth."""
    return [*[1e-6, 3e-4, 1.0, 20.0, 1e-5] * 9, 1e-6, 1e-6, 1.0, 20.0, 3e-4][step]


def rate(step):
    return 1e-3 * (1 - step / STEPS)


def gradients_at(step):
    named = parameters(SHAPES, seed=100 + step, scale=phase(step))
    for name in ("wide", "proj"):  # so that at some steps only some parameters count as small
        named[name].grad *= 1e-2
    return named


@pytest.mark.parametrize("ranks", [1, 3])
def test_same_gradients_and_learning_rates_for_fifty_steps(ranks):
    world, ours = FakeWorld(ranks), [gradients_at(step) for step in range(STEPS)]

    def on_rank(rank):
        chain, out = build_chain("ulysses-pro", MAX_NORM), []
        for step, named in enumerate(ours):
            context = StepContext(step, STEPS, loss=1.0, lr=rate(step), seed=SEED)
            view = world.view(named, rank, {"wide": "value"})
            report = chain.apply(view, context)
            view.apply_factors()  # an optimizer would multiply while it reads
            out.append((context.lr * context.lr_scale, report))
        return out

    found, *others = world.run(on_rank)
    assert all(rank == found for rank in others)
    phases, scaled = set(), set()
    for step, (named, (lr, report)) in enumerate(zip(ours, found)):
        want = gradients_at(step)
        assert lr == pytest.approx(literal(want, rate(step), step), rel=1e-12), step
        assert_same_gradients(grads_of(named), grads_of(want), 1e-6)
        active = sorted(k for k, v in report.items() if k.startswith("grad/active/") and v)
        phases.add((step > 0.9 * STEPS, " ".join(active).replace("grad/active/", "")))
        scaled.add(report.get("grad/scaled_parameters"))
    vanishing = "gradient_centralization gradient_noise scale_small_gradients"
    assert phases == {
        (False, f"boost_learning_rate {vanishing}"), (True, vanishing),
        *product((False, True), ("", "clip_global_norm")),
    }  # fmt: skip
    assert len(scaled) > 2  # some steps scale all parameters, some only a few
