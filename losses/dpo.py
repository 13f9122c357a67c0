"""Direct preference optimisation (DPO) and its family of pairwise losses.

DPO in one sentence: raise the chosen answer's log-probability above the rejected one's, both relative to a reference.

Shapes: N pairs, one summed completion log-probability each; T packed tokens.
"""

import difflib

import torch
from torch import Tensor

from .precision import at_least_float32
from .preference import (
    apo_down_loss,
    apo_zero_loss,
    discopop_loss,
    divergence_score,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    nca_pair_loss,
    orpo_loss,
    robust_loss,
    sigmoid_loss,
    sppo_hard_loss,
)

DPO_LOSS_TYPES = (
    "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "simpo", "sigmoid_norm", "orpo",
    "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip
REFERENCE_FREE = ("simpo", "orpo")
LENGTH_NORMALISED = ("ipo", "simpo", "sigmoid_norm", "orpo")
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "sigmoid_norm")
_WITH_DIVERGENCE = ("sigmoid", "robust", "hinge", "exo_pair", "discopop")
_OF_BOTH_RATIOS = {
    "orpo": orpo_loss,
    "nca_pair": nca_pair_loss,
    "sppo_hard": sppo_hard_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
}
_ELSEWHERE = {
    "cdpo": "here it is 'sigmoid' with label_smoothing > 0",
    "dpo": "here it is 'sigmoid'",
    "dpo_norm": "here it is 'sigmoid_norm'",
    "kto_pair": "use kto_loss",
    "slic": "here it is 'hinge'",
    "rso": "here it is 'hinge'",
    "rpo": "here it is 'sigmoid' with a negative log-likelihood term added",
}


def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor | None,
    reference_rejected_logps: Tensor | None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    simpo_gamma: float = 0.5,
    discopop_tau: float = 0.05,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, chosen_rewards, rejected_rewards), each [N]; the rewards are detached.

    All log-probabilities [N] are sums over the completion. `loss_type` is one of DPO_LOSS_TYPES; their equations and
    papers are in `losses.preference`. ipo, simpo, sigmoid_norm and orpo require the lengths [N] in completion tokens
    and divide by them (an empty completion counts as length 1). simpo and orpo use no reference, so both reference
    arguments may be None. A reward is beta times the log-ratio in the loss: divided by the length for those four types,
    and the policy's log-probability alone for simpo and orpo. `label_smoothing` applies to sigmoid (which it makes
    cDPO), robust, exo_pair, simpo and sigmoid_norm; `f_divergence` to sigmoid, robust, hinge, exo_pair and discopop.
    Raises ValueError if an argument is out of range or does not apply to the loss type.
    """
    if loss_type not in DPO_LOSS_TYPES:
        near = difflib.get_close_matches(loss_type, DPO_LOSS_TYPES, 1)
        hint = _ELSEWHERE.get(loss_type) or (f"did you mean {near[0]!r}?" if near else "")
        raise ValueError(
            f"loss_type is {loss_type!r} but must be one of {', '.join(DPO_LOSS_TYPES)}; {hint}".rstrip(
                "; "
            )
        )
    if not beta > 0:
        raise ValueError(f"beta is {beta} but must be above 0")
    if label_smoothing and loss_type not in _SMOOTHED:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but loss_type {loss_type!r} has none; "
            f"set it to 0, or use {', '.join(_SMOOTHED)}"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but must be at least 0 and below 0.5 (0.5 is no preference)"
        )
    if loss_type == "exo_pair" and not label_smoothing:
        raise ValueError(
            "loss_type 'exo_pair' is infinite at label_smoothing 0; set it above 0, for example 0.001"
        )
    if loss_type == "discopop" and not 0 < discopop_tau <= 1:
        raise ValueError(
            f"discopop_tau is {discopop_tau} but must be above 0 and at most 1 (0.05 in the paper)"
        )
    if loss_type == "simpo" and simpo_gamma < 0:
        raise ValueError(f"simpo_gamma is {simpo_gamma} but must be at least 0")
    if f_divergence != "reverse_kl" and loss_type not in _WITH_DIVERGENCE:
        raise ValueError(
            f"f_divergence is {f_divergence!r} but loss_type {loss_type!r} has none; "
            f"use 'reverse_kl', or one of {', '.join(_WITH_DIVERGENCE)}"
        )
    chosen, rejected = map(at_least_float32, (policy_chosen_logps, policy_rejected_logps))
    if loss_type not in REFERENCE_FREE:
        if reference_chosen_logps is None or reference_rejected_logps is None:
            raise ValueError(
                f"loss_type {loss_type!r} needs reference_chosen_logps and reference_rejected_logps; "
                f"without a reference use {' or '.join(REFERENCE_FREE)}"
            )
        chosen = chosen - at_least_float32(reference_chosen_logps)
        rejected = rejected - at_least_float32(reference_rejected_logps)
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"chosen is {list(chosen.shape)} and rejected {list(rejected.shape)} but every pair needs one of each"
        )
    if loss_type in LENGTH_NORMALISED:
        if chosen_lengths is None or rejected_lengths is None:
            raise ValueError(
                f"loss_type {loss_type!r} is length-normalised; pass chosen_lengths and rejected_lengths"
            )
        chosen = chosen / chosen_lengths.clamp(min=1)
        rejected = rejected / rejected_lengths.clamp(min=1)
    scores = [divergence_score(x, f_divergence, f_alpha) for x in (chosen, rejected)]
    delta = scores[0] - scores[1]
    match loss_type:
        case "sigmoid" | "sigmoid_norm" | "simpo":
            margin = simpo_gamma if loss_type == "simpo" else 0.0
            losses = sigmoid_loss(delta, beta, label_smoothing, margin)
        case "robust":
            losses = robust_loss(delta, beta, label_smoothing)
        case "hinge":
            losses = hinge_loss(delta, beta)
        case "ipo" | "ipo_sum":
            losses = ipo_loss(delta, beta)
        case "exo_pair":
            losses = exo_pair_loss(delta, beta, label_smoothing)
        case "discopop":
            losses = discopop_loss(delta, beta, discopop_tau)
        case _:
            losses = _OF_BOTH_RATIOS[loss_type](chosen, rejected, beta)
    return losses, beta * chosen.detach(), beta * rejected.detach()


def ld_dpo_weights(token_index: Tensor, public_lengths: Tensor, alpha: float) -> Tensor:
    """Return per-token weights [T], 1 up to the pair's shorter length and alpha beyond it: LD-DPO (2409.06411).

    token_index [T] counts from 0 in each completion; public_lengths [T] is min(n_w, n_l) of the token's pair. Sum
    weight * logp instead of logp, for the policy and the reference, as trl's `ld_alpha` does (trl < 1.0 and
    LLaMA-Factory's `ld_alpha` weight only the policy). alpha = 1 is plain DPO; outside of [0, 1] it is refused.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"the LD-DPO alpha is {alpha} but must lie in [0, 1]; 1 is plain DPO")
    weights = torch.ones_like(token_index, dtype=torch.float32)
    return weights.masked_fill(token_index >= public_lengths, alpha)
