"""The parts of a layer as single graph nodes that keep little: what is cheap is computed again.

    linear        x -> W x + b                               keeps x
    output        hidden + linear(attended)                  keeps attended
    project       hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
    feed_forward  hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                  in tiles: keeps hidden only, backward runs norm, gate and up again, never down

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. They read the weights directly, so they stand in for the modules only where
these are plain (`is_plain`): adapters, hooks and partitioned parameters need a call of the module, which uses `linear`.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.fused import activate, activate_backward, rms_norm, rms_norm_backward, rotate_pair
from ulysses.memory.tiling import tiles

Rope = tuple[Tensor, Tensor]


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has a hook of any kind, which only a call of the module itself would run."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any(hooks) or bool(module._backward_hooks or module._backward_pre_hooks)


def is_plain(*modules: nn.Module) -> bool:
    """Return whether the modules' weights may be read directly: classes of ours, without hooks, not partitioned."""
    return all(
        type(m).__module__.startswith("models.")
        and not is_watched(m)
        and cast(Tensor, m.weight).numel() > 0
        for m in modules
    )


class ProjectWeights(NamedTuple):
    """Hold the norm and the three projections; a bias is None where the model has none."""

    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None


class FeedForwardWeights(NamedTuple):
    """Hold the norm and the three matrices of the MLP."""

    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


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
    hidden: Tensor, weights: ProjectWeights, rope: Rope, eps: float, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in."""
    return _Project.apply(hidden, *weights, *rope, eps, head_dim)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *weights, cos, sin, eps, head_dim = rest
        w = ProjectWeights(*weights)
        x = rms_norm(hidden, w.norm, eps)
        query, key, value = (
            F.linear(x, matrix, bias).unflatten(1, (-1, head_dim))
            for matrix, bias in zip(weights[1:4], weights[4:])
        )
        query, key = rotate_pair(query, key, cos, sin, in_place=True)
        ctx.save_for_backward(hidden, *weights, cos, sin)
        ctx.eps = eps
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights, cos, sin = ctx.saved_tensors
        w, wanted = ProjectWeights(*weights), ctx.needs_input_grad[2:8]
        turned = rotate_pair(grads[0], grads[1], cos, sin, back=True)
        flat = [g.flatten(1) for g in (*turned, grads[2])]
        x = rms_norm(hidden, w.norm, ctx.eps)
        matrices = [g.t() @ x if want else None for g, want in zip(flat, wanted[:3])]
        del x
        biases = [_column_sums(g) if want else None for g, want in zip(flat, wanted[3:])]
        grad_x = (flat[0] @ w.query).addmm_(flat[1], w.key).addmm_(flat[2], w.value)
        grad_hidden, grad_norm = rms_norm_backward(grad_x, hidden, w.norm, ctx.eps)
        return grad_hidden, grad_norm.to(w.norm.dtype), *matrices, *biases, None, None, None, None


def output(hidden: Tensor, attended: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [S, D] plus the projection of the attention output [S, H, E]."""
    return linear(attended.flatten(1), weight).add_(hidden)


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def feed_forward(hidden: Tensor, weights: FeedForwardWeights, eps: float) -> Tensor:
    """Return hidden + MLP(norm(hidden)) for rows [S, D]; backward keeps hidden, gate and up."""
    return _FeedForward.apply(hidden, *weights, eps)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> Tensor:
        *weights, eps = rest
        w = FeedForwardWeights(*weights)
        x = rms_norm(hidden, w.norm, eps)
        gate, up = F.linear(x, w.gate), F.linear(x, w.up)
        del x
        out = F.linear(activate(gate, up), w.down).add_(hidden)
        ctx.save_for_backward(hidden, gate, up, *weights)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, *weights = ctx.saved_tensors
        w = FeedForwardWeights(*weights)
        return *_gradients(hidden, grad, w, ctx.eps, hidden.shape[0], (gate, up)), None


@torch.no_grad()
def feed_forward_tiles(
    hidden: Tensor, weights: FeedForwardWeights, eps: float, tile: int
) -> Tensor:
    """Return `feed_forward` in tiles of rows, without a graph."""
    if tile >= hidden.shape[0]:
        return feed_forward(hidden, weights, eps)
    out = torch.empty_like(hidden)
    for part in tiles(hidden.shape[0], tile):
        x = rms_norm(hidden[part], weights.norm, eps)
        active = activate(F.linear(x, weights.gate), F.linear(x, weights.up))
        torch.add(hidden[part], F.linear(active, weights.down), out=out[part])
        del x, active
    return out


@torch.no_grad()
def feed_forward_gradients(
    hidden: Tensor, grad: Tensor, weights: FeedForwardWeights, eps: float, tile: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of hidden and of the trainable weights, in order; several tiles' sums are float32."""
    grad_hidden, *found = _gradients(hidden, grad, weights, eps, tile)
    assert grad_hidden is not None
    return grad_hidden, [g for g in found if g is not None]


def _gradients(
    hidden: Tensor,
    grad: Tensor,
    w: FeedForwardWeights,
    eps: float,
    tile: int,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden and of each weight, None for a frozen one; `kept` holds one tile's gate and up."""
    whole, grad = tile >= hidden.shape[0], grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    sums: list[Tensor | None] = [None] * len(w)
    for part in tiles(hidden.shape[0], tile):
        rows, grad_rows = hidden[part], grad[part]
        x = rms_norm(rows, w.norm, eps)
        gate, up = kept or (F.linear(x, w.gate), F.linear(x, w.up))
        grad_gate, grad_up, active = activate_backward(grad_rows @ w.down, gate, up)
        del gate, up
        _add_product(sums, 3, w, grad_rows, active, whole)
        del active
        _add_product(sums, 1, w, grad_gate, x, whole)
        _add_product(sums, 2, w, grad_up, x, whole)
        grad_x = (grad_gate @ w.gate).addmm_(grad_up, w.up)
        del x, grad_gate, grad_up
        done, grad_norm = rms_norm_backward(grad_x, rows, w.norm, eps, residual=grad_rows)
        del grad_x
        sums[0] = grad_norm if sums[0] is None else sums[0].add_(grad_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    found = [s.to(p.dtype) if s is not None and p.requires_grad else None for s, p in zip(sums, w)]
    return grad_hidden, *found


def _add_product(
    sums: list[Tensor | None],
    index: int,
    w: FeedForwardWeights,
    grad: Tensor,
    rows: Tensor,
    whole: bool,
) -> None:
    """Add grad.T @ rows to a trainable weight's sum, in float32 or better unless one tile is the whole."""
    if not w[index].requires_grad:
        return
    left, total = grad.t(), sums[index]
    wide = torch.promote_types(rows.dtype, torch.float32)
    if whole or wide == rows.dtype:
        sums[index] = left @ rows if total is None else total.addmm_(left, rows)
    elif not rows.is_cuda:
        product = left.to(wide) @ rows.to(wide)
        sums[index] = product if total is None else total.add_(product)
    elif total is None:
        sums[index] = torch.mm(left, rows, out_dtype=wide)
    else:  # half-precision products added into the float32 matrix inside the kernel
        torch.addmm(total, left, rows, out_dtype=wide, out=total)
