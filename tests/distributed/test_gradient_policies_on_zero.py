"""Every gradient policy on real ZeRO-3 partitions, with and without optimizer offload, against the whole gradient.

A real step's gradient is gathered. Each policy is tried on copies of it, rescaled to vanish, to explode or to hold a
NaN: on the partitions, and on the whole gradient as one process holds it. Then a chain of several acts for good, and
AdamW changes the weights of both; the second step holds a NaN and is skipped. No matrix here fits the ranks: rows
straddle partitions, which end in padding.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.engine_case import SHAPE, Case, build_trainer
from tests.harness import run_distributed
from tests.zero_case import whole
from ulysses.gradients import GradientPolicyChain, Gradients, StepContext, build_chain
from ulysses.gradients.chain import GRADIENT_POLICIES
from ulysses.zero.update import ParameterGroup

ODD = replace(
    SHAPE,
    vocab_size=2501,
    hidden_size=27,
    intermediate_size=45,
    num_hidden_layers=1,
    head_dim=6,
)
LR = 1e-3
# so large an eps keeps AdamW from turning rounding into whole updates
BETAS, EPS = (0.9, 0.95), 1e-2
# mean |g|, the last one late in the run; nan: one bad element
TRIALS = [1.0, 1.2, 1e-5, math.nan, 30.0, 1e-5]

SETTINGS = {
    "skip_spike": {"warmup": 2, "window": 4, "sigma": 3.0},
    "gradient_noise": {"ratio": 0.5},
    "scale_small_gradients": {"threshold": 0.5},
    "ulysses_pro": {"max_norm": 0.5},
}
CASES = {name: [{"policy": name} | SETTINGS.get(name, {})] for name in GRADIENT_POLICIES}
CASES["default"] = "default"
CASES["absolute"] = [{"policy": "gradient_noise", "sigma": 1e-6}]
FOR_GOOD = [  # what the optimizer sees
    {"policy": "skip_non_finite"},
    {"policy": "gradient_noise", "ratio": 0.1},
    {"policy": "gradient_centralization"},
    {"policy": "boost_learning_rate", "factor": 1.5},
    {"policy": "clip_global_norm", "max_norm": 0.7},
]


def groups(model):
    """Two scopes."""
    scopes = {"policy": [], "value": []}
    for name, parameter in model.named_parameters():
        scopes["value" if "mlp" in name or "norm" in name else "policy"].append(parameter)
    return [ParameterGroup(members, scope=scope) for scope, members in scopes.items()]


def as_one_process(engine):
    """Return the step's gradient and weights, whole on every rank and on the same device (noise differs elsewhere)."""
    entries = engine.gradients().entries
    weights = {s.name: whole(s, s.state("master")) for s in engine.slices}
    return Gradients([replace(e, grad=whole(e, e.grad), start=0) for e in entries]), weights


def assert_equal(found, want, where, start=0):
    """Compare a slice with the whole tensor."""
    atol = 1e-6 * float(want[want.isfinite()].abs().max())
    part = want[start : start + found.numel()]
    how = {"rtol": 1e-6, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(found, part, **how, msg=f"{where}: ".__add__)


class AgainstWholeGradient(GradientPolicyChain):
    """Stands where the run's gradient policies stand."""

    def __init__(self, engine):
        super().__init__([])
        self.engine, self.acted = engine, set()
        self.for_good = build_chain(FOR_GOOD), build_chain(FOR_GOOD)
        self.weights = {}

    def apply(self, gradients, context):
        self.saved, masters = as_one_process(self.engine)
        if not self.weights:
            for name, policies in CASES.items():
                chains = build_chain(policies), build_chain(policies)
                for step, size in enumerate(TRIALS):
                    loss, last = 1.0 + 0.01 * step, len(TRIALS) - 1
                    trial = StepContext(step, last, loss=loss, lr=LR, seed=4)
                    self.compare(name, chains, size / self.saved.mean_abs(), trial)
            self.weights = {name: nn.Parameter(w) for name, w in masters.items()}
            weights = [*self.weights.values()]
            self.optimizer = torch.optim.AdamW(weights, betas=BETAS, eps=EPS, weight_decay=0.0)
        for name, master in masters.items():
            ours = self.weights[name].detach()
            assert_equal(master, ours, f"{name} before step {context.step}")
        factor, theirs = math.nan if context.step == 1 else 1.0, replace(context)
        report, plain = self.compare("for good", self.for_good, factor, context)
        for e in plain.entries:
            self.weights[e.name].grad = e.grad
        for group in self.optimizer.param_groups:
            group["lr"] = theirs.lr * 1.5
        if context.step != 1:
            self.optimizer.step()
        return report

    def compare(self, name, chains, factor, context):
        """Apply one chain to the partitions and one to the whole gradient; return the report, and the latter."""
        where, bad = f"{name}, step {context.step}", math.isnan(factor)
        theirs = replace(context)
        scale = 1.0 if bad else factor
        plain = Gradients([replace(e, grad=e.grad * scale) for e in self.saved.entries])
        if bad:
            plain.entries[-1].grad[-1] = math.nan
        before, view = [e.grad.clone() for e in plain.entries], self.engine.gradients()
        for e, values in zip(view.entries, before, strict=True):
            e.grad.copy_(values[e.start : e.start + e.grad.numel()])
        report, whole_report = chains[0].apply(view, context), chains[1].apply(plain, theirs)
        decisions = [(c.skip is None, c.stop is None, c.lr_scale) for c in (context, theirs)]
        # the same parameter is named
        assert decisions[0] == decisions[1] and (not bad or context == theirs), where
        assert set(report) == set(whole_report), where
        for key, value in whole_report.items():
            # a z-score divides by a small spread, which magnifies rounding
            rel = 1e-3 if key.endswith("_z") else 2e-6
            wanted = pytest.approx(value, rel=rel, abs=1e-9, nan_ok=True)
            assert report[key] == wanted, f"{where}: {key}"
        # what the optimizer would see
        for e, found, want in zip(view.entries, view.slices(), plain.slices(), strict=True):
            assert_equal(found, want, f"{where}: {e.name}", e.start)
        for s in self.engine.slices:
            padding = s.sub_group.gradient_sums().narrow(
                0, s.offset + s.shard.length, s.shard.size - s.shard.length
            )
            assert not padding.any(), f"{where}: padding was touched"
        edited = not bad and any(
            not torch.equal(e.grad, old) for e, old in zip(plain.entries, before)
        )
        if edited or decisions[0] != (True, True, 1.0):
            self.acted.add(name)
        return report, plain


def drive(engines):
    """Take three steps on this rank with each engine; return which policies acted."""
    acted = []
    for sp, offload, size in engines:
        raw = {"sub_group_size": size}
        engine = {"offload_optimizer": offload, "raw": raw, "groups": groups, "eps": EPS}
        trainer, _ = build_trainer(Case("sft", sp=sp, shape=ODD, steps=3, lr=LR, engine=engine))
        trainer.policies = chain = AgainstWholeGradient(trainer.engine)
        for _ in range(3):
            trainer.train_step()
        trainer.engine.destroy()
        acted.append(chain.acted)
    return acted


# by world: degree, with optimizer offload, and elements of the groups in which the optimizer updates
ENGINES = {
    1: [(1, False, 30_000), (1, True, 10**9)],
    4: [(1, False, 10**9), (2, True, 30_000)],
}


@pytest.mark.parametrize("world, engines", ENGINES.items())
def test_policies_do_the_same_to_partitions_and_to_the_whole_gradient(world, engines):
    for rank in run_distributed(drive, world, engines):
        # a policy that never acts proves nothing
        assert all(acted == {*CASES, "for good"} for acted in rank)
