"""The parts of a layer as single graph nodes that keep little: what is cheap is computed again.

    linear        x -> W x + b                               keeps x
    project       hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                  where heads have norms: q and k before these, too
    feed_forward  hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                  in tiles: keeps hidden only, backward runs norm, gate and up again, never down

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. They read the weights directly, so they stand in for the modules only where
these are plain (`is_plain`): adapters, hooks and partitioned parameters need a call of the module, which uses `linear`.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from losses.precision import has_wide_products, wide_product
from models.fused import (
    activate,
    activate_backward,
    rms_norm,
    rms_norm_backward,
    rotate_backward,
    rotate_pair,
)
from ulysses.memory.tiling import tiles

Rope = tuple[Tensor, Tensor]


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has a hook of any kind, which only a call of the module itself would run."""
    forward = module._forward_hooks, module._forward_pre_hooks
    return any((*forward, module._backward_hooks, module._backward_pre_hooks))


def is_plain(*modules: Any) -> bool:
    """Return whether the modules' weights may be read directly: classes of ours, without hooks, not partitioned."""
    return all(
        type(m).__module__.startswith("models.") and not is_watched(m) and m.weight.numel() > 0
        for m in modules
    )


class ProjectWeights(NamedTuple):
    """Hold the norm, the three projections and the norms of heads; biases and these are None where there are none."""

    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    head_dim: int
    eps: float
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


class FeedForwardWeights(NamedTuple):
    """Hold the norm and the three matrices of the MLP."""

    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    eps: float


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do torch's linear for rows x [S, D]; torch's own keeps a view of the weight, this keeps the weight."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            grad @ weight if for_x else None,
            grad.t() @ x if for_weight else None,
            _column_sums(grad) if for_bias else None,
        )


def project(
    hidden: Tensor, weights: ProjectWeights, rope: Rope
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in."""
    return _Project.apply(hidden, *rope, *weights)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, cos: Tensor, sin: Tensor, *weights: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        w = ProjectWeights(*weights)
        x = rms_norm(hidden, w.norm, w.eps)
        query, key, value = (
            F.linear(x, matrix, bias).unflatten(1, (-1, w.head_dim))
            for matrix, bias in zip(w[1:4], w[4:7])
        )
        plain = w.query_norm is None
        kept = () if plain else (query, key, w.query_norm, w.key_norm)
        ctx.save_for_backward(hidden, *w[:4], cos, sin, *kept)
        ctx.eps = w.eps
        return *rotate_pair(query, key, cos, sin, *w[8:], in_place=plain), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm, query, key, value, *rotated = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:10]
        to_query, to_key, *of_norms = rotate_backward(grads[0], grads[1], ctx.eps, *rotated)
        flat = [g.flatten(1) for g in (to_query, to_key, grads[2])]
        x = rms_norm(hidden, norm, ctx.eps)
        grads_matrices = [g.t() @ x if want else None for g, want in zip(flat, wanted[:3])]
        del x
        biases = [_column_sums(g) if want else None for g, want in zip(flat, wanted[3:])]
        grad_x = (flat[0] @ query).addmm_(flat[1], key).addmm_(flat[2], value)
        grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, norm, ctx.eps)
        grads_weights = grad_norm.to(norm.dtype), *grads_matrices, *biases
        return grad_hidden, None, None, *grads_weights, None, None, *(of_norms or (None, None))


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def feed_forward(hidden: Tensor, weights: FeedForwardWeights) -> Tensor:
    """Return hidden + MLP(norm(hidden)) for rows [S, D]; backward keeps hidden, gate and up."""
    return _FeedForward.apply(hidden, *weights)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Any) -> Tensor:
        w = FeedForwardWeights(*weights)
        x = rms_norm(hidden, w.norm, w.eps)
        gate = F.linear(x, w.gate)
        up = F.linear(x, w.up)
        del x
        out = F.linear(activate(gate, up), w.down).add_(hidden)
        ctx.save_for_backward(hidden, gate, up, *w[:4])
        ctx.eps = w.eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, *weights = ctx.saved_tensors
        w = FeedForwardWeights._make([*weights, ctx.eps])
        grads = feed_forward_gradients(hidden, grad, w, len(hidden), (gate, up))
        return *grads, None


@torch.no_grad()
def feed_forward_tiles(hidden: Tensor, weights: FeedForwardWeights, tile: int) -> Tensor:
    """Return `feed_forward` in tiles of rows, without a graph."""
    if tile >= len(hidden):
        return feed_forward(hidden, weights)
    out = torch.empty_like(hidden)
    for part in tiles(len(hidden), tile):
        x = rms_norm(hidden[part], weights.norm, weights.eps)
        active = activate(F.linear(x, weights.gate), F.linear(x, weights.up))
        torch.add(hidden[part], F.linear(active, weights.down), out=out[part])
        del x, active
    return out


@torch.no_grad()
def feed_forward_gradients(
    hidden: Tensor,
    grad: Tensor,
    w: FeedForwardWeights,
    tile: int,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of hidden and of the four weights, None for a frozen one.

    Several tiles' sums are float32 or better. `kept` holds gate and up if all rows are one tile.
    """
    whole = tile >= len(hidden)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    grad_norm = grad_gate = grad_up = grad_down = None
    for part in tiles(len(hidden), tile):
        rows, grad_rows = hidden[part], grad[part]
        x = rms_norm(rows, w.norm, w.eps)
        gate, up = kept or (F.linear(x, w.gate), F.linear(x, w.up))
        to_gate, to_up, active = activate_backward(grad_rows @ w.down, gate, up)
        del gate, up
        grad_down = _add_product(grad_down, w.down, grad_rows, active, whole)
        del active
        grad_gate = _add_product(grad_gate, w.gate, to_gate, x, whole)
        grad_up = _add_product(grad_up, w.up, to_up, x, whole)
        grad_x = (to_gate @ w.gate).addmm_(to_up, w.up)
        del x, to_gate, to_up
        done, part_norm = rms_norm_backward(grad_x, rows, w.norm, w.eps, residual=grad_rows)
        del grad_x
        if w.norm.requires_grad:
            grad_norm = part_norm if grad_norm is None else grad_norm.add_(part_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    sums = (grad_norm, grad_gate, grad_up, grad_down)
    found = [None if s is None else s.to(p.dtype) for s, p in zip(sums, w[:4])]
    return grad_hidden, *found


def _add_product(
    total: Tensor | None, weight: Tensor, grad: Tensor, rows: Tensor, whole: bool
) -> Tensor | None:
    """Return the sum of a trainable weight's gradient with grad.T @ rows added.

    It is kept in float32 or better unless one tile is the whole.
    """
    if not weight.requires_grad:
        return None
    wide = rows.dtype if whole else torch.promote_types(rows.dtype, torch.float32)
    left = grad.t()
    if not has_wide_products(rows):
        left, rows = left.to(wide), rows.to(wide)
    return wide_product(left, rows, wide, total)
