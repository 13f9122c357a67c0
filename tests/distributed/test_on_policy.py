"""Distillation on the student's own answers on real ranks: the step against GKD's loss, whoever samples what."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from models.decoder import CausalLM
from models.initial_weights import InitialWeights
from tests.engine_case import (
    HYBRID,
    SHAPE,
    TEACHER,
    Case,
    ListDataset,
    build_trainer,
    evaluated,
)
from tests.harness import run_distributed
from tests.memory_case import assert_same_gradients
from tests.zero_case import filled
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
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
        # labels, as GKD knows them, have no weights between 0 and 1
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
        steps.append([s for n in range(len(lengths)) for s in sequences([n])])
        assert [len(s.tokens) for s in steps[-1]] == lengths
        return pack(lengths, sequences, *rest)

    on_policy.packed_batches = noted
    metrics = [trainer.train_step() for _ in range(2)]
    trainer.engine.destroy()
    return metrics, steps, chain.steps if dist.get_rank() == 0 else []


def gkd_loss(student, teacher, labels, beta, temperature):
    """GKD's loss of padded logits [B, L, V] (arXiv 2306.13649, equation 1), reduced as TRL's GKDTrainer does.

    TRL calls it "batchmean": the sum over the vocabulary and all labels, divided by the number of labels. A
    temperature divides the logits of both, and nothing multiplies the loss by its square; the trainer leaves it at 1.
    """
    student, teacher = ((x / temperature).log_softmax(-1) for x in (student, teacher))

    def kl(p, q):
        return F.kl_div(q, p, reduction="none", log_target=True)

    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    found = {
        0.0: lambda: kl(teacher, student),
        1.0: lambda: kl(student, teacher),
    }.get(beta, lambda: beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed))()
    labelled = labels != -100
    return found[labelled].sum() / labelled.sum()


def formula(case, sequences):
    """Loss and gradients of a step by whole models in float64 on answers that are padded to one length."""
    student = filled(case.model(None, attention="reference"), case.weights()).double()
    teacher = CausalLM(TEACHER, attention="reference")
    teacher = filled(teacher, InitialWeights(TEACHER, 7)).double()
    alone = [pack_shard([s], ParallelMesh(1), "cpu") for s in sequences]
    logits = [
        pad_sequence(
            [model(batch, project=False) @ model.lm_head.weight.T for batch in alone],
            batch_first=True,
        )[..., : case.shape.vocab_size]
        for model in (student, teacher)
    ]
    labels = [batch.targets[batch.valid_index] for batch in alone]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    options = case.options
    loss = gkd_loss(*logits, labels, options["jsd_beta"], options.get("temperature", 1.0))
    loss.backward()
    return float(loss), {name: p.grad for name, p in student.named_parameters()}


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
def test_a_step_is_that_of_gkd_on_the_same_answers(world, sp, options, prompts, shape):
    """With a larger teacher; the mean over tokens that a loss is here is what TRL's reduction comes to."""
    case = OnPolicyCase(sp=sp, options=options, prompts=prompts, shape=shape, budget=100)
    metrics, steps, gradients = run_distributed(run_steps, world, case)[0]
    for step in range(2):
        loss, exact = formula(case, steps[step])
        assert metrics[step]["loss"] == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(gradients[step], exact)


def rows_of(steps):
    tables = ((s.tokens, s.loss_weights) for step in steps for s in step)
    return [[torch.as_tensor(x).tolist() for x in both] for both in tables]


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
