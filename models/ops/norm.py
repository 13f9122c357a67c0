"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last axis, in one pass over memory in each direction.

On CUDA with Triton the passes of all elementwise operations are the kernels of passes_triton.py; elsewhere the same
arithmetic in plain torch. Both compute in float32 (float64 for float64 inputs) and round once at the end. A graph is
recorded by `recorded` of linear.py alone.

Shapes: S local tokens, D width, H heads.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.precision import at_least_float32
from models.ops import passes_triton
from ulysses.parallel.layout import Tensors


class NormRule(NamedTuple):
    """What a norm computes; `centred` ones multiply by 1 + weight, in float32."""

    eps: float
    centred: bool = False

    def scale(self, weight: Tensor) -> Tensor:
        """Return what the normalised row is multiplied by."""
        return 1 + at_least_float32(weight) if self.centred else weight


def rms_norm(x: Tensor, weight: Tensor | None, rule: NormRule) -> Tensor:
    """Return x [..., D] normalised, without a graph; x itself where there is no norm, and so no weight."""
    if weight is None:
        return x
    weight = rule.scale(weight)
    if kernels := triton_kernels(x):
        out = torch.empty_like(x)
        kernels.rms_norm(x, weight, rule.eps, out)
        return out
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, rule.eps).to(x.dtype)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rule: NormRule,
    residual: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Turn grad into the gradient of x [S, D] or [S, H, D], and return weight's too, in float32 or better.

    `residual` is contiguous and added to the former. Without a norm weight is None.
    """
    if weight is None:
        return grad if residual is None else grad.add_(residual), None
    weight = rule.scale(weight)
    if kernels := triton_kernels(x):
        return grad, kernels.rms_norm(x, weight, rule.eps, grad, residual, back=True)
    _, (grad_x, grad_weight) = in_plain_torch(
        lambda v, w: F.rms_norm(v, w.shape, w, rule.eps), grad, x, weight
    )
    if residual is not None:
        grad_x = grad_x.add_(residual)
    return grad.copy_(grad_x), grad_weight


def in_plain_torch(
    function: Callable[..., Tensor], grad: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, Tensors]:
    """Return function(*inputs), and for the gradient of the result those of the inputs; all in float32 or better."""
    leaves = [at_least_float32(x).detach() for x in inputs]
    if grad is None:
        return function(*leaves), ()
    with torch.enable_grad():
        result = function(*(x.requires_grad_() for x in leaves))
        # backward starts from a number: to start from a gradient torch imports sympy, which takes a second
        total = (result * at_least_float32(grad)).sum()
    return result.detach(), torch.autograd.grad(total, leaves)


def triton_kernels(x: Tensor) -> ModuleType | None:
    """Return passes_triton.py if its kernels take the tensor, else None."""
    fits = (
        x.is_cuda
        and passes_triton.triton is not None
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.numel() > 0
        and x.stride(-1) == 1
    )
    return passes_triton if fits else None
