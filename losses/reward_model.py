"""The pairwise loss of reward models.

Shapes: N pairs, one scalar score per sequence.
"""

import torch.nn.functional as F
from torch import Tensor

from .precision import check_shapes, takes_tensors


@takes_tensors("margin")
def reward_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margin: Tensor | None = None,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Return -log sigmoid(s_w - s_l - margin) + c * (s_w + s_l)^2 per pair, in the shape of the scores.

    chosen_rewards, rejected_rewards and margin have one shape, commonly [N].
    Bradley-Terry with the margin of Llama 2 (2307.09288, eq. 2) and the centring term of 2312.09244 (c = 0.01 there),
    which fixes the constant that pairs leave free in the scores. Raises ValueError if shapes differ or c < 0.
    """
    chosen, rejected, margin = check_shapes(
        "chosen_rewards, rejected_rewards and margin: they must have one shape, one value per pair",
        None,
        chosen_rewards,
        rejected_rewards,
        margin,
    )
    if center_coefficient < 0:
        raise ValueError(
            f"center_coefficient is {center_coefficient} but must be at least 0 (0 switches centring off)"
        )
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin.to(difference.dtype)
    losses = -F.logsigmoid(difference)
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return losses
