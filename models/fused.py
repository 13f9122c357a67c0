"""Elementwise steps of a layer, each in one pass over memory: normalisation, rotary positions, gated activation.

On CUDA with Triton the passes are the kernels of fused_triton.py; elsewhere the same arithmetic in plain torch. Both
compute in float32 (float64 for float64 inputs) and round once at the end. Nothing here records a graph except
`RotateNode.apply` and `SwiGLUNode.apply`, which take what their `forward` does, except ctx.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models import fused_triton
from ulysses.memory.tiling import pulled_back


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, without a graph."""
    if _on_gpu(x):
        fused_triton.rms_norm(x, weight, eps, out := torch.empty_like(x))
        return out
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate_pair(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 0.0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    *,
    back: bool = False,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Do `RotateNode` without a graph, into `out`, which may be query and key.

    `back` turns the other way, which is the gradient of turning.
    """
    out = out or (query.new_empty(query.shape), key.new_empty(key.shape))
    if _on_gpu(query) and _on_gpu(key):
        fused_triton.rotate(
            query, key, cos, sin, -1.0 if back else 1.0, out, eps, query_norm, key_norm
        )
        return out
    cos, sin = cos[:, None], (-sin if back else sin)[:, None]
    for x, norm, target in zip((query, key), (query_norm, key_norm), out):
        if norm is not None:
            x = rms_norm(at_least_float32(x), at_least_float32(norm), eps)
        first, second = x.chunk(2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        target.copy_(torch.cat(turned, -1))
    return out


def rotate_backward(
    out: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *kept: Tensor,
) -> list[Tensor]:
    """Turn the gradients of `RotateNode`'s results into those of its query and key, `out`.

    Return those of the norms' weights, if there are any, in float32 or better. `kept` is query, key and weights as the
    node received them, or nothing without norms.
    """
    rotate_pair(query, key, cos, sin, back=True, out=out)
    each = zip(out, kept, kept[2:])
    return [rms_norm_backward(grad, x, norm, eps)[1] for grad, x, norm in each]


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [S, F], without a graph; both have the same strides."""
    if _on_gpu(gate):
        return fused_triton.swiglu(gate, up)[0]
    return (F.silu(at_least_float32(gate)) * up).to(gate.dtype)


def activate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation, which the weight gradient needs, and the gradients of gate and up side by side [S, 2F]."""
    if _on_gpu(gate):
        return fused_triton.swiglu(gate, up, grad.contiguous())
    d, g = at_least_float32(grad), at_least_float32(gate)
    s = torch.sigmoid(g)
    silu = g * s
    both = torch.cat((d * up * (s + silu * (1 - s)), d * silu), -1)
    return (silu * up).to(gate.dtype), both.to(gate.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Turn grad into the gradient of x [S, D] or [S, H, D], and return weight's too, in float32 or better.

    `residual` is contiguous and added to the former.
    """
    if _on_gpu(x):
        return grad, fused_triton.rms_norm(x, weight, eps, grad, residual, back=True)
    v, w = (at_least_float32(t).detach().requires_grad_() for t in (x, weight))
    with torch.enable_grad():
        normal = F.rms_norm(v, w.shape, w, eps)
    grad_x, grad_weight = pulled_back([normal], (v, w), [at_least_float32(grad)])
    if residual is not None:
        grad_x = grad_x.add_(residual)
    return grad.copy_(grad_x), grad_weight


def _on_gpu(x: Tensor) -> bool:
    return (
        x.is_cuda
        and fused_triton.triton is not None
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.numel() > 0
        and x.stride(-1) == 1
    )


class RotateNode(torch.autograd.Function):
    """Rotate query [S, H, E] and key [S, K, E] by (cos, sin) [S, E/2], halves paired.

    `norms` are the weights [E] of RMSNorms that every head's query and key pass through first. Backward then keeps
    query and key, and computes their norms again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float = 0.0,
        *norms: Tensor,
    ) -> Sequence[Tensor]:
        ctx.save_for_backward(cos, sin, *((query, key, *norms) if norms else ()))
        ctx.eps = eps
        return rotate_pair(query, key, cos, sin, eps, *norms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        out = [grad.new_empty(grad.shape) for grad in (query, key)]
        norms = rotate_backward(out, query, key, ctx.eps, *ctx.saved_tensors)
        return *out, None, None, None, *norms


class SwiGLUNode(torch.autograd.Function):
    """Return silu(gate) * up; backward keeps the two inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return activate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        to_gate, to_up = activate_backward(grad, *ctx.saved_tensors)[1].chunk(2, 1)
        return to_gate, to_up
