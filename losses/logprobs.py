"""Log-probabilities of targets from hidden states, without ever holding all logits.

    hidden [M, D] --+
                    +--> logits [rows, V], one tile of rows at a time --> logps [M], lse [M] (entropy, mean logit)
    weight [V, D] --+                     (dropped, recomputed tile by tile in backward)

Shapes: M projected positions, D width, V vocabulary, R rows of one tile of logits.

A step costs two matrix products for the logits (one in forward, one more in backward) and two for the gradients. Saved
for backward are the inputs and one log-sum-exp per row. The log-sum-exp is always float32 (float64 for float64
inputs): a bfloat16 log-softmax over 128,256 tokens is off by more than 1 in a sum over 256 tokens.

With the weights w of a loss nll = sum_m w_m (-log p_m), forward has all that the gradient by the logits needs,
w (p - onehot): it computes the gradients of hidden and weight from its own tiles, and backward only multiplies them by
the gradient of nll.
So the logits are computed once (Liger Kernel, 2410.10989). A loss that reads all logits of a position hands in a
function of one tile instead, which returns its values and their gradient by the logits (losses/distill.py).
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from . import logprobs_triton
from .precision import (
    at_least_float32,
    has_wide_products,
    refuse_second_derivative,
    takes_tensors,
    wide_product,
)
from .token_nll import weighted_sum

IGNORE_INDEX = -100
# Bytes of the float32 logits of one tile; a large tile means that the weight gradient is rewritten less often.
CUDA_TILE_BYTES = 1 << 30
CPU_TILE_BYTES = 64 << 20
# A loss of all logits may hold this many float32 tiles at a time, its gradient included; so its tiles are smaller.
LOSS_TILES = 6


class LogProbs(NamedTuple):
    """What a vocabulary head returns: one value per position, float32 (float64 for float64 inputs).

    logps: log-probability of the target. entropy: -sum_v p_v log p_v. lse: log-sum-exp of the (tempered) logits.
    mean_logit: mean of the logits over the vocabulary, so that `lse - mean_logit` is the mean over v of -log p_v.
    nll: sum of loss_weights * -logps, a scalar, or of loss_weights * the values of `tile_loss`. Fields that were not
    asked for are None. All carry gradients, except that logps carry none if nll was asked for.
    """

    logps: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None
    nll: Tensor | None = None


class Tile(NamedTuple):
    """What a loss of all logits reads at a time: `rows` of the M positions and their logits [R, V].

    targets [R] (0 where a position is ignored), their logps [R], and the log-sum-exp of the logits, lse [R]. Logits,
    logps and lse are float32 (float64 for float64 inputs). The loss may overwrite the logits.
    """

    rows: slice
    logits: Tensor
    targets: Tensor
    logps: Tensor
    lse: Tensor


# It returns the loss of each row [R], and the gradient of the loss by the logits [R, V].
TileLoss = Callable[[Tile], tuple[Tensor, Tensor]]


class HeadOptions(TypedDict, total=False):
    """What `linear_logprobs` may be asked for by the callers of a model."""

    entropy: bool
    lse: bool
    mean_logit: bool
    temperature: float
    loss_weights: Tensor
    tile_loss: TileLoss


@takes_tensors("targets", "loss_weights")
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    lse: bool = False,
    mean_logit: bool = False,
    temperature: float = 1.0,
    tile_rows: int | Literal["auto"] = "auto",
    loss_weights: Tensor | None = None,
    tile_loss: TileLoss | None = None,
) -> LogProbs:
    """Compute log softmax(hidden @ weight.T / temperature)[targets] in tiles of rows.

    hidden [M, D] and weight [V, D] have one floating dtype, targets [M] int64 (-100: log-probability 0, no gradient;
    the entropy, lse and mean_logit of such a row are still those of its logits, so that their losses need weights).
    M may be 0; the result still connects hidden and weight to the graph, with zero gradients.
    Gradients of hidden and weight are exact under any upstream gradient on any output. The weight gradient is
    accumulated in float32 and returned in the weight's dtype. `tile_rows` is the most rows that one tile of logits may
    have; "auto" limits its bytes instead (1 GiB on CUDA, 64 MiB on CPU). On CUDA the host never waits for the device.
    `loss_weights` [M], which get no gradient, ask for `nll`. Its gradient is computed at once if gradients are enabled,
    and held until backward: as much as hidden, and a float32 (float64) value for each one of the weight.
    In float16 weights far below 1 would round it to 0, so give weights of about 1 and divide nll by the count.
    `tile_loss` replaces the -logps in it by a loss of all logits of a row; it runs in forward only.
    Raises ValueError if a shape, a dtype, a target (checked on CPU only) or a setting is wrong.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)} "
            "but linear_logprobs needs [M, D] and [V, D]; flatten the leading axes"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {targets.dtype} {list(targets.shape)} "
            f"but must be int64 [{hidden.shape[0]}], one per row of hidden"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype} but both must have one floating dtype; cast one"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature} but must be above 0; greedy decoding needs no log-probabilities"
        )
    if tile_rows != "auto" and (isinstance(tile_rows, str) or tile_rows < 1):
        raise ValueError(
            f'tile_rows is {tile_rows!r} but must be "auto" or a number of rows, at least 1'
        )
    if loss_weights is not None:
        if loss_weights.shape != targets.shape:
            raise ValueError(
                f"loss_weights are {list(loss_weights.shape)} but must be {list(targets.shape)}, one per target"
            )
        if entropy or lse or mean_logit:
            raise ValueError(
                "loss_weights give the gradient of nll alone; leave them out, or entropy, lse and mean_logit"
            )
        # asked here, because inside the Function gradients are always off
        if not torch.is_grad_enabled():
            hidden, weight = hidden.detach(), weight.detach()
    if tile_loss is not None and (loss_weights is None or temperature != 1.0):
        raise ValueError("tile_loss needs loss_weights, and logits of temperature 1")
    if targets.device.type == "cpu" and targets.numel():  # on CUDA the host would have to wait
        bad = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= weight.shape[0]))
        if bad.any():
            raise ValueError(
                f"targets hold {int(targets[bad][0])} "
                f"but must lie in 0..{weight.shape[0] - 1}, or be {IGNORE_INDEX} (ignored)"
            )
    if tile_rows == "auto":
        row_bytes = weight.shape[0] * torch.promote_types(hidden.dtype, torch.float32).itemsize
        row_bytes *= 1 if tile_loss is None else LOSS_TILES
        limit = CUDA_TILE_BYTES if hidden.is_cuda else CPU_TILE_BYTES
        tile_rows = equal_tiles(hidden.shape[0], row_bytes, limit)
    if loss_weights is not None:
        logps, nll = _WeightedNll.apply(
            hidden, weight, targets, loss_weights, tile_loss, temperature, tile_rows
        )
        return LogProbs(logps, nll=nll)
    wanted = entropy, lse, mean_logit
    return LogProbs(
        *_LinearLogProbs.apply(hidden, weight, targets, temperature, tile_rows, *wanted)
    )


def equal_tiles(count: int, row_bytes: int, tile_bytes: int) -> int:
    """Return the rows of a tile if `count` rows are cut into the fewest equal ones, in whole blocks of 128 rows."""
    bound = tile_bytes // row_bytes
    limit = bound // 128 * 128 or max(bound, 1)
    tiles = max(1, -(-count // limit))
    blocks = max(1, -(-count // (tiles * 128)))
    return min(limit, blocks * 128)


class _WeightedNll(torch.autograd.Function):
    """The log-probabilities and their weighted sum nll, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_weights: Tensor,
        tile_loss: TileLoss | None,
        temperature: float,
        tile_rows: int,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(ctx, hidden, weight, targets, temperature, tile_rows)
        logps, values = tiles.logps, torch.empty_like(tiles.logps)
        loss_weights = loss_weights.to(logps.dtype).masked_fill(tiles.ignored, 0.0)
        scale = loss_weights / temperature
        dtype = tiles.weight.dtype if any(ctx.needs_input_grad) else None
        for tile in tiles:
            rows = tile.rows
            if tile_loss is None:
                gradient = _write_logps(tile, dtype)
            else:
                _write_logps(tile)
                values[rows], by_logits = tile_loss(tile)
                gradient = by_logits.to(tiles.weight.dtype)
                del by_logits
            del tile
            if gradient is not None:
                tiles.add(rows, gradient, scale)
            del gradient
        logps.masked_fill_(tiles.ignored, 0.0)
        ctx.mark_non_differentiable(logps)
        ctx.save_for_backward(tiles.hidden_gradient, tiles.weight_gradient)
        ctx.dtypes = hidden.dtype, weight.dtype
        nll, _ = weighted_sum(-logps if tile_loss is None else values, loss_weights)
        return logps, nll

    @staticmethod
    def backward(ctx: Any, _: Tensor, of_nll: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        # a scalar would be rounded to the gradient's dtype first
        factor = of_nll[None]
        grads = [
            g if g is None else torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return *grads, *[None] * 5


class _LinearLogProbs(torch.autograd.Function):
    """The log-probabilities, and what else is wanted of the logits, which backward computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        tile_rows: int,
        want_entropy: bool,
        want_lse: bool,
        want_mean: bool,
    ) -> tuple[Tensor | None, ...]:
        tiles = _Tiles(ctx, hidden, weight, targets, temperature, tile_rows)
        logps, lse = tiles.logps, tiles.lse
        entropy = torch.empty_like(lse) if want_entropy else None
        mean = torch.empty_like(lse) if want_mean else None
        for tile in tiles:
            if entropy is None and mean is None:
                _write_logps(tile)
            else:
                if mean is not None:
                    mean[tile.rows] = tile.logits.mean(-1)
                logp = _write_logps_in_torch(tile)
                if entropy is not None:  # the logits are no longer needed
                    entropy[tile.rows] = -torch.exp(logp, out=tile.logits).mul_(logp).sum(-1)
                del logp
            del tile
        logps.masked_fill_(tiles.ignored, 0.0)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.tile_rows = temperature, tile_rows
        ctx.set_materialize_grads(False)
        # the caller may change the returned log-sum-exp in place, so the saved one is another tensor
        return logps, entropy, lse.clone() if want_lse else None, mean

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        g_logp, g_entropy, g_lse, g_mean = upstream
        tiles = _Tiles(ctx, hidden, weight, targets, ctx.temperature, ctx.tile_rows, lse)
        if g_logp is None:
            g_logp = torch.zeros_like(lse)
        g_logp = g_logp.masked_fill(tiles.ignored, 0.0)
        only_logps = g_entropy is None and g_lse is None and g_mean is None
        # in the common case the row's gradient scales the small operands, which saves a pass over the tile
        scale = (-g_logp if only_logps else torch.ones_like(lse)) / ctx.temperature
        for tile in tiles:
            if only_logps:
                gradient = one_hot_difference(tile, tiles.weight.dtype)
            else:
                gradient = _logit_gradient(tile, g_logp, g_entropy, g_lse, g_mean, entropy)
                gradient = gradient.to(tiles.weight.dtype)
            rows = tile.rows
            del tile
            tiles.add(rows, gradient, scale)
            del gradient
        grad_weight = tiles.weight_gradient
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return tiles.hidden_gradient, grad_weight, *[None] * 6


class _Tiles:
    """The logits in tiles of rows, and what is written, or added up, over the tiles.

    dtype: float32, or float64 for float64 inputs. logps, lse [M]: forward writes into them; in backward lse is given.
    hidden_gradient [M, D], weight_gradient [V, D]: None where none is needed. The weight's stays in `dtype`.
    """

    def __init__(
        self,
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        tile_rows: int,
        lse: Tensor | None = None,
    ) -> None:
        self.hidden, self.weight = hidden, operand(weight)
        self.temperature, self.tile_rows = temperature, tile_rows
        self.ignored = targets < 0
        self.targets = targets.masked_fill(self.ignored, 0)
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.logps = hidden.new_empty(len(hidden), dtype=self.dtype)
        self.lse = torch.empty_like(self.logps) if lse is None else lse
        need_hidden, self.need_weight, *_ = ctx.needs_input_grad
        self.hidden_gradient = torch.empty_like(hidden) if need_hidden else None
        # the first tile's product makes it, if there is a tile
        no_rows = self.need_weight and not len(hidden)
        self.weight_gradient = torch.zeros_like(weight) if no_rows else None

    def __iter__(self) -> Iterator[Tile]:
        for start in range(0, len(self.hidden), self.tile_rows):
            rows = slice(start, start + self.tile_rows)
            # no variable here keeps the tile alive
            yield Tile(
                rows,
                tile_logits(self.hidden[rows], self.weight, self.temperature, self.dtype),
                self.targets[rows],
                self.logps[rows],
                self.lse[rows],
            )

    def add(self, rows: slice, gradient: Tensor, scale: Tensor) -> None:
        """Add one tile's share, from its gradient by the logits [R, V] before the factor `scale` [M] of each row."""
        factors = scale[rows, None]
        if self.hidden_gradient is not None:
            product = wide_product(gradient, self.weight, self.dtype)
            self.hidden_gradient[rows] = product.mul_(factors)
            del product
        if self.need_weight:
            hidden = (self.hidden[rows] * factors).to(gradient.dtype)
            total = self.weight_gradient
            self.weight_gradient = wide_product(gradient.t(), hidden, self.dtype, total)


def _write_logps(tile: Tile, dtype: torch.dtype | None = None) -> Tensor | None:
    """Write the tile's lse and logps. With a dtype, return p - onehot(target) in it, which may overwrite the logits."""
    if _takes_kernel(tile.logits):
        return logprobs_triton.log_softmax_at(
            tile.logits, tile.targets, tile.lse, tile.logps, dtype
        )
    _write_logps_in_torch(tile)
    return None if dtype is None else one_hot_difference(tile, dtype)


def _write_logps_in_torch(tile: Tile) -> Tensor:
    """Write the tile's lse and logps, and return log p [R, V] of the whole vocabulary."""
    top, at = tile.logits.max(-1)
    logp = torch.log_softmax(tile.logits, -1)
    # lse comes from the largest logit: log p is small there, so no digits are lost even if logits are huge
    tile.lse.copy_(top - logp.gather(1, at[:, None])[:, 0])
    tile.logps.copy_(logp.gather(1, tile.targets[:, None])[:, 0])
    return logp


def one_hot_difference(tile: Tile, dtype: torch.dtype) -> Tensor:
    """Return p - onehot(target) [R, V] in `dtype`, from the tile's logits, which it may overwrite, and its lse.

    The caller multiplies the smaller operands of the products by each row's upstream gradient. The target's entry is
    computed as expm1(log p), because rounding p first would lose 1 - p where p is close to 1.
    """
    logits, targets, lse = tile.logits, tile.targets[:, None], tile.lse
    if _takes_kernel(logits):
        # the kernel computes the log-sum-exp and the log-probabilities again; nobody reads them
        return logprobs_triton.log_softmax_at(  # type: ignore[return-value]
            logits, tile.targets, torch.empty_like(lse), torch.empty_like(lse), dtype
        )
    at_target = logits.gather(1, targets).sub_(lse[:, None]).expm1_()
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    torch.exp(logits.sub_(lse[:, None]), out=out)
    return out.scatter_(1, targets, at_target.to(dtype))


def _takes_kernel(logits: Tensor) -> bool:
    """Return whether the Triton kernel, which reads a tile once, takes these logits: float32 on a GPU."""
    is_float32 = logits.is_cuda and logits.dtype == torch.float32
    return is_float32 and logprobs_triton.triton is not None


def _logit_gradient(
    tile: Tile,
    g_logp: Tensor,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    g_mean: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """Return d/dlogits = p (g_lse - g_logp - g_entropy (log p + H)) + g_mean / V + g_logp onehot(target), for a tile.

    The tile's logits are overwritten. The gradients and the entropy are of all positions [M].
    """
    rows, targets = tile.rows, tile.targets[:, None]
    logp, g_logp = tile.logits.sub_(tile.lse[:, None]), g_logp[rows, None]
    at_logp = logp.gather(1, targets)
    at_factor = torch.zeros_like(at_logp) if g_lse is None else g_lse[rows, None]
    out, factor = logp.exp(), at_factor - g_logp
    if g_entropy is not None and entropy is not None:
        g_entropy, entropy = g_entropy[rows, None], entropy[rows, None]
        at_factor = at_factor - g_entropy * (at_logp + entropy)
        factor = logp.add_(entropy).mul_(-g_entropy).add_(factor)
    out.mul_(factor)
    at_target = at_logp.exp() * at_factor - g_logp * at_logp.expm1()
    if g_mean is not None:
        flat = g_mean[rows, None] / logp.shape[1]
        out.add_(flat)
        at_target.add_(flat)
    return out.scatter_(1, targets, at_target)


def operand(weight: Tensor) -> Tensor:
    """Return the weight in the dtype of the matrix products: half precision only where their results are float32."""
    return weight.detach() if has_wide_products(weight) else at_least_float32(weight.detach())


def tile_logits(
    hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    logits = wide_product(hidden.to(weight.dtype), weight.t(), dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)
