"""The pairwise preference losses, each as one case of log-ratios.

Shapes: every tensor is [N], one value per pair. Notation: S = summed log-probability of a completion, n its length,
r = S_policy - S_reference, w chosen, l rejected, D = r_w - r_l, b = beta, e = label smoothing, s = sigmoid.
Each loss names its paper and what it is called in TRL ("trl") and LLaMA-Factory ("lf"); where no "lf" name is given,
LLaMA-Factory does not have it. A new type needs one more case here and its name in DPO_LOSS_TYPES.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import check_shapes, takes_tensors

MAX_EXPONENT = 40.0  # e^40 and its square fit float32, so one extreme pair cannot make the gradient norm infinite
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def preference_loss(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    delta: Tensor,
    beta: float,
    e: float,
    gamma: float,
    tau: float,
    mean_reward: float | Tensor,
) -> Tensor:
    """Return one of DPO_LOSS_TYPES for each pair, from r_w, r_l and D; each case says what its other arguments are."""
    z = beta * delta
    match name:
        case "robust":
            # [-(1-e) log s(b D) + e log s(-b D)] / (1 - 2e): unbiased under flipped labels (2403.00409; trl "robust").
            # It is unbounded below; negative values are correct.
            smoothed = -(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)
            return smoothed / (1 - 2 * e)
        case "hinge":
            # max(0, 1 - b D): SLiC (2305.10425) as in RSO (2309.06657; trl and lf "hinge").
            return F.relu(1 - z)
        case "ipo" | "ipo_sum":
            # (D - 1/(2b))^2 (2310.12036, eq. 17). With D of length-normalised ratios it is "ipo" (trl and lf, confirmed
            # by the authors); with D of sums it is OpenRLHF's IPO, here "ipo_sum".
            return (delta - 1 / (2 * beta)).square()
        case "exo_pair":
            # q_w (log q_w - log(1-e)) + q_l (log q_l - log e), q_w = s(b D) = 1 - q_l (2402.00856; trl "exo_pair").
            # It needs e > 0: at e = 0 the value is infinite.
            above = torch.sigmoid(z) * (F.logsigmoid(z) - math.log1p(-e))
            return above + torch.sigmoid(-z) * (F.logsigmoid(-z) - math.log(e))
        case "nca_pair":
            # -log s(b r_w) - (log s(-b r_w) + log s(-b r_l)) / 2 (2402.05369; trl "nca_pair").
            z_w, z_l = beta * chosen, beta * rejected
            return -F.logsigmoid(z_w) - 0.5 * F.logsigmoid(-z_w) - 0.5 * F.logsigmoid(-z_l)
        case "bco_pair":
            # -log s(b r_w - d) - log s(-(b r_l - d)), d the running mean of all rewards b r (2404.04656; lf "bco_pair";
            # trl "bco_pair" up to version 0.28). From 1.0 on trl's d is 0.
            below = mean_reward - beta * rejected
            return -F.logsigmoid(beta * chosen - mean_reward) - F.logsigmoid(below)
        case "sppo_hard":
            # (r_w - 1/(2b))^2 + (r_l + 1/(2b))^2 (2405.00675, hard labels; trl "sppo_hard").
            return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
        case "apo_zero":
            # 1 - s(b r_w) + s(b r_l): raise the chosen, lower the rejected (2408.06266, eq. 7; trl "apo_zero").
            return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            # s(b r_w) + 1 - s(b D): lower both, the rejected more (2408.06266, eq. 8; trl "apo_down").
            return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))
        case "discopop":
            # -(1-k) log s(z) + k exp(-z), z = b D, k = s(z / tau) (LRML, 2406.08414; trl "discopop", tau 0.05).
            # k exp(-z) is one exponential: for tau <= 1 its exponent is never positive, so it cannot overflow.
            large = torch.exp(F.logsigmoid(z / tau) - z)
            return -torch.sigmoid(-z / tau) * F.logsigmoid(z) + large
        case "orpo":
            # -a_w - b log s(log odds_w - log odds_l), a = S / n, log odds = a - log(1 - e^a) (2403.07691; lf "orpo";
            # trl's ORPOTrainer). The first term is the chosen answer's mean negative log-likelihood, per pair as in the
            # paper and lf (trl averages it over the batch's tokens).
            log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
            return -chosen - beta * F.logsigmoid(log_odds)
    # -(1-e) log s(b D - g) - e log s(-(b D - g)). e = 0, g = 0: DPO (2305.18290, eq. 7; trl and lf "sigmoid"). e > 0:
    # conservative DPO (Mitchell, cdpo.pdf; lf "sigmoid" with dpo_label_smoothing; trl 1.x ignores e here). D of
    # length-normalised ratios: trl "sigmoid_norm", Tulu 3 "dpo_norm" (2411.15124). D of mean log-probabilities and
    # g > 0: SimPO (2405.14734, eq. 6; lf and trl's CPOTrainer "simpo"). D of `aot_margins`: trl "aot".
    z = z - (gamma if name == "simpo" else 0.0)
    if not e:
        return -F.logsigmoid(z)
    return -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)


@takes_tensors()
def aot_margins(policy: Tensor, reference: Tensor) -> Tensor:
    """Return, for each of the policy's margins S_w - S_l [N], the reference's margin of the same rank.

    AOT, alignment via optimal transport (2406.05882; trl "aot"), compares the sorted margins of many pairs: its D is a
    policy margin minus what is returned here. trl sorts within each micro-batch.
    """
    check_shapes("policy and reference: every pair needs both, [N]", 1, policy, reference)
    ranks = policy.detach().argsort(stable=True).argsort()
    return reference.sort().values[ranks]


def divergence_score(ratio: Tensor, divergence: str, alpha: float = 0.5) -> Tensor:
    """Return f'(e^r) up to a constant, which replaces r in D: f-DPO (2309.16240, table 1; trl `f_divergence_type`).

    reverse_kl: r. forward_kl: 1 - e^-r. js: log 2 + log s(r). alpha: (e^{(a-1) r} - 1) / (a - 1) (trl 1.x; its a is one
    minus the paper's). Exponents are cut at 40. Raises ValueError on an unknown divergence or alpha = 1.
    """
    if divergence == "reverse_kl":
        return ratio
    if divergence == "forward_kl":
        return -torch.expm1((-ratio).clamp(max=MAX_EXPONENT))
    if divergence == "js":
        return math.log(2.0) + F.logsigmoid(ratio)
    if divergence != "alpha":
        raise ValueError(
            f"f_divergence is {divergence!r} but must be one of {', '.join(DIVERGENCES)}"
        )
    if alpha == 1:
        raise ValueError(
            "f_alpha is 1, where the alpha divergence is the reverse KL; set f_divergence to 'reverse_kl'"
        )
    return torch.expm1(((alpha - 1) * ratio).clamp(max=MAX_EXPONENT)) / (alpha - 1)


def log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - e^a) for a <= 0 without losing digits at either end; a is kept one rounding unit below 0."""
    value = value.clamp(max=-torch.finfo(value.dtype).eps)
    half = -math.log(2.0)
    # each branch gets only arguments within its range: an infinite gradient of the unused branch would become nan
    near = torch.log(-torch.expm1(value.clamp(min=half)))
    far = torch.log1p(-torch.exp(value.clamp(max=half)))
    return torch.where(value > half, near, far)
