"""What the tests know of every stage, with a step from its formula: float64, one unpacked sequence at a time, no ZeRO.

A new stage has an entry in STAGE_CASES at the end; all tests that run over the stages read it there.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.dpo import dpo_loss
from models.decoder import CausalLM
from models.initial_weights import InitialWeights
from models.lora import is_adapter
from tests.engine_case import TEACHER, Case, trained
from tests.memory_case import assert_same_gradients
from tests.zero_case import filled
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh


def compared(case: Case, world: int, step: int = 0, **changes: Any) -> dict[str, float]:
    """Compare a step of `world` ranks with the formula, and return its metrics; `changes` are the ranks' alone."""
    loss, exact, expected = formula(case, step)
    metrics, gradients = trained(replace(case, **changes), world)
    assert metrics[step]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, value in expected.items():
        assert metrics[step][name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
    assert_same_gradients(gradients[step], exact)
    return metrics[step]


def formula(case: Case, step: int = 0) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and metrics of a step with the first weights."""
    plain = Formula(case, step)
    loss, metrics = STAGE_CASES[case.stage].formula(plain)
    loss.backward()
    trained = {
        n: p.grad
        for n, p in plain.model.named_parameters()
        if not case.lora_rank or is_adapter(n, case.lora_train)
    }
    return float(loss), trained, metrics


class Formula:
    """The examples of one step, and a method per stage that returns its loss and metrics."""

    def __init__(self, case: Case, step: int) -> None:
        self.options, self.data = case.options, case.data()
        dense = replace(case, quantize="none")
        self.model = filled(dense.model(None, attention="reference"), case.weights()).double()
        loader = StepLoader(self.data, case.examples, tokens_per_microbatch=10_000, seed=3)
        self.indices = loader.indices(0, step)
        self.examples = [self.data[i] for i in self.indices]

    def forward(self, s: Sequence, **more: Any) -> Any:
        return self.model(pack_shard([s], ParallelMesh(1), "cpu"), **more)

    def weights(self, s: Sequence) -> Tensor:
        return F.pad(s.loss_weights[1:].double(), (0, 1))

    def summed(self, s: Sequence) -> Tensor:
        return (self.forward(s).logps * self.weights(s)).sum()

    def reference(self, s: Sequence) -> Tensor:
        return (s.token_columns["reference_logps"].double() * self.weights(s)).sum()

    def sft(self) -> tuple[Tensor, dict[str, float]]:
        o, total, count, plain = self.options, 0.0, 0.0, 0.0
        smoothing = o.get("label_smoothing", 0.0)
        for s in (s for e in self.examples for s in e.sequences):
            out, w = self.forward(s, lse=True, mean_logit=True), self.weights(s)
            each = -out.logps
            plain = plain + float((each * w).sum())
            if o.get("loss_type") == "dft":
                each = out.logps.detach().exp() * each
            each = (1 - smoothing) * each + smoothing * (out.lse - out.mean_logit)
            total = total + ((each + o.get("z_loss", 0.0) * out.lse**2) * w).sum()
            count = count + w.sum()
        return total / count, {"nll": plain / float(count)}

    def distill(self) -> tuple[Tensor, dict[str, float]]:
        o, found = self.options, []
        teacher = filled(
            CausalLM(TEACHER, attention="reference"), InitialWeights(TEACHER, 7)
        ).double()
        beta, T = o.get("jsd_beta", 0.0), o.get("temperature", 1.0)
        for s in (s for e in self.examples for s in e.sequences):
            batch, w = pack_shard([s], ParallelMesh(1), "cpu"), self.weights(s)
            whole, wanted = (
                m(batch, project=False) @ m.lm_head.weight.T for m in (self.model, teacher)
            )
            words = whole.shape[-1]
            q, p = ((x[:, :words] / T).softmax(-1) for x in (wanted, whole))
            mixed = beta * q + (1 - beta) * p
            forward, to_mixed, reverse = (
                (a * (a / b).log()).sum(-1)
                for a, b in ((q, p if beta == 0 else mixed), (p, mixed), (p, q))
            )
            gap = {0.0: forward, 1.0: reverse}.get(beta, beta * forward + (1 - beta) * to_mixed)
            trained = w[w != 0]
            nll = -whole.log_softmax(-1).gather(1, s.tokens.roll(-1)[w != 0, None])[:, 0]
            found.append(torch.stack([(gap * trained).sum(), (nll * trained).sum(), w.sum()]))
        gap, nll, count = torch.stack(found).sum(0)
        loss = (gap + o.get("nll_weight", 0.0) * nll) / count
        return loss, {"divergence": float(gap / count), "nll": float(nll / count)}

    def rm(self) -> tuple[Tensor, dict[str, float]]:
        total, scores, gaps = 0.0, [], []
        for e in self.examples:
            found = [
                (self.forward(s)[-1], s.columns.get("rank", place))
                for place, s in enumerate(e.sequences)
            ]
            scores += [float(score) for score, _ in found]
            for (good, high), (bad, low) in product(found, repeat=2):
                if high < low:
                    total = total - F.logsigmoid(good - bad - e.columns["margin"])
                    total = (
                        total + self.options.get("center_coefficient", 0.0) * (good + bad) ** 2
                    )
                    gaps.append(float(good - bad))
        flat, difference = np.array(scores), np.array(gaps)
        return total / len(gaps), {
            "accuracy": (difference > 0).mean(),
            "margin": difference.mean(),
            "mean_reward": flat.mean(),
            "std_reward": flat.std(),
        }

    def dpo(self) -> tuple[Tensor, dict[str, float]]:
        o, total, nll, trained = dict(self.options), 0.0, 0.0, 0.0
        alpha, sft_weight, pairs = o.pop("ld_alpha", 1.0), o.pop("sft_weight", 0.0), []
        for e in self.examples:
            lengths = [self.weights(s).sum()[None] for s in e.sequences]
            nll, trained = nll - self.summed(e.sequences[0]), trained + lengths[0]
            shorter = min(int((s.loss_weights[1:] != 0).sum()) for s in e.sequences)
            sides = [
                replace(s, loss_weights=decayed(s.loss_weights, shorter, alpha))
                for s in e.sequences
            ]
            logps = [f(s)[None] for f in (self.summed, self.reference) for s in sides]
            pairs.append([*logps, *lengths])
        logps, lengths = (
            (columns := [torch.cat(column) for column in zip(*pairs)])[:4],
            columns[4:],
        )
        total = dpo_loss(*logps, chosen_lengths=lengths[0], rejected_lengths=lengths[1], **o)[
            0
        ].sum()
        loss = total / len(self.examples) + sft_weight * (nll / trained).sum()
        return loss, {"nll/chosen": float(nll / trained)} if sft_weight else {}

    def kto(self) -> tuple[Tensor, dict[str, float]]:
        o, order, prompts, gaps = self.options, self.indices, self.data.columns["prompt_id"], []
        for p, i in enumerate(order):
            j = next(n for n in order[p + 1 :] + order[:p] if prompts[n] != prompts[i])
            with torch.no_grad():
                s = self.data.mismatch(i, j)
                gaps.append(float(self.summed(s) - self.reference(s)))
        free = o.get("loss_type") == "apo_zero_unpaired"
        z0 = 0.0 if free else max(0.0, sum(gaps) / len(gaps))
        beta, total, rewards = o.get("beta", 0.1), 0.0, {"chosen": [], "rejected": []}
        for e in self.examples:
            good = e.columns["label"] == 1
            r = self.summed(e.sequences[0]) - self.reference(e.sequences[0])
            rewards["chosen" if good else "rejected"].append(beta * float(r))
            weight = o.get("desirable_weight" if good else "undesirable_weight", 1.0)
            total = total + weight * (1 - torch.sigmoid(beta * (r - z0 if good else z0 - r)))
        metrics = {
            f"rewards/{side}": float(np.mean(values))
            for side, values in rewards.items()
            if values
        }
        return total / len(self.examples), metrics if free else metrics | {"kl": z0}


def decayed(weights: Tensor, shorter: int, alpha: float) -> Tensor:
    out, seen = weights.clone(), 0
    for t in range(1, len(out)):
        if out[t] != 0:
            out[t] *= 1.0 if seen < shorter else alpha
            seen += 1
    return out


class StageCase(NamedTuple):
    """One stage.

    rate: its default learning rate.
    formula: returns loss and metrics of a step; a file instead, if the stage's own test there compares it.
    options: settings with which it is compared on every topology.
    every_term: settings that switch on all parts of its loss.
    required: settings without which no run starts.
    """

    rate: float
    formula: Callable[[Formula], tuple[Tensor, dict[str, float]]] | str
    options: dict[str, Any] = {}
    every_term: dict[str, Any] = {}
    required: dict[str, Any] = {}


STAGE_CASES = {
    "pt": StageCase(2e-5, Formula.sft, {"z_loss": 1e-3}, {"z_loss": 0.1}),
    "sft": StageCase(
        1e-5,
        Formula.sft,
        every_term={"label_smoothing": 0.1, "z_loss": 0.1},
    ),
    "distill": StageCase(
        1e-5,
        Formula.distill,
        {"teacher": "some/teacher", "jsd_beta": 0.3, "temperature": 1.5, "nll_weight": 0.5},
        {"teacher": "some/teacher", "nll_weight": 0.5},
        {"teacher": "some/teacher"},
    ),
    "rm": StageCase(5e-6, Formula.rm, {"center_coefficient": 0.1}, {"center_coefficient": 0.1}),
    "dpo": StageCase(5e-7, Formula.dpo, every_term={"sft_weight": 0.1, "ld_alpha": 0.5}),
    "kto": StageCase(5e-7, Formula.kto, {"beta": 0.3, "desirable_weight": 1.5}),
    "ppo": StageCase(
        1e-6,
        "tests/distributed/test_ppo.py",
        every_term={"reward": "builtins:len", "entropy_coefficient": 0.1},
        required={"reward": "math:sqrt"},
    ),
}
# those that a formula here says the step of
COMPARED = [name for name, case in STAGE_CASES.items() if callable(case.formula)]
