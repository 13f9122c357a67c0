"""PPO on real ranks under ZeRO-3: the step against the formula on fixed rollouts, and rollouts on any topology."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from losses.ppo import kl_estimate, ppo_policy_loss, ppo_value_loss
from models.decoder import CausalLM
from models.scored import PolicyValue, RewardModel
from tests.engine_case import (
    HYBRID,
    MOE,
    SHAPE,
    Case,
    ListDataset,
    build_trainer,
    trained,
)
from tests.harness import full, run_distributed
from tests.memory_case import assert_same_gradients
from tests.zero_case import HostWeights, filled, frozen_engine
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.rollout import RolloutMaker
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.sampler import SamplingOptions
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.referenced import logps_of
from ulysses.zero.engine import gathered_weights

# query rows are split at every degree but 3
ODD = replace(SHAPE, num_attention_heads=3, num_key_value_heads=1)
EOS = (3, 7, 11, 19, 23, 31, 40, 41, 52, 63, 70, 77, 85, 90)  # many: answers are ragged
OPTIONS = SamplingOptions(12, temperature=0.9, stop_tokens=EOS, seed=9)
FIXED = {"value_coefficient": 0.5, "entropy_coefficient": 0.01, "temperature": 0.8}
REAL = {
    "reward": "a:b",
    "epochs": 1,
    "minibatches": 2,
    "kl_coefficient": 0.2,
    "missing_eos_penalty": 0.5,
    "temperature": 0.9,
}


class PromptDataset(ListDataset):
    def row(self, index):
        return {"shift": 0.01 * index}


def reward(answers, row_of):
    """How many tokens are even, within -2 to 2, shifted by the example."""
    for one in answers:
        even = sum(v % 2 == 0 for v in one.tokens) / len(one.tokens)
        one.scores = {"a:b": 4 * even - 2 + row_of(one.row)["shift"]}


def prompts():
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 20, (14,), generator=draw).tolist()
    found = [torch.randint(0, 97, (n,), generator=draw) for n in lengths]
    return PromptDataset("prompt", [(Sequence(t, torch.zeros(len(t))),) for t in found])


def fixed_rollout(config, budget=0):
    """Twelve answers with made-up columns: ratios on both sides of the clip range, advantages of both signs.

    Without a value they answer three prompts, which they share within the budget.
    """
    draw, answers, parts = torch.Generator().manual_seed(9), [], []
    alone = config.advantage == "gae"
    for prompt in (30, 1, 12):
        tokens = torch.randint(0, 97, (prompt,), generator=draw).tolist()
        for length in torch.randint(1, 25, (4,), generator=draw).tolist():
            answer = torch.randint(0, 97, (length,), generator=draw).tolist()
            n = len(answers)
            drawn = answer, [0.0] * length, [True] * length, True
            answers.append(Trajectory(tokens, *drawn, group=n if alone else n // 4, episode=n))
            a, b, c, d = torch.randn(4, prompt + length, generator=draw)
            parts.append(
                {
                    "old_logps": 0.4 * a - 4.6,
                    "advantages": b,
                    "old_values": 0.3 * c,
                    "returns": d,
                    "reference_logps": 0.4 * c - 4.6,
                    "importance": d.exp().clamp(max=2.0),
                }
            )
    by_length = config.loss_aggregation == "sequence"
    rollout = Rollout.of(0, answers, tokens_per_microbatch=budget, by_length=by_length)
    if config.mask_truncated:  # every third answer
        for end, answer in [*zip(rollout.ends.tolist(), answers)][::3]:
            rollout.columns["weights"][end - len(answer.tokens) : end] = 0
    for name in parts[0]:
        held = [part[name][left:] for part, left in zip(parts, rollout.prefixes.tolist())]
        rollout.columns[name] = torch.cat(held)
    return rollout


@dataclass
class PpoCase(Case):
    """PPO against another reference or, if `fixed`, on made-up rollouts that never change."""

    stage: str = "ppo"
    fixed: bool = False

    @property
    def config(self):
        return PpoSection(**self.options)

    def __post_init__(self):
        if self.config.advantage == "gae":
            self.engine = {"scopes": {"policy": 1.0, "value": 1.0}}

    def data(self):
        return prompts()

    def model(self, mesh, attention=None):
        kind = PolicyValue if self.config.advantage == "gae" else CausalLM
        return kind(self.shape, mesh, attention=attention or self.attention)

    def make_stage(self, engine, mesh):
        stage, reference = super().make_stage(engine, mesh), None
        if not self.fixed:
            source = HostWeights(self.shape, 1)
            reference = logps_of(frozen_engine(lambda: CausalLM(self.shape, mesh), source))
        stage = replace(stage, reference=reference)
        budget = {"tokens_per_microbatch": self.budget, "share_prompts": True}
        parts = Mock(engine=engine, mesh=mesh, frozen={}, **budget)
        maker = RolloutMaker(stage, parts, EngineSampler(engine, mesh, OPTIONS), reward)
        if self.fixed:

            def make(*_):
                with gathered_weights(
                    engine
                ) as weights:  # which leaves the steps after it as they were
                    assert all(w.numel() > 0 for w in weights.values())
                return fixed_rollout(stage.table, self.budget)

            maker.make = make
        return replace(stage, maker=maker)


def formula(case):
    """Metrics (the loss among them) and gradients of the first step, one sequence at a time, float64, no ZeRO."""
    config, data = case.config, fixed_rollout(case.config)
    alone, model = config.advantage == "gae", case.model(None, attention="reference")
    filled(model, case.weights()).double()
    whole = (list(data[i].sequences) for i in range(len(data.lengths)))
    found = [
        model(pack_shard(s, ParallelMesh(1), "cpu"), entropy=True, temperature=0.8)
        for s in whole
    ]
    logps, entropy = (torch.cat([out[i] for out in found]) for i in (0, 1))
    c = {name: column.double() for name, column in data.columns.items()}
    trained, expected = (c["weights"].roll(-1) != 0).double(), {}
    lengths = data.lengths.tolist()

    def summed(x):
        return torch.stack([part.sum() for part in (x * trained).split(lengths)])

    counts = summed(trained)
    ratioed = logps
    if config.ratio != "token":
        whole = summed(logps - c["old_logps"])
        whole = whole / (counts.clamp(min=1) if config.ratio == "mean" else 1)
        ratioed = c["old_logps"] + whole.repeat_interleave(torch.as_tensor(data.lengths))
    how = {"dual_clip": config.dual_clip or None, "kind": config.policy_loss}
    policy = ppo_policy_loss(ratioed, c["old_logps"], c["advantages"], config.clip, **how)
    each = policy.losses * (c["importance"] if config.importance_cap else 1)
    each = each - config.entropy_coefficient * entropy
    if config.kl_in != "reward":
        kl = kl_estimate(logps, c["reference_logps"], config.kl_estimator)
        ratio = (ratioed - c["old_logps"]).exp() if config.kl_in == "loss_with_ratio" else 1
        each = each + config.kl_coefficient * kl * ratio
    if alone:
        found = torch.cat([out[2] for out in found])
        values = ppo_value_loss(found, c["old_values"], c["returns"], config.value_clip)
        each = each + config.value_coefficient * values.losses
        means = {
            "loss/policy_avg": policy.losses,
            "policy/clipfrac_avg": policy.clipped,
            "val/ratio": policy.ratios,
            "loss/value_avg": values.losses,
            "policy/approxkl_avg": 0.5 * (logps - c["old_logps"]).square(),
            "policy/entropy_avg": entropy,
        }
        expected = {name: float(summed(x).sum() / counts.sum()) for name, x in means.items()}
    loss = {
        "token": summed(each).sum() / counts.sum(),
        "sequence": (summed(each) / counts.clamp(min=1)).mean(),
        "constant": summed(each).mean() / config.max_new_tokens,
    }[config.loss_aggregation]
    loss.backward()
    return expected | {"loss": float(loss)}, {n: p.grad for n, p in model.named_parameters()}


GROUPED = FIXED | {"advantage": "group", "answers_per_prompt": 4, "kl_coefficient": 0.3}
GSPO = GROUPED | {"ratio": "mean", "loss_aggregation": "sequence"}
RLOO = GSPO | {"advantage": "leave_one_out", "ratio": "product"}
IN_LOSS = {"kl_in": "loss_with_ratio", "kl_estimator": "k3"}
CONSTANT = {"ratio": "token", "loss_aggregation": "constant", "max_new_tokens": 25}


@pytest.mark.parametrize(
    "world, sp, budget, seed, options, shape",
    [
        (4, 4, 64, 1, GSPO | IN_LOSS | {"importance_cap": 2.0}, ODD),
        (4, 2, 128, 2, GSPO | {"loss_aggregation": "token", "mask_truncated": True}, SHAPE),
        (2, 2, 128, 1, GROUPED | {"policy_loss": "cispo", "mask_truncated": True}, SHAPE),
        (2, 1, 128, 1, GROUPED | {"dual_clip": 1.4, "ratio": "product"}, SHAPE),
        (4, 2, 64, 1, FIXED, SHAPE),
        (4, 4, 512, None, FIXED, ODD),
        (2, 2, 512, 2, RLOO | CONSTANT, SHAPE),
        (2, 2, 512, 1, GROUPED, HYBRID),
    ],
)
def test_loss_metrics_and_gradients(world, sp, budget, seed, options, shape):
    """THE invariance test for PPO on a fixed rollout, policy and value parameters alike, after what a sampler gathers.

    Without a value answers share prompts, and equal the formula on separate sequences.
    """
    case = PpoCase(
        sp=sp, budget=budget, packing_seed=seed, shape=shape, fixed=True, options=options
    )
    expected, exact = formula(case)
    [metrics], [gradients] = trained(case, world)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(gradients, exact)
    if case.config.advantage == "gae":
        assert 0.05 < metrics["policy/clipfrac_avg"] < 0.95
    else:  # the long prompt, for three of four answers
        assert metrics["tokens_shared"] >= 3 * 29 * (budget > 100)


def run_steps(case):
    """Take three real steps on two real rollouts; returns metrics, the last rollout and the gradients."""
    trainer, chain = build_trainer(case)
    metrics = [trainer.train_step() for _ in range(3)]
    return metrics, trainer.stage.maker.rollout, chain.steps if dist.get_rank() == 0 else []


def real(advantage="gae", **how):
    answers = 1 if advantage == "gae" else 3
    options = REAL | {"advantage": advantage, "answers_per_prompt": answers}
    return PpoCase(lr=1e-3, options=options, **how)


@cache
def alone(shape=SHAPE, advantage="gae"):
    """Two rollouts and a bit on one process, against another reference so that every term takes part."""
    return run_distributed(run_steps, 1, real(advantage, shape=shape))[0]


def column(rollout, name):
    """A column where answers are trained; how prompts are shared depends on the micro-batches."""
    predicts = rollout.columns["weights"].roll(-1) != 0
    assert name == "weights" or not rollout.columns[name][~predicts].any()
    return rollout.columns[name][predicts]


@pytest.mark.parametrize(
    "world, sp, budget, shape, advantage",
    [
        (4, 2, 64, SHAPE, "gae"),
        (4, 4, 64, ODD, "gae"),
        (2, 1, 64, MOE, "gae"),
        *full((2, 2, 100, MOE, "group")),
        (2, 2, 100, HYBRID, "group"),
    ],
)
def test_rollouts_do_not_depend_on_the_ranks(world, sp, budget, shape, advantage):
    """The same tokens, scores, advantages and gradients, whoever decoded what and however it was packed."""
    case = real(advantage, sp=sp, budget=budget, shape=shape)
    found = run_distributed(run_steps, world, case)
    metrics, rollout, gradients = alone(shape, advantage)
    assert len(rollout.trajectories) == 6 * case.config.answers_per_prompt
    for _, other, _ in found:
        ours, theirs = (
            [(a.tokens, a.score) for a in one.trajectories] for one in (other, rollout)
        )
        assert ours == theirs and other.columns.keys() == rollout.columns.keys()
        for name in rollout.columns.keys() - {"tokens"}:
            columns = (column(one, name) for one in (other, rollout))
            torch.testing.assert_close(*columns, rtol=1e-3, atol=2e-4)
    assert_same_gradients(found[0][2][0], gradients[0], 2e-5)
    for ours, theirs in zip(found[0][0], metrics, strict=True):
        for name in "loss objective/kl objective/scores val/ratio val/num_eos_tokens".split():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name


def test_what_a_run_reports():
    metrics = alone()[0]
    first, third = metrics[0], metrics[2]
    assert [m["rollout"] for m in metrics] == [0, 0, 1]
    # the sampler computes what the trainer computes
    assert all(m["sampler/logp_gap_max"] < 1e-4 for m in metrics)
    assert [first["val/ratio"], third["val/ratio"]] == pytest.approx([1, 1], abs=1e-6)
    assert abs(metrics[1]["val/ratio"] - 1) > 1e-5
    assert 0 < first["val/num_eos_tokens"] < 6


def weights_of_steps(case):
    """The weights before the steps of the last rollout and after each of them."""
    trainer, _ = build_trainer(case)
    trainer.step, weights = 8, trainer.engine.sub_groups[0].master
    found = [weights.detach().clone()]
    for _ in range(4):
        trainer.train_step()
        found.append(weights.detach().clone())
    return found


def test_a_step_without_anything_to_train_leaves_the_weights_alone():
    """The last rollout has two prompts for four steps."""
    case = PpoCase(sp=2, lr=3e-3, options=REAL | {"epochs": 1, "minibatches": 4})
    for weights in run_distributed(weights_of_steps, 2, case):
        changed = [not torch.equal(x, y) for x, y in pairwise(weights)]
        assert changed == [True, True, False, False]


def model_scores():
    """The scores of three answers by the frozen engine, and by the plain model one answer at a time."""
    trainer, _ = build_trainer(PpoCase(sp=2, options=REAL))
    maker, source = trainer.stage.maker, HostWeights(SHAPE, 4)
    scorer = frozen_engine(lambda: RewardModel(SHAPE, maker.mesh), source)
    maker.parts.frozen["reward"] = scorer
    maker.ppo, maker.reward = PpoSection(reward="models/rm"), None
    rollout = maker.scored(0, prompts(), maker.draw(0, prompts(), [3, 1, 5]))
    plain = filled(RewardModel(SHAPE, None, attention="reference"), source)
    alone = (pack_shard(list(rollout[i].sequences), ParallelMesh(1), "cpu") for i in range(3))
    with torch.no_grad():
        one = torch.stack([plain(batch)[-1] for batch in alone])
    return torch.tensor([answer.score for answer in rollout.trajectories]), one


def test_rewards_from_a_model_are_read_at_the_answers_last_token():
    for found, expected in run_distributed(model_scores, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
