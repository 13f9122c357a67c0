"""Kahneman-Tversky optimisation (KTO): learn from single answers that are marked good or bad.

Shapes: Nw desirable and Nl undesirable examples, M mismatched ones; one summed log-probability per sequence.
"""

import torch
from torch import Tensor

from .precision import check_shapes, takes_tensors

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


@takes_tensors()
def kto_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    policy_KL_logps: Tensor | None,  # noqa: N803  the field's name
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    reference_KL_logps: Tensor | None,  # noqa: N803
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    *,
    kl: Tensor | None = None,
    loss_type: str = "kto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (losses [Nw + Nl], chosen_rewards [Nw], rejected_rewards [Nl], kl []), rewards and kl detached.

    The chosen log-probabilities are [Nw], the rejected ones [Nl] and those of mismatched answers [M].
    kto (2402.01306, eq. 8), r = policy - reference:
        desirable    lambda_D * (1 - sigmoid(beta * (r - z0)))
        undesirable  lambda_U * (1 - sigmoid(beta * (z0 - r)))
    z0 is `kl` if it is given (pass it to use the baseline of a whole step); otherwise it is
    max(0, mean(policy_KL - reference_KL)) over answers that are paired with another example's prompt. It carries no
    gradient. apo_zero_unpaired (2408.06266; the same name in TRL): 1 - sigmoid(beta r) and sigmoid(beta r), without a
    baseline. Either side may be empty. Keep lambda_D * Nw / (lambda_U * Nl) within [1, 4/3] (section 4.2 of the paper).
    Raises ValueError for other shapes, an unknown loss_type, beta <= 0, a negative weight, or kto without a baseline.
    """
    if loss_type not in KTO_LOSS_TYPES:
        raise ValueError(
            f"loss_type is {loss_type!r} but kto_loss knows {', '.join(KTO_LOSS_TYPES)}"
        )
    if not beta > 0:
        raise ValueError(f"beta is {beta} but must be above 0")
    if desirable_weight < 0 or undesirable_weight < 0:
        raise ValueError(
            f"desirable_weight is {desirable_weight} and undesirable_weight {undesirable_weight} "
            "but both must be at least 0"
        )
    rule = "policy and reference log-probabilities: both must be sums over answers [N]"
    chosen, rejected = (
        torch.sub(*check_shapes(rule, 1, *side))
        for side in (
            (policy_chosen_logps, reference_chosen_logps),
            (policy_rejected_logps, reference_rejected_logps),
        )
    )
    policy_kl, reference_kl = check_shapes(rule, 1, policy_KL_logps, reference_KL_logps)
    check_shapes("kl: it must be one number [], the baseline of all examples", 0, kl)
    if loss_type == "apo_zero_unpaired":
        if kl is not None or policy_kl is not None or reference_kl is not None:
            raise ValueError(
                "apo_zero_unpaired has no KL baseline but one was given; pass None for the KL arguments"
            )
        kl = chosen.new_zeros(())
    elif kl is None:
        if policy_kl is None or reference_kl is None or not policy_kl.numel():
            raise ValueError(
                "the KTO baseline needs at least one mismatched example; "
                "pass policy_KL_logps and reference_KL_logps, or kl="
            )
        kl = (policy_kl - reference_kl).mean().clamp(min=0)
    baseline = kl.detach().to(chosen.dtype)
    # 1 - sigmoid(x) = sigmoid(-x), without the cancellation
    losses = torch.cat(
        [
            desirable_weight * torch.sigmoid(-beta * (chosen - baseline)),
            undesirable_weight * torch.sigmoid(-beta * (baseline - rejected)),
        ]
    )
    return losses, beta * chosen.detach(), beta * rejected.detach(), baseline
