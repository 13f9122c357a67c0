"""Elementwise steps of a layer, each in one pass: normalisation, rotary positions, gated activation.

On CUDA with Triton the passes are kernels; elsewhere the same arithmetic in plain torch. Both compute in float32
(float64 for float64 inputs) and round once at the end.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [S, H, E] and key [S, K, E] by (cos, sin) [S, E/2]; halves paired as in transformers."""
    return _Rotate.apply(query, key, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; backward keeps the two inputs only."""
    return _SwiGLU.apply(gate, up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half]) if x.dtype == cos.dtype else out[..., :half].copy_(
        first * cos - second * sin
    )
    out[..., half:].copy_(second * cos + first * sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        cos, sin = cos[:, None], sin[:, None]
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        cos, sin = cos[:, None], -sin[:, None]  # a rotation's transpose turns the other way
        return _rotated(grad_query, cos, sin), _rotated(grad_key, cos, sin), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up
