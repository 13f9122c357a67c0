"""Rotary positions of queries and keys, with the norms before them, in one pass over memory in each direction.

Shapes: S local tokens, H query heads, K kv heads, E head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.norm import NormRule, rms_norm, rms_norm_backward, triton_kernels

NO_NORM = NormRule(0.0)


def rotate_pair(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    rule: NormRule = NO_NORM,
    *norms: Tensor,
    back: bool = False,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Do `RotateNode` without a graph, into `out`, which may be query and key.

    `back` turns the other way, which is the gradient of turning.
    """
    if norms and len(norms[0]) > query.shape[-1]:  # of whole rows
        query, key = (
            rms_norm(x.flatten(1), norm, rule).view_as(x)
            for x, norm in zip((query, key), norms)
        )
        norms = ()
    out = out or (query.new_empty(query.shape), key.new_empty(key.shape))
    if 2 * cos.shape[-1] < query.shape[-1]:  # the other columns of a head do not turn
        for x, norm, target in zip((query, key), norms or (None, None), out):
            target.copy_(rms_norm(x, norm, rule))
        first, second = (x[..., : 2 * cos.shape[-1]] for x in out)
        rotate_pair(first, second, cos, sin, back=back, out=(first, second))
        return out
    if (kernels := triton_kernels(query)) and triton_kernels(key):
        scales = [rule.scale(norm) for norm in norms] or (None, None)
        kernels.rotate(query, key, cos, sin, -1.0 if back else 1.0, out, rule.eps, *scales)
        return out
    cos, sin = cos[:, None], (-sin if back else sin)[:, None]
    for x, norm, target in zip((query, key), norms or (None, None), out):
        if norm is not None:
            x = rms_norm(at_least_float32(x), at_least_float32(norm), rule)
        first, second = x.chunk(2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        target.copy_(torch.cat(turned, -1))
    return out


def rotate_backward(
    out: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    rule: NormRule,
    cos: Tensor,
    sin: Tensor,
    *kept: Tensor,
) -> list[Tensor]:
    """Turn the gradients of `RotateNode`'s results into those of its query and key, `out`.

    Return those of the norms' weights, if there are any, in float32 or better. `kept` is query, key and weights as the
    node received them, or nothing without norms.
    """
    rotate_pair(query, key, cos, sin, back=True, out=out)
    found = []
    for grad, x, norm in zip(out, kept, kept[2:]):
        if len(norm) > x.shape[-1]:
            grad, x = grad.view(len(grad), -1), x.flatten(1)
        found.append(rms_norm_backward(grad, x, norm, rule)[1])
    return found


class RotateNode(torch.autograd.Function):
    """Rotate query [S, H, E] and key [S, K, E] by (cos, sin) [S, E/2], halves paired.

    Narrower tables turn the first columns of every head only.

    `norms` are the weights of RMSNorms that query and key pass through first: [E] for those of every head, [H E] and
    [K E] for those of whole rows. Backward then keeps query and key, and computes their norms again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        rule: NormRule = NO_NORM,
        *norms: Tensor,
    ) -> Sequence[Tensor]:
        ctx.save_for_backward(cos, sin, *((query, key, *norms) if norms else ()))
        ctx.rule = rule
        return rotate_pair(query, key, cos, sin, rule, *norms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        out = [grad.new_empty(grad.shape) for grad in (query, key)]
        norms = rotate_backward(out, query, key, ctx.rule, *ctx.saved_tensors)
        return *out, None, None, None, *norms
