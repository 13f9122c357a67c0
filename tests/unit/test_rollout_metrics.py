"""What PPO's metrics say is what their names say, in every mode."""

import math
from dataclasses import replace

import pytest
import torch

from losses.logprobs import LogProbs
from tests.unit.test_ppo_stage import answered, ppo_stage, turns
from ulysses.data.read.sources import RawRow
from ulysses.data.read.trajectories import read_trajectory
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.rollout import answer_metrics
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.rows import trajectories_of
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.base import MetricSums


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_shares_of_tokens_are_means_over_tokens_however_losses_are_aggregated(
    aggregation, masked
):
    """Answers of 3, 4 and 1 tokens, of which the second was cut; losses are means as the whole loss is."""
    settings = f"loss_aggregation={aggregation} mask_truncated={masked} kl_coefficient=0"
    stage = ppo_stage(f"advantage=reinforce++ {settings}")
    by_length = aggregation == "sequence"
    rollout = Rollout.of(0, answered().trajectories, by_length=by_length)
    old, now, entropy = torch.randn(3, len(rollout.columns["tokens"]))
    stage.maker.finish(rollout, old, torch.zeros_like(old), old)
    mesh = ParallelMesh(1)
    stage = replace(stage, model=lambda *_, **__: LogProbs(now, entropy), mesh=mesh)
    examples = [rollout[i] for i in (0, 1, 2)]
    batch = pack_shard([s for one in examples for s in one.sequences], mesh, "cpu")
    sums = MetricSums("cpu")
    stage.losses(batch, sums)
    found = sums.reduce()
    at = [2, 3, 4, 12] if masked else [2, 3, 4, 6, 7, 8, 9, 12]
    gap, advantages = (now - old)[at], rollout.columns["advantages"][at]
    ratio = gap.exp()
    wanted = {
        "policy/approxkl_avg": gap.square() / 2,
        "policy/logp_change": gap.abs(),
        "policy/entropy_avg": entropy[at],
        "val/ratio": ratio,
        "policy/clipfrac_avg": ((ratio - 1) * advantages.sign() > 0.2).float(),
    }
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values.mean().item(), rel=1e-5), name
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    lengths = [3, 1] if masked else [3, 4, 1]
    means = torch.stack([part.mean() for part in losses.split(lengths)])
    mean = means.mean() if by_length else losses.mean()
    assert found["loss/policy_avg"] == pytest.approx(mean.item(), rel=1e-5)


@pytest.mark.parametrize("score", [0.1, 1 / 3])
def test_equal_returns_have_no_explained_variance(score):
    """The sums that make them differ by their rounding."""
    rollout, stage = answered(), ppo_stage("lam=1 kl_coefficient=0")
    for one in rollout.trajectories:
        one.score = score
    old, values = torch.randn(2, len(rollout.columns["tokens"]))
    stage.maker.finish(rollout, old, values, old)
    assert "val/explained_variance" not in rollout.metrics


@pytest.mark.parametrize("coefficient", [0, 0.1])
def test_a_group_whose_answers_all_score_the_same_is_one(coefficient):
    """Also where their KL differs; and the mean of an episode's three branches, three times 0.1, is not 0.1."""
    episodes = 0, 1, 1, 1
    found = [turns([4], [6, n], group=0, episode=e, score=0.1) for n, e in enumerate(episodes)]
    rollout = Rollout.of(0, found)
    old, reference = torch.randn(2, len(rollout.columns["tokens"]))
    stage = ppo_stage(f"advantage=group kl_coefficient={coefficient}")
    stage.maker.finish(rollout, old, torch.zeros_like(old), reference)
    assert rollout.metrics["advantages/zero_groups"] == 1


@pytest.mark.parametrize("coefficient", [0, 0.1])
def test_a_distance_from_the_reference_is_told_only_where_there_is_one(coefficient):
    """Without one it is not 0: nobody has asked."""
    rollout = answered()
    stage = ppo_stage(f"kl_coefficient={coefficient} advantage=reinforce++")
    old, reference = torch.randn(2, len(rollout.columns["tokens"]))
    stage.maker.finish(rollout, old, torch.zeros_like(old), reference)
    told = {"objective/kl", "reference_gap"} & rollout.metrics.keys()
    assert len(told) == (2 if coefficient else 0)


def test_what_was_measured_and_is_no_number_is_told():
    """The checks of the sampler and of the reference read these metrics, and refuse what is no number."""
    rollout, stage = answered(), ppo_stage("kl_coefficient=0.1 advantage=reinforce++")
    old = torch.full([len(rollout.columns["tokens"])], math.nan)
    stage.maker.finish(rollout, old, torch.zeros_like(old), torch.zeros_like(old))
    for name in ("sampler/logp_gap", "sampler/logp_gap_max", "objective/kl", "reference_gap"):
        assert math.isnan(rollout.metrics[name]), name


def test_rows_with_advantages_and_no_reward_have_no_score():
    row = {"group": 1, "token_ids": [5, 7, 9], "mask": [0, 1, 1], "logprobs": [0, -1, -2]}

    def metrics(**given):
        raw = RawRow(0, "", row | {"advantages": 2} | given)
        columns = read_trajectory(raw, {}, 10, 8, [].append)
        rollout = Rollout.of(0, trajectories_of([[columns], [columns]], ()))
        old = torch.randn(len(rollout.columns["tokens"]))
        stage = ppo_stage("advantage=group kl_coefficient=0")
        stage.maker.finish(rollout, old, torch.zeros_like(old), old)
        assert rollout.columns["advantages"].max() == 2
        return rollout.metrics

    scores = {"objective/scores", "objective/scores_std", "objective/rlhf_reward"}
    assert metrics(reward=3).keys() - metrics().keys() == scores
    assert metrics(reward=0)["objective/scores"] == 0


def test_the_score_of_the_only_reward_is_the_score():
    """To the last digit: rewards may be as large as 2^53."""
    score = 2.0**24 + 1.1
    answer = Trajectory([5], [7], [-1.0], [True], True, score=score, scores={"m:f": score})
    metrics = answer_metrics([[answer]])
    assert metrics["objective/scores/m:f"] == metrics["objective/scores"] == score
