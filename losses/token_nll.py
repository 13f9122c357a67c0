"""Token losses of pre-training and fine-tuning.

Shapes: every argument has one value per token, in any common shape (packed [T] or padded [N, T]).
Most functions return one value per token; `weighted_sum` turns them into the (sum, count) pair that an exact mean over
all micro-batches and ranks needs.
"""

from torch import Tensor

from .precision import at_least_float32, check_shapes, takes_tensors


@takes_tensors("weights")
def token_nll(logps: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum_t w_t * -logps_t, sum_t w_t), two scalars; add both up over the whole step before dividing.

    logps and weights have one shape. Tokens of weight 0 contribute neither value nor gradient, whatever their
    log-probability is. If all weights are 0, the sum is a zero that still carries a gradient of zeros.
    """
    return weighted_sum(-logps, weights)


@takes_tensors("weights")
def weighted_sum(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum_t w_t * values_t, sum_t w_t), two scalars, of values and weights of one shape.

    Values of weight 0 are ignored, even if they are not finite. Raises ValueError if the shapes differ.
    """
    rule = "token values and weights: give one weight each"
    values, weights = check_shapes(rule, None, values, weights)
    weights = weights.to(values.dtype)
    # masked_fill and not torch.where, which would copy the 0 to a GPU and make the host wait
    return (values.masked_fill(weights == 0, 0) * weights).sum(), weights.sum()


@takes_tensors()
def label_smoothed_nll(
    logps: Tensor, lse: Tensor, mean_logit: Tensor, label_smoothing: float
) -> Tensor:
    """Return (1 - e) * -logps + e * (lse - mean_logit) per token, in the one shape of all three.

    The second term is the mean over the vocabulary of -log p_v (Szegedy et al., 1512.00567;
    the same as `label_smoothing` of torch's cross-entropy). Raises ValueError if shapes differ or unless 0 <= e < 1.
    """
    logps, lse, mean_logit = check_shapes(
        "logps, lse and mean_logit", None, logps, lse, mean_logit
    )
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but must be at least 0 and below 1"
        )
    return (label_smoothing - 1) * logps + label_smoothing * (lse - mean_logit)


@takes_tensors()
def dft_nll(logps: Tensor) -> Tensor:
    """Return -p_t * log p_t in the shape of logps, with p_t held constant: dynamic fine-tuning (2508.05629)."""
    logps = at_least_float32(logps)
    return -logps.detach().exp() * logps


@takes_tensors()
def z_loss(lse: Tensor, coefficient: float) -> Tensor:
    """Return coefficient * lse^2 per token, in the shape of lse, which keeps the logits' normaliser near 0.

    Source: PaLM (2204.02311, section 5; 1e-4 there). Raises ValueError if the coefficient is negative.
    """
    if coefficient < 0:
        raise ValueError(
            f"the z-loss coefficient is {coefficient} but must be at least 0 (0 switches it off)"
        )
    return coefficient * at_least_float32(lse).square()
