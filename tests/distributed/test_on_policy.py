"""Distillation on the student's own answers on real ranks: the step against the formula, whoever samples what."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.engine_case import (
    HYBRID,
    SHAPE,
    Case,
    ListDataset,
    build_trainer,
    evaluated,
)
from tests.harness import run_distributed
from tests.memory_case import assert_same_gradients
from tests.stage_case import Formula
from ulysses.parallel.batch import Sequence
from ulysses.rl import on_policy
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.on_policy import prompt_of
from ulysses.rl.sampler import SamplingOptions

EOS = (3, 7, 11, 19, 23, 31, 40, 41, 52, 63, 70, 77, 85, 90)  # many: answers are ragged
OPTIONS = SamplingOptions(12, stop_tokens=EOS, seed=9)


@dataclass
class OnPolicyCase(Case):
    """Distillation in which the student answers rows; `prompts` leaves nothing of them but these.

    weight: of the answers.
    """

    stage: str = "distill"
    prompts: bool = False
    weight: float = 1.0

    def data(self):
        rows = [s for (s,) in super().data().examples]
        if self.prompts:
            tokens = [torch.tensor(prompt_of(s)) for s in rows]
            rows = [Sequence(t, torch.zeros(len(t))) for t in tokens]
        # as GKD's labels: no weights between 0 and 1
        return ListDataset(
            "sequence",
            [(replace(s, loss_weights=s.loss_weights.sign() * self.weight),) for s in rows],
        )

    def make_stage(self, engine, mesh):
        stage = super().make_stage(engine, mesh)
        if self.options["on_policy"]:
            stage.sampler = EngineSampler(engine, mesh, OPTIONS)
        return stage


def run_steps(case):
    """Take two steps; returns their metrics, the sequences that they train and, on rank 0, their gradients."""
    trainer, chain = build_trainer(case)
    steps, pack = [], on_policy.packed_batches

    def noted(lengths, sequences, *rest):
        found = [s for n in range(len(lengths)) for s in sequences([n])]
        tables = [[torch.as_tensor(x) for x in (s.tokens, s.loss_weights)] for s in found]
        steps.append([Sequence(*both) for both in tables])
        assert [len(s.tokens) for s in steps[-1]] == lengths
        return pack(lengths, sequences, *rest)

    on_policy.packed_batches = noted
    metrics = [trainer.train_step() for _ in range(2)]
    trainer.engine.destroy()
    return metrics, steps, chain.steps if dist.get_rank() == 0 else []


REVERSE = {"teacher": "some/teacher", "jsd_beta": 1.0, "on_policy": 1.0}
MIXED = {"teacher": "some/teacher", "jsd_beta": 0.3, "temperature": 1.5, "on_policy": 0.5}
FORWARD = MIXED | {"jsd_beta": 0.0, "on_policy": 0.7}


@pytest.mark.parametrize(
    "world, sp, options, prompts, shape",
    [
        (1, 1, REVERSE, True, SHAPE),
        (2, 2, FORWARD, False, SHAPE),
        (4, 2, MIXED, False, HYBRID),
    ],
)
def test_a_step_is_the_formulas_on_the_same_answers(world, sp, options, prompts, shape):
    """With a larger teacher; tests/unit/test_losses_distill.py has the loss beside TRL's."""
    case = OnPolicyCase(sp=sp, options=options, prompts=prompts, shape=shape, budget=100)
    metrics, steps, gradients = run_distributed(run_steps, world, case)[0]
    for step in range(2):
        plain = Formula(case, 0)
        plain.examples = [SimpleNamespace(sequences=steps[step])]
        loss, _ = plain.distill()
        loss.backward()
        exact = {name: p.grad for name, p in plain.model.named_parameters()}
        assert metrics[step]["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert_same_gradients(gradients[step], exact)


def rows_of(steps):
    tables = ((s.tokens, s.loss_weights) for step in steps for s in step)
    return [[x.tolist() for x in both] for both in tables]


def test_rows_and_answers_depend_on_no_topology():
    case = OnPolicyCase(options=MIXED)
    metrics, steps, _ = run_distributed(run_steps, 1, case)[0]
    drawn = [one["on_policy/rows"] for one in metrics]
    assert len({*drawn}) == 2 and 0 < min(drawn) and max(drawn) < 1
    for world, sp, budget in ((2, 2, 128), (4, 1, 64)):
        for found in run_distributed(run_steps, world, replace(case, sp=sp, budget=budget)):
            assert rows_of(found[1]) == rows_of(steps)


def test_a_sampled_answer_has_the_weight_of_the_one_in_its_row():
    case = OnPolicyCase(options=MIXED, weight=0.5)
    _, steps, _ = run_distributed(run_steps, 1, case)[0]
    assert {x for _, weights in rows_of(steps) for x in weights} == {0.0, 0.5}


def test_held_out_rows_keep_their_answers():
    off = MIXED | {"on_policy": 0.0}
    usual, sampled = (evaluated(OnPolicyCase(options=o), 1) for o in (off, MIXED))
    assert usual == sampled
