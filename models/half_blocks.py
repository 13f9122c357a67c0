"""The parts of a layer as single graph nodes that keep little: what is cheap is computed again.

    LinearNode       x -> W x + b                               keeps x
    ProjectNode      hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                     where heads have norms: q and k before these, too
    FeedForwardNode  hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                     in tiles: keeps hidden only, backward runs norm, gate and up again, never down

Their `apply` takes what `forward` does, except ctx.

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. They read the weights directly, so they stand in for the modules only where
these are plain (`is_plain`): adapters, hooks and partitioned parameters need a call of the module.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from typing import Any

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


class LinearNode(torch.autograd.Function):
    """Do torch's linear for rows x [S, D]; torch's own keeps a view of the weight, this keeps the weight."""

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


class ProjectNode(torch.autograd.Function):
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in.

    `weights` are the three matrices, their biases or None, and the norms of heads where there are any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_dim: int,
        eps: float,
        norm: Tensor,
        *weights: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        matrices, norms = weights[:3], weights[6:]
        x = rms_norm(hidden, norm, eps)
        query, key, value = (
            F.linear(x, matrix, bias).unflatten(1, (-1, head_dim))
            for matrix, bias in zip(matrices, weights[3:])
        )
        kept = (query, key, *norms) if norms else ()
        ctx.save_for_backward(hidden, norm, *matrices, cos, sin, *kept)
        ctx.eps = eps
        return *rotate_pair(query, key, cos, sin, eps, *norms, in_place=not norms), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm, query, key, value, *rotated = ctx.saved_tensors
        wanted = ctx.needs_input_grad[6:12]
        to_query, to_key, *of_norms = rotate_backward(grads[0], grads[1], ctx.eps, *rotated)
        flat = [g.flatten(1) for g in (to_query, to_key, grads[2])]
        x = rms_norm(hidden, norm, ctx.eps)
        grads_matrices = [g.t() @ x if want else None for g, want in zip(flat, wanted[:3])]
        del x
        biases = [_column_sums(g) if want else None for g, want in zip(flat, wanted[3:])]
        grad_x = (flat[0] @ query).addmm_(flat[1], key).addmm_(flat[2], value)
        grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, norm, ctx.eps)
        grads_weights = grad_norm.to(norm.dtype), *grads_matrices, *biases, *of_norms
        return grad_hidden, None, None, None, None, *grads_weights


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def mlp(
    hidden: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate and up of the normalised rows [S, F], and their MLP's product [S, D], without a graph."""
    x = rms_norm(hidden, norm, eps)
    gated, upward = F.linear(x, gate), F.linear(x, up)
    del x
    return gated, upward, F.linear(activate(gated, upward), down)


class FeedForwardNode(torch.autograd.Function):
    """Return hidden + MLP(norm(hidden)) for rows [S, D]; `weights` are norm, gate, up, down and eps."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Any) -> Tensor:
        *matrices, ctx.eps = weights
        gate, up, out = mlp(hidden, *weights)
        ctx.save_for_backward(hidden, gate, up, *matrices)
        return out.add_(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, *matrices = ctx.saved_tensors
        weights = *matrices, ctx.eps
        return *feed_forward_gradients(hidden, grad, weights, len(hidden), (gate, up)), None


@torch.no_grad()
def feed_forward_gradients(
    hidden: Tensor,
    grad: Tensor,
    weights: tuple[Any, ...],
    tile: int,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of hidden, norm, gate, up and down, None for a frozen one; `weights` are these and eps.

    Several tiles' sums are float32 or better. `kept` holds gate and up if all rows are one tile.
    """
    norm, of_gate, of_up, of_down, eps = weights
    whole = tile >= len(hidden)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    grad_norm = grad_gate = grad_up = grad_down = None
    for part in tiles(len(hidden), tile):
        rows, grad_rows = hidden[part], grad[part]
        x = rms_norm(rows, norm, eps)
        gate, up = kept or (F.linear(x, of_gate), F.linear(x, of_up))
        to_gate, to_up, active = activate_backward(grad_rows @ of_down, gate, up)
        del gate, up
        grad_down = _add_product(grad_down, of_down, grad_rows, active, whole)
        del active
        grad_gate = _add_product(grad_gate, of_gate, to_gate, x, whole)
        grad_up = _add_product(grad_up, of_up, to_up, x, whole)
        grad_x = (to_gate @ of_gate).addmm_(to_up, of_up)
        del x, to_gate, to_up
        done, part_norm = rms_norm_backward(grad_x, rows, norm, eps, grad_rows)
        del grad_x
        if norm.requires_grad:
            grad_norm = part_norm if grad_norm is None else grad_norm.add_(part_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    sums = (grad_norm, grad_gate, grad_up, grad_down)
    found = [None if s is None else s.to(p.dtype) for s, p in zip(sums, weights)]
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
