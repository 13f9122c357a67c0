"""The gated activation of a feed-forward, act(gate) * up, in one pass over memory in each direction.

Shapes: S local tokens, F feed-forward width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.norm import triton_kernels

# transformers' names
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def clamped(both: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate), as gpt-oss has it, of rows [M, 2F] with gate and up in turns."""
    gate, up = both.unflatten(1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def activate(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    """Return act(gate) * up of rows [S, F], without a graph; both have the same strides."""
    if kernels := triton_kernels(gate):
        return kernels.gated(gate, up, gelu=kind != "silu")[0]
    return (ACTIVATIONS[kind](at_least_float32(gate)) * up).to(gate.dtype)


def activate_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Return the activation, which the weight gradient needs, and the gradients of gate and up side by side [S, 2F]."""
    if kernels := triton_kernels(gate):
        return kernels.gated(gate, up, grad.contiguous(), gelu=kind != "silu")
    d = at_least_float32(grad)
    value, slope = _value_and_slope(at_least_float32(gate), kind)
    both = torch.cat((d * up * slope, d * value), -1)
    return (value * up).to(gate.dtype), both.to(gate.dtype)


def activate_weighted(both: Tensor, weights: Tensor, kind: str = "silu") -> Tensor:
    """Return the activation times the weights [M] of rows [M, 2F], gate and up side by side, without a graph.

    kind: of the activation, or "clamped".
    """
    if kind in ("silu", "clamped") and (kernels := triton_kernels(both)):
        return kernels.weighted_swiglu(both, weights, clamped=kind == "clamped")[0]
    wide = at_least_float32(both)
    if kind == "clamped":
        return (clamped(wide) * weights[:, None]).to(both.dtype)
    gate, up = wide.chunk(2, 1)
    return (ACTIVATIONS[kind](gate) * up * weights[:, None]).to(both.dtype)


def activate_weighted_backward(
    grad: Tensor, both: Tensor, weights: Tensor, kind: str = "silu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted activation, and the gradients of `both` and of the weights; those in float32 or better."""
    if kind in ("silu", "clamped") and (kernels := triton_kernels(both)):
        given = both, weights, grad.contiguous()
        return kernels.weighted_swiglu(*given, clamped=kind == "clamped")
    d = at_least_float32(grad)
    wide = d * weights[:, None]
    if kind == "clamped":
        x = at_least_float32(both).detach().requires_grad_()
        with torch.enable_grad():
            active = clamped(x)
        (to_both,) = torch.autograd.grad(active, x, wide)
        active = active.detach()
    else:
        gate, up = at_least_float32(both).chunk(2, 1)
        value, slope = _value_and_slope(gate, kind)
        active, to_both = value * up, torch.cat((wide * up * slope, wide * value), -1)
    to_weights = (d * active).sum(1)
    return (active * weights[:, None]).to(both.dtype), to_both.to(both.dtype), to_weights


def _value_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return act(x) and its derivative."""
    if kind == "silu":
        s = torch.sigmoid(x)
        value = x * s
        return value, s + value * (1 - s)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = ACTIVATIONS[kind](x)
    (slope,) = torch.autograd.grad(value, x, torch.ones_like(value))
    return value.detach(), slope


class ActivateNode(torch.autograd.Function):
    """Return act(gate) * up; backward keeps the two inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return activate(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *activate_backward(grad, gate, up, ctx.kind)[1].chunk(2, 1), None
