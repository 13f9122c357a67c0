"""The parts of a layer as single graph nodes that keep little: what is cheap is computed again.

    LinearNode       x -> W x + b                               keeps x
    ProjectNode      hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                     where heads have norms: q and k before these, too
    FeedForwardNode  hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                     in tiles: keeps hidden only, backward runs norm, gate and up again, never down

Their `apply` takes what `forward` does, except ctx.

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. They read the weights directly, so they stand in for the modules only where
these are plain (`is_plain`): adapters, hooks, quantised and partitioned parameters need a call of the module. Weights
of q, k and v, or of gate and up, that are neighbours in memory (zero/resident.py) take part in one product.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from collections.abc import Sequence
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
from ulysses.memory.graphs import HOOKS
from ulysses.memory.tiling import tiles
from ulysses.parallel.exchange import copy


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has a hook of any kind, which only a call of the module itself would run."""
    return any(getattr(module, kind) for kind in HOOKS)


def is_plain(*modules: Any) -> bool:
    """Return whether the modules' weights may be read directly: classes of ours, no hooks, whole, not quantised."""
    return all(
        type(m).__module__.startswith("models.")
        and not is_watched(m)
        and m.weight.numel() > 0
        and m.weight.is_floating_point()
        for m in modules
    )


def stacked(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return one view over matrices [N, D] that lie one after the other in memory, or else the matrices."""
    first = matrices[0]
    end = first.storage_offset()
    for m in matrices:
        same_memory = m.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not m.is_contiguous() or not same_memory or m.storage_offset() != end:
            return matrices
        end += m.numel()
    return [first.as_strided((sum(map(len, matrices)), first.shape[1]), first.stride())]


def products(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Any] = (None, None)
) -> Sequence[Tensor]:
    """Return x W^T + b of each matrix and bias; those of stacked matrices are parts of one product."""
    whole, *others = stacked(matrices)
    if others:
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases)]
    bias = None if biases[0] is None else torch.cat(tuple(biases))
    return F.linear(x, whole, bias).split([len(m) for m in matrices], 1)


def products_backward(grad: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return the gradient of `products`' x, from those of its results side by side."""
    first, *others = matrices = stacked(matrices)
    part, *parts = grad.split([len(m) for m in matrices], 1)
    total = part @ first
    for part, matrix in zip(parts, others):
        total.addmm_(part, matrix)
    return total


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
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in, and hidden itself.

    Whoever adds to the latter hands its gradient to this node, which adds it in the norm's backward. `weights` are the
    three matrices, their biases or None, and the norms of heads where there are any.
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
    ) -> tuple[Tensor, ...]:
        matrices, norms = weights[:3], weights[6:]
        x = rms_norm(hidden, norm, eps)
        results = products(x, matrices, weights[3:6])
        query, key, value = (result.unflatten(1, (-1, head_dim)) for result in results)
        kept = (query, key, *norms) if norms else ()
        ctx.save_for_backward(hidden, norm, *matrices, cos, sin, *kept)
        ctx.eps = eps
        out = None if norms else (query, key)
        return *rotate_pair(query, key, cos, sin, eps, *norms, out=out), value, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, norm, *kept = ctx.saved_tensors
        matrices, wanted = kept[:3], ctx.needs_input_grad[6:12]
        sizes = [len(m) for m in matrices]
        flat = hidden.new_empty(len(hidden), sum(sizes))
        parts = [part.view_as(grad) for part, grad in zip(flat.split(sizes, 1), grads)]
        of_norms = rotate_backward(parts[:2], *grads[:2], ctx.eps, *kept[3:])
        copy(parts[2], grads[2])
        x = rms_norm(hidden, norm, ctx.eps)
        nothing = None, None, None
        grads_matrices = (flat.t() @ x).split(sizes) if any(wanted[:3]) else nothing
        del x
        biases = _column_sums(flat).split(sizes) if any(wanted[3:]) else nothing
        grad_x = products_backward(flat, matrices)
        residual = grads[3].contiguous()
        grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, norm, ctx.eps, residual)
        grads_weights = grad_norm.to(norm.dtype), *grads_matrices, *biases, *of_norms
        return grad_hidden, None, None, None, None, *grads_weights


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def mlp(
    hidden: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate and up of the normalised rows [S, F], and their MLP's product [S, D], without a graph."""
    x = rms_norm(hidden, norm, eps)
    gated, upward = products(x, (gate, up))
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
    norm, *pair, of_down, eps = weights
    whole = tile >= len(hidden)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    grad_norm = grad_pair = grad_down = None
    for part in tiles(len(hidden), tile):
        rows, grad_rows = hidden[part], grad[part]
        x = rms_norm(rows, norm, eps)
        gate, up = kept or products(x, pair)
        active, to_pair = activate_backward(grad_rows @ of_down, gate, up)
        del gate, up
        if of_down.requires_grad:
            grad_down = _add_product(grad_down, grad_rows, active, whole)
        del active
        if any(p.requires_grad for p in pair):
            grad_pair = _add_product(grad_pair, to_pair, x, whole)
        del x
        grad_x = products_backward(to_pair, pair)
        del to_pair
        done, part_norm = rms_norm_backward(grad_x, rows, norm, eps, grad_rows)
        del grad_x
        if norm.requires_grad:
            grad_norm = part_norm if grad_norm is None else grad_norm.add_(part_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    halves = (None, None) if grad_pair is None else grad_pair.chunk(2)
    sums = zip((grad_norm, *halves, grad_down), weights)
    found = [s.to(p.dtype) if s is not None and p.requires_grad else None for s, p in sums]
    return grad_hidden, *found


def _add_product(total: Tensor | None, grad: Tensor, rows: Tensor, whole: bool) -> Tensor:
    """Return the sum of weights' gradients with grad.T @ rows added.

    It is kept in float32 or better unless one tile is the whole.
    """
    wide = rows.dtype if whole else torch.promote_types(rows.dtype, torch.float32)
    left = grad.t()
    if not has_wide_products(rows):
        left, rows = left.to(wide), rows.to(wide)
    return wide_product(left, rows, wide, total)
