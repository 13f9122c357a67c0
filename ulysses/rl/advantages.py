"""The algorithms that ppo.advantage chooses between: how rewards become advantages.

    gae             a value of every token says what was expected (1506.02438)
    group           an answer's reward among those of the other answers to its prompt (GRPO, 2402.03300)
    leave_one_out   an answer's reward minus the mean of the other answers' (RLOO, 2402.14740)
    reinforce++     what the answer earns from a token on, whitened over the rollout (2501.03262)

Each function takes rewards [T] and values [T] of the answers' tokens, packed by cu_seqlens [N + 1], and the [ppo]
table. It returns the columns [T] that the loss reads (`advantages`, and with a value `old_values` and `returns`) and
metrics of its own. Answers to the same prompt lie one after the other. Everything is float64 and the same on every
rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from losses.ppo import group_advantages, packed_gae, whiten
from ulysses.config.stage_sections import PpoSection

Found = tuple[dict[str, Tensor], dict[str, Tensor]]


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, config: PpoSection) -> Found:
    advantages, returns = packed_gae(rewards, values, cu_seqlens, config.gamma, config.lam)
    whitened = whiten(advantages, torch.ones_like(values))
    columns = {"advantages": whitened, "old_values": values, "returns": returns}
    variance, left = (x.var(correction=0) for x in (returns, returns - values))
    # how much of the returns the value model foresees; nothing where all returns are equal
    return columns, {"val/explained_variance": 1 - left / variance} if variance else {}


def compared(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, config: PpoSection) -> Found:
    lengths, size = cu_seqlens.diff(), config.answers_per_prompt
    scores = torch.stack([answer.sum() for answer in rewards.split(lengths.tolist())])
    advantages = group_advantages(scores, size, config.advantage, scale=config.scale_by_std)
    groups = scores.view(-1, size)
    same = (groups == groups[:, :1]).all(1)  # from which nothing is learned
    metrics = {"advantages/zero_groups": same.double().mean()}
    return {"advantages": advantages.repeat_interleave(lengths)}, metrics


def reinforce(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, config: PpoSection) -> Found:
    nothing = torch.zeros_like(rewards)
    _, to_come = packed_gae(rewards, nothing, cu_seqlens, config.gamma, lam=1.0)
    return {"advantages": whiten(to_come, torch.ones_like(to_come))}, {}


class Advantage(NamedTuple):
    """An algorithm: its function, and whether it trains a value and compares several answers to a prompt."""

    compute: Callable[[Tensor, Tensor, Tensor, PpoSection], Found]
    needs_value: bool = False
    needs_group: bool = False


ADVANTAGES = {
    "gae": Advantage(gae, needs_value=True),
    "group": Advantage(compared, needs_group=True),
    "leave_one_out": Advantage(compared, needs_group=True),
    "reinforce++": Advantage(reinforce),
}
