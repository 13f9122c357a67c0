"""Rollouts of episodes with branches, every shared turn once: losses and gradients are those of whole sequences.

A group is a random tree, whose branches are dealt to episodes. Some tokens are drawn, others told, and what a branch is
told another one may have drawn. What models say of a token is made up from the tokens before it.
"""

from itertools import cycle, product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.decoder import CausalLM
from models.scored import PolicyValue
from tests.engine_case import SHAPE
from tests.forest_case import forest
from tests.harness import run_distributed
from tests.zero_case import HostWeights, filled
from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl import trajectory
from ulysses.rl.advantages import OPPOSED
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rollout import RolloutMaker
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.trajectory import Trajectory
from ulysses.stages.base import MetricSums

MORE = (
    "advantage=group kl_in=loss_with_ratio kl_estimator=k3 importance_cap=1.2",
    "advantage=reinforce++ entropy_coefficient=0.1",
    "advantage=leave_one_out mask_truncated=true kl_in=loss kl_estimator=k2",
    "advantage=gae",
    "advantage=group scale_by_std=batch mask_truncated=true importance_cap=2",
)
WAYS = [
    f"policy_loss={policy_loss} ratio={ratio} loss_aggregation={aggregation}"
    for policy_loss, ratio, aggregation in product(
        ("clip", "cispo"), ("token", "mean", "product"), ("token", "sequence", "constant")
    )
]
SETTINGS = [f"{way} {more}" for way, more in zip(WAYS, cycle(MORE))]
SETTINGS += [f"dual_clip=1.4 {more}" for more in MORE]


def table(settings):
    return PpoSection(**dict(setting.split("=") for setting in settings.split()))


def said(tokens, speed):
    """A number for every token that depends on the tokens before it."""
    return np.sin(speed * np.cumsum(np.asarray(tokens, np.float64)))


def trajectories(seed):
    """Two groups with several episodes and one with a single one; the last token is always drawn."""
    draw, found = np.random.default_rng(seed), []
    for place, (sequence, group) in enumerate(forest(seed, SHAPE.vocab_size, longest=30)):
        whole = sequence.tokens.tolist()
        if len(whole) < 4:
            continue
        sampled = np.cumsum(whole)[2:] % 4 > 0
        # a branch may be told what another one has drawn
        sampled[: draw.integers(len(sampled)) * (place % 3 == 1)] = False
        sampled[-1] = True
        episode = group * 100 + int(draw.integers(4))
        found.append(
            Trajectory(
                whole[:2],
                whole[2:],
                (said(whole, 1.1)[1:-1] * 0.3 - 4.6 + place % 3 / 4).tolist(),
                sampled.tolist(),
                bool(episode % 4),
                group,
                episode,
                score=float(episode % 5),
            )
        )
    return found


def made(seed, ppo, budget):
    """A finished rollout."""
    by_length = ppo.loss_aggregation == "sequence"
    share_drawn = ppo.ratio == "token" and not ppo.needs_value
    how = {"by_length": by_length, "share_drawn": share_drawn}
    rollout = Rollout.of(0, trajectories(seed), tokens_per_microbatch=budget, **how)
    own = [
        np.stack([said(sequence.tokens, speed) for speed in (1.0, 2.0, 3.0)])[:, left_out:]
        for i in np.unique(rollout.example_ids).tolist()
        for sequence, left_out in zip(rollout[i].sequences, rollout.prefix_lengths[i].tolist())
    ]
    old, values, reference = torch.from_numpy(np.concatenate(own, axis=1)).float()
    stage = PpoStage(Config(stage="ppo", ppo=ppo))
    finish = RolloutMaker(stage, parts=None, sampler=None).finish
    finish(rollout, 0.4 * old - 4.6, 0.3 * values, 0.4 * reference - 4.6)
    return rollout


def trained(seed, settings, budget, mesh):
    """The loss of a whole rollout and its gradient, the rollout, and how many tokens are computed."""
    ppo = table(settings)
    rollout = made(seed, ppo, budget)
    needs_value = ppo.needs_value
    kind = PolicyValue if needs_value else CausalLM
    model = filled(kind(SHAPE, mesh, attention="reference"), HostWeights(SHAPE, 0)).double()
    examples = np.unique(rollout.example_ids).tolist()
    sequences = [sequence for i in examples for sequence in rollout[i].sequences]
    batch = pack_shard(sequences, mesh)
    stage = PpoStage(Config(stage="ppo", ppo=ppo), model, mesh)
    terms = stage.losses(batch, MetricSums("cpu"))
    count = torch.as_tensor(stage.normalisers(batch)["tokens"], dtype=torch.float64)
    loss = sum(term.value * term.weight for term in terms)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    loss = loss.detach()
    if mesh.sp_group is not None:
        for x in (loss, gradient, count):
            dist.all_reduce(x, group=mesh.sp_group)
    return loss / count, gradient / count, rollout, batch.num_tokens


def on_ranks(sp, seed):
    trajectory.FEWEST_SHARED = 1
    return [trained(seed, settings, 10_000, ParallelMesh(sp)) for settings in SETTINGS]


@pytest.mark.parametrize("sp, seed", [(1, 0), (2, 1)])
def test_shared_turns_train_as_whole_sequences(sp, seed):
    opposed = 0
    whole_tokens = sum(len(one.whole) for one in trajectories(seed))
    for settings, found in zip(SETTINGS, run_distributed(on_ranks, sp, sp, seed)[0]):
        loss, gradient, rollout, tokens = found
        wanted, exact, apart, all_tokens = trained(seed, settings, 0, ParallelMesh())
        assert all_tokens == whole_tokens and OPPOSED not in apart.columns
        shares_drawn = "ratio=token" in settings or "ratio" not in settings
        shares_drawn &= "gae" not in settings
        assert tokens < whole_tokens * (0.7 if shares_drawn else 0.97), settings
        assert float(loss) == pytest.approx(float(wanted), rel=1e-6, abs=1e-7), settings
        assert (gradient - exact).norm() < 1e-6 * exact.norm(), settings
        opposed += OPPOSED in rollout.columns
        for name in rollout.metrics:
            assert rollout.metrics[name] == pytest.approx(apart.metrics[name], rel=1e-6), name
    assert opposed > 3
