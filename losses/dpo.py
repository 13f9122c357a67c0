"""Direct preference optimisation (DPO) and its family of pairwise losses.

DPO in one sentence: raise the chosen answer's log-probability above the rejected one's, both relative to a reference.

Shapes: N pairs, one summed completion log-probability each; T packed tokens.
"""

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import check_shapes, takes_tensors
from .preference import aot_margins, divergence_score, preference_loss

DPO_LOSS_TYPES = (
    "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "simpo", "sigmoid_norm", "orpo",
    "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down", "discopop",
)  # fmt: skip
REFERENCE_FREE = ("simpo", "orpo")
LENGTH_NORMALISED = ("ipo", "simpo", "sigmoid_norm", "orpo")
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "sigmoid_norm", "aot")
_WITH_DIVERGENCE = ("sigmoid", "robust", "hinge", "exo_pair", "discopop")
_ELSEWHERE = {
    "cdpo": "here it is 'sigmoid' with label_smoothing > 0",
    "dpo": "here it is 'sigmoid'",
    "dpo_norm": "here it is 'sigmoid_norm'",
    "kto_pair": "use kto_loss, or stage kto",
    "slic": "here it is 'hinge'",
    "rso": "here it is 'hinge'",
    "aot_pair": "here it is 'aot'",
    "rpo": "here it is 'sigmoid' and the negative log-likelihood of the chosen answers, dpo.sft_weight",
    "sft": "add the negative log-likelihood of the chosen answers yourself, or set dpo.sft_weight",
}


@takes_tensors("chosen_lengths", "rejected_lengths")
def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor | None,
    reference_rejected_logps: Tensor | None,
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    label_smoothing: float = 0.0,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    loss_weights: Sequence[float] = (),
    simpo_gamma: float = 0.5,
    discopop_tau: float = 0.05,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    bco_delta: float | Tensor = 0.0,
    aot_reference_margins: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, chosen_rewards, rejected_rewards), each [N]; the rewards are detached.

    All log-probabilities [N] are sums over the completion. `loss_type` is one of DPO_LOSS_TYPES, or a list of them
    whose losses are added with `loss_weights` (1 each if there are none); their equations and papers are in
    `losses.preference`. ipo, simpo, sigmoid_norm and orpo require the lengths [N] in completion tokens and divide by
    them (an empty completion counts as length 1). simpo and orpo use no reference, so both reference arguments may be
    None. A reward is beta times the log-ratio in the (first) loss: divided by the length for those four types, and the
    policy's log-probability alone for simpo and orpo. `label_smoothing` applies to sigmoid (which it makes cDPO),
    robust, exo_pair, simpo, sigmoid_norm and aot; `f_divergence` to sigmoid, robust, hinge, exo_pair and discopop.
    `bco_delta` is bco_pair's running mean of the rewards. aot sorts the margins of these N pairs, or compares each
    policy margin with the given `aot_reference_margins` (`aot_margins` of more pairs than these).
    Raises ValueError for other shapes, if an argument is out of range, and if label_smoothing or f_divergence applies
    to none of the losses. What else belongs to other losses is not read.
    """
    loss_types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    for name in loss_types:
        if name not in DPO_LOSS_TYPES:
            near = difflib.get_close_matches(name, DPO_LOSS_TYPES, 1)
            hint = _ELSEWHERE.get(name) or (f"did you mean {near[0]!r}?" if near else "")
            sentence = f"loss_type is {name!r} but must be one of {', '.join(DPO_LOSS_TYPES)}"
            raise ValueError(f"{sentence}; {hint}" if hint else sentence)
    if not loss_types or len(loss_weights) not in (0, len(loss_types)):
        raise ValueError(
            f"loss_type names {len(loss_types)} losses and loss_weights has {len(loss_weights)}; "
            "give each loss one weight"
        )
    if not beta > 0:
        raise ValueError(f"beta is {beta} but must be above 0")
    if label_smoothing and not set(loss_types) & set(_SMOOTHED):
        raise ValueError(
            f"label_smoothing is {label_smoothing} but loss_type {', '.join(loss_types)!r} has none; "
            f"set it to 0, or use {', '.join(_SMOOTHED)}"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but must be at least 0 and below 0.5 (0.5 is no preference)"
        )
    if "exo_pair" in loss_types and not label_smoothing:
        raise ValueError(
            "loss_type 'exo_pair' is infinite at label_smoothing 0; set it above 0, for example 0.001"
        )
    if "discopop" in loss_types and not 0 < discopop_tau <= 1:
        raise ValueError(
            f"discopop_tau is {discopop_tau} but must be above 0 and at most 1 (0.05 in the paper)"
        )
    if f_divergence != "reverse_kl" and not set(loss_types) & set(_WITH_DIVERGENCE):
        raise ValueError(
            f"f_divergence is {f_divergence!r} but loss_type {', '.join(loss_types)!r} has none; "
            f"use 'reverse_kl', or one of {', '.join(_WITH_DIVERGENCE)}"
        )
    *both_sides, aot_reference_margins = check_shapes(
        "policy and reference log-probabilities, lengths and aot_reference_margins: every pair needs one of each: give "
        "[N], sums over the tokens of each completion",
        1,
        policy_chosen_logps,
        reference_chosen_logps,
        chosen_lengths,
        policy_rejected_logps,
        reference_rejected_logps,
        rejected_lengths,
        aot_reference_margins,
    )
    # of each side: the policy's and the reference's log-probabilities, and the lengths
    of_chosen, of_rejected = both_sides[:3], both_sides[3:]
    if isinstance(bco_delta, Tensor):
        check_shapes("bco_delta: it must be one number []", 0, bco_delta)
    losses, rewards = [], []
    for name, weight in zip(loss_types, loss_weights or [1.0] * len(loss_types)):
        ratios = []
        for policy, reference, lengths in (of_chosen, of_rejected):
            ratio = policy
            if name not in REFERENCE_FREE:
                if reference is None:
                    raise ValueError(
                        f"loss_type {name!r} needs reference_chosen_logps and reference_rejected_logps; "
                        f"without a reference use {' or '.join(REFERENCE_FREE)}"
                    )
                ratio = ratio - reference
            if name in LENGTH_NORMALISED:
                if lengths is None:
                    raise ValueError(
                        f"loss_type {name!r} is length-normalised; pass chosen_lengths and rejected_lengths"
                    )
                ratio = ratio / lengths.clamp(min=1)
            ratios.append(ratio)
            rewards.append(beta * ratio.detach())
        chosen, rejected = ratios
        delta = chosen - rejected
        if name in _WITH_DIVERGENCE:
            scores = [divergence_score(ratio, f_divergence, f_alpha) for ratio in ratios]
            delta = scores[0] - scores[1]
        if name == "aot":
            margins = of_chosen[0] - of_rejected[0]
            if aot_reference_margins is None:
                aot_reference_margins = aot_margins(margins, of_chosen[1] - of_rejected[1])
            delta = margins - aot_reference_margins
        loss = preference_loss(
            name, chosen, rejected, delta, beta, label_smoothing, simpo_gamma, discopop_tau, bco_delta
        )  # fmt: skip
        losses.append(weight * loss)
    return sum(losses[1:], losses[0]), rewards[0], rewards[1]


@takes_tensors("token_index", "public_lengths")
def ld_dpo_weights(token_index: Tensor, public_lengths: Tensor, alpha: float) -> Tensor:
    """Return per-token weights [T], 1 up to the pair's shorter length and alpha beyond it: LD-DPO (2409.06411).

    token_index [T] counts from 0 in each completion; public_lengths [T] is min(n_w, n_l) of the token's pair. Sum
    weight * logp instead of logp, for the policy and the reference, as trl's `ld_alpha` does (trl < 1.0 and
    LLaMA-Factory's `ld_alpha` weight only the policy). alpha = 1 is plain DPO; outside of [0, 1] it is refused.
    """
    check_shapes(
        "token_index and public_lengths: both must be [T]", 1, token_index, public_lengths
    )
    if not 0 <= alpha <= 1:
        raise ValueError(f"the LD-DPO alpha is {alpha} but must lie in [0, 1]; 1 is plain DPO")
    weights = torch.ones_like(token_index, dtype=torch.float32)
    return weights.masked_fill(token_index >= public_lengths, alpha)
