"""How rewards become advantages: the algorithms that ppo.advantage chooses between.

    gae             a value of every token says what was expected (1506.02438)
    group           an answer's reward among those of the other answers to its prompt (GRPO, 2402.03300)
    leave_one_out   an answer's reward minus the mean of the other answers' (RLOO, 2402.14740)
    reinforce++     the sum of the answer's rewards from a token on, whitened over the rollout (2501.03262)

An answer is an episode where an episode has branches: they have one reward, the mean of theirs, and one advantage.
"""

from collections import Counter

import torch
from torch import Tensor

from losses.ppo import group_advantages, packed_gae, whiten
from ulysses.config.stage_sections import PpoSection
from ulysses.rl.trajectory import Trajectory

OPPOSED = "opposed_advantages"  # the column of those below 0 where others of the same token are above it
# each algorithm, and the settings that only others read
ADVANTAGES = {
    "gae": ("ppo.scale_by_std",),
    "group": ("ppo.gamma", "ppo.lam"),
    "leave_one_out": ("ppo.gamma", "ppo.lam", "ppo.scale_by_std"),
    "reinforce++": ("ppo.lam", "ppo.scale_by_std"),
}


def advantages_of(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    trajectories: list[Trajectory],
    ppo: PpoSection,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the columns [T] that the loss reads, and metrics; float64, and the same on every rank.

    The columns are `advantages`, and with a value `old_values` and `returns`.

    Args:
        rewards, values: [T] of the tokens that the policy has drawn, packed by cu_seqlens [N + 1], the N trajectories.
    """
    if ppo.compares_answers:
        return _among_answers(rewards, cu_seqlens, trajectories, ppo)
    if ppo.advantage == "reinforce++":
        _, returns = packed_gae(
            rewards, torch.zeros_like(rewards), cu_seqlens, ppo.gamma, lam=1.0
        )
        return {"advantages": whiten(returns, torch.ones_like(returns))}, {}
    advantages, returns = packed_gae(rewards, values, cu_seqlens, ppo.gamma, ppo.lam)
    whitened = whiten(advantages, torch.ones_like(values))
    columns = {"advantages": whitened, "old_values": values, "returns": returns}
    # float32 has no rounding of the sums, by which equal numbers differ in float64
    both = (x.float().double() for x in (returns, returns - values))
    variance, unexplained = (x.var(correction=0) for x in both)
    # the metric does not exist where all returns are equal
    return columns, {"val/explained_variance": 1 - unexplained / variance} if variance else {}


def _among_answers(
    rewards: Tensor, cu_seqlens: Tensor, trajectories: list[Trajectory], ppo: PpoSection
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    lengths = cu_seqlens.diff()
    earned = torch.stack([answer.sum() for answer in rewards.split(lengths.tolist())])
    numbers = torch.tensor([(one.group, one.episode) for one in trajectories])
    episodes, places, branches = numbers.unique(dim=0, return_inverse=True, return_counts=True)
    scores = earned.new_zeros(len(episodes)).index_add(0, places, earned) / branches
    groups = episodes[:, 0]
    advantages = group_advantages(scores, groups, ppo.advantage, scale=ppo.scale_by_std)
    # by the scores alone: a KL in the reward tells apart what the reward does not
    different = Counter(group for group, _ in {(one.group, one.score) for one in trajectories})
    equal = torch.tensor([count == 1 for count in different.values()])
    metrics = {"advantages/zero_groups": equal.double().mean()}
    return {"advantages": advantages[places].repeat_interleave(lengths)}, metrics
