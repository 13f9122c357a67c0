"""Proximal policy optimisation (PPO): rewards, advantages and the clipped losses, as pure functions.

Shapes: N sequences, T tokens, packed [T] with cu_seqlens [N + 1] (sequence i is tokens cu_seqlens[i] ..
cu_seqlens[i + 1] - 1). Token losses return one value per token; the caller divides by a global count.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import check_shapes, takes_tensors

# beyond it a ratio is outside any clip range, and far beyond it the exponential overflows
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """Per-token policy losses, the probability ratios (detached), and 1 where clipping decided the loss, else 0."""

    losses: Tensor
    ratios: Tensor
    clipped: Tensor


class ValueLoss(NamedTuple):
    """Per-token value losses, and 1 where clipping decided the loss, else 0."""

    losses: Tensor
    clipped: Tensor


@takes_tensors("last_index", "has_eos")
def token_rewards(
    kl: Tensor,
    scores: Tensor,
    last_index: Tensor,
    kl_coefficient: float,
    *,
    missing_eos_penalty: float | None = None,
    has_eos: Tensor | None = None,
) -> Tensor:
    """Return R_t = -kl_coefficient * kl_t, plus the sequence's score at its last token: [T] (1909.08593, eq. 2).

    kl [T] per token, scores [N], last_index [N] int64: the last token of each answer, which is its EOS token if it has
    one, never the token after it. `missing_eos_penalty` is subtracted from the score of answers whose `has_eos` [N] is
    false. Raises ValueError for other shapes, and if it is set without has_eos.
    """
    (kl,) = check_shapes("kl: it must be [T], one value per token", 1, kl)
    scores, *_ = check_shapes(
        "scores and last_index (and has_eos): each answer needs one of both (of each), [N]",
        1,
        scores,
        last_index,
        has_eos,
    )
    # reading numbers from a GPU would make the host wait
    for last in () if last_index.is_cuda else last_index.tolist():
        if not 0 <= last < len(kl):
            raise ValueError(f"last_index holds {last} but must lie in 0..{len(kl) - 1}")
    rewards = -kl_coefficient * kl
    scores = scores.to(rewards.dtype)
    if missing_eos_penalty is not None:
        if has_eos is None:
            raise ValueError(
                "missing_eos_penalty is set but has_eos is missing; pass which answers ended with EOS"
            )
        scores = scores.where(has_eos.bool(), scores - missing_eos_penalty)
    # positions are distinct (one per sequence), so the order of addition does not matter
    return rewards.index_add(0, last_index, scores)


@takes_tensors("cu_seqlens")
def packed_gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [T], detached: generalised advantage estimation (1506.02438, eq. 16).

    d_t = R_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  returns = A + V; V and A are 0 after a sequence's
    last token. The recurrence is solved for all sequences at once by doubling: after k rounds A_t is the sum of its
    first 2^k terms, so log2(T) rounds give all of them. rewards and values are packed [T], cu_seqlens is [N + 1].
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam {lam} but both must lie in [0, 1]")
    rewards, values = check_shapes(
        "rewards and values: both must be packed [T]", 1, rewards.detach(), values.detach()
    )
    check_shapes("cu_seqlens: it must be [N + 1], where the sequences begin", 1, cu_seqlens)
    T = rewards.shape[0]
    # reading numbers from a GPU would make the host wait
    if not cu_seqlens.is_cuda:
        bounds = cu_seqlens.tolist() or [0]
        if (bounds[0], bounds[-1]) != (0, T) or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens ends at {bounds[-1]} but there are {T} tokens; it must rise from 0, here {bounds[0]}, to "
                "the token count"
            )
    cu_seqlens = cu_seqlens.long()
    ends = cu_seqlens[1:].repeat_interleave(cu_seqlens.diff(), output_size=T).to(rewards.device)
    # tokens from here to the end of the sequence, this one included
    left = ends - torch.arange(T, device=rewards.device)
    advantages = rewards + gamma * values.roll(-1).masked_fill(left == 1, 0.0) - values
    reach, power = 1, gamma * lam
    # T is at least the longest length: further rounds add zeros
    while reach < T and power > 0.0:
        further = advantages.roll(-reach).masked_fill(left <= reach, 0.0)
        advantages = advantages + power * further
        reach, power = 2 * reach, power * power
    return advantages, advantages + values


@takes_tensors("mask")
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [N, T], detached: `packed_gae` of padded sequences.

    rewards, values and mask are [N, T]. A row's sequence is what its mask keeps, on whichever side the padding is;
    elsewhere both results are 0. Raises ValueError for other shapes, and for gamma or lam outside of [0, 1].
    """
    check_shapes(
        "rewards, values and mask: all must be padded [N, T]", 2, rewards, values, mask
    )
    kept = mask.bool()
    cu_seqlens = F.pad(kept.sum(1).cumsum(0), (1, 0))
    packed = packed_gae(rewards[kept], values[kept], cu_seqlens, gamma, lam)
    advantages, returns = (x.new_zeros(kept.shape).masked_scatter(kept, x) for x in packed)
    return advantages, returns


@takes_tensors("groups")
def group_advantages(
    scores: Tensor, groups: Tensor, kind: str = "group", *, scale: bool | str = True
) -> Tensor:
    """Return one advantage for each answer from the scores of all answers of its group: [N], detached.

    scores and groups are [N]: a group has the answers to one prompt, any number of them, and `groups` says which of
    them have the same number. An answer that is alone gets 0.
    "group": (r - mean) / (std + 1e-4) over the group, std with n - 1 (GRPO, 2402.03300, section 4.1.2); with `scale`
    "batch" the std is that of all scores (2508.08221), without it r - mean alone (Dr. GRPO, 2503.20783).
    "leave_one_out": r minus the mean of the other answers (RLOO, 2402.14740).
    The sums are taken in float64, so that equal scores give 0. Raises ValueError for another kind or scale, or other
    shapes.
    """
    rule = "scores and groups: they must be [N], one of both for each answer"
    scores, groups = check_shapes(rule, 1, scores.detach(), groups)
    if kind not in ("group", "leave_one_out"):
        raise ValueError(f"kind is {kind!r} but must be group or leave_one_out")
    if scale not in (True, False, "batch"):
        raise ValueError(f"scale is {scale!r} but must be True, False or 'batch'")
    dtype, scores = scores.dtype, scores.double()
    places = groups.unique(return_inverse=True)[1]

    def summed(values: Tensor) -> Tensor:
        """Return for each answer the sum of its group's values."""
        return torch.zeros_like(values).index_add(0, places, values)[places]

    sizes = summed(torch.ones_like(scores))
    centred, others = scores - summed(scores) / sizes, (sizes - 1).clamp(min=1)
    if kind == "leave_one_out":
        return (centred * sizes / others).to(dtype)
    if not scale:
        return centred.to(dtype)
    variance = summed(centred.square()) / others
    if scale == "batch":
        variance = (scores - scores.mean()).square().sum() / max(1, len(scores) - 1)
    return (centred / (variance.sqrt() + 1e-4)).to(dtype)


@takes_tensors()
def ppo_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    clip: float = 0.2,
    *,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    kind: str = "clip",
) -> PolicyLoss:
    """Return the loss of each token by its probability ratio rho = exp(logp - old_logp).

    logps, old_logps and advantages have one shape, that of the results: packed [T] or padded [N, T].
    "clip": max(-A rho, -A clip(rho, 1 - clip, 1 + clip_high)) (1707.06347, eq. 7). `clip_high` (default: clip) widens
    the upper side (DAPO, 2503.14476: 0.28). `dual_clip` c, above 1 + clip_high, limits the loss of tokens with A < 0
    to -c A (1912.09729; commonly 3; two-sided clipping, 2505.07291).
    "cispo": -A min(rho, 1 + clip_high) logp, where the ratio is a weight without gradient (2506.13585): a token beyond
    the bound still learns. It has no lower bound.
    The log-ratio is cut at +-20: further out its gradient is 0 already, or useless.
    Raises ValueError if the shapes differ, for another kind, or bounds out of range.
    """
    rule = "logps, old_logps and advantages"
    logps, old_logps, advantages = check_shapes(
        rule, None, logps, old_logps.detach(), advantages.detach()
    )
    high = clip if clip_high is None else clip_high
    if not 0 <= clip < 1 or high < 0:
        raise ValueError(
            f"clip is {clip} and clip_high {high}; clip must be in [0, 1) and clip_high at least 0"
        )
    if dual_clip is not None and (kind != "clip" or not dual_clip > 1 + high):
        raise ValueError(
            f"dual_clip is {dual_clip} but must be above 1 + clip_high, {1 + high:g} (commonly 3), and only the kind "
            "clip has it"
        )
    ratio = (logps - old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "cispo":
        losses = -advantages * ratio.detach().clamp(max=1 + high) * logps
        clipped = ratio > 1 + high
    elif kind == "clip":
        plain, cut = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + high)
        bounded = -advantages * ratio.clamp(max=dual_clip or torch.inf)
        losses = torch.maximum(bounded, cut)
        clipped = losses != plain
    else:
        raise ValueError(f"kind is {kind!r} but must be clip or cispo")
    return PolicyLoss(losses, ratio.detach(), clipped.to(losses.dtype))


@takes_tensors()
def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.2
) -> ValueLoss:
    """Return max((V - G)^2, (clip(V, V_old +- clip) - G)^2) / 2 per token; the plain square without a clip.

    values, old_values and returns have one shape, that of the results: packed [T] or padded [N, T]. Raises ValueError
    if they differ, or for a negative clip.
    """
    rule = "values, old_values and returns"
    values, old_values, returns = check_shapes(
        rule, None, values, old_values.detach(), returns.detach()
    )
    plain = (values - returns).square()
    if not clip:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain.detach()))
    if clip < 0:
        raise ValueError(
            f"the value clip is {clip} but must be at least 0 (0 or None switches it off)"
        )
    # a value within the range stays as it is, without a rounding that would count as clipped
    cut = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, cut), (cut > plain).to(plain.dtype))


@takes_tensors()
def kl_estimate(logps: Tensor, reference_logps: Tensor, kind: str = "k1") -> Tensor:
    """Return an estimate of KL(policy || reference) per token from samples of the policy, d = logp - reference logp.

    logps and reference_logps have one shape, that of the result: packed [T] or padded [N, T].
    k1: d (unbiased). k2: d^2 / 2 (low variance, biased). k3: e^-d - 1 + d (unbiased, never negative), with the exponent
    cut at 20. Source: Schulman, "Approximating KL divergence" (2020).
    """
    logps, reference_logps = check_shapes(
        "logps and reference_logps", None, logps, reference_logps
    )
    difference = logps - reference_logps
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return torch.expm1((-difference).clamp(max=MAX_LOG_RATIO)) + difference
    raise ValueError(f"kind is {kind!r} but must be k1, k2 or k3")


@takes_tensors("mask")
def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (values - mean) / sqrt(variance + 1e-8) where mask is set, 0 elsewhere.

    values and mask have one shape, that of the result. The moments are those of the population where mask is set, in
    float64. Equal values, a single one, or none give zeros and never nan; values where it is not set change nothing.
    """
    values, mask = check_shapes("values and mask", None, values, mask)
    left_out = ~mask.bool()
    count = mask.bool().sum().clamp(min=1)
    kept = values.double().masked_fill(left_out, 0.0)
    centred = (kept - kept.sum() / count).masked_fill(left_out, 0.0)
    variance = centred.square().sum() / count
    return (centred * (variance + 1e-8) ** -0.5).to(values.dtype)
