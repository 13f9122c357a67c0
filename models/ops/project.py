"""A layer's input to queries, keys and values: hidden -> norm -> q, k, v -> rotate, as one node.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops.linear import column_sums, products, products_backward
from models.ops.norm import NormRule, rms_norm, rms_norm_backward
from models.ops.rotary import rotate_backward, rotate_pair
from ulysses.parallel.exchange import copy


class ProjectNode(torch.autograd.Function):
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in, and hidden itself.

    Whoever adds to the latter hands its gradient to this node, which adds it in the norm's backward. `weights` are the
    three matrices, their biases or None, and the norms of queries and keys where there are any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_dim: int,
        rule: NormRule,
        norm: Tensor | None,
        *weights: Any,
    ) -> tuple[Tensor, ...]:
        matrices, norms = weights[:3], weights[6:]
        x = rms_norm(hidden, norm, rule)
        results = products(x, matrices, weights[3:6])
        query, key, value = (result.unflatten(1, (-1, head_dim)) for result in results)
        kept = (query, key, *norms) if norms else ()
        ctx.save_for_backward(hidden, norm, *matrices, cos, sin, *kept)
        ctx.rule = rule
        out = None if norms else (query, key)
        return *rotate_pair(query, key, cos, sin, rule, *norms, out=out), value, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, norm, *kept = ctx.saved_tensors
        matrices, wanted = kept[:3], ctx.needs_input_grad[6:12]
        sizes = [len(m) for m in matrices]
        flat = hidden.new_empty(len(hidden), sum(sizes))
        parts = [part.view_as(grad) for part, grad in zip(flat.split(sizes, 1), grads)]
        of_norms = rotate_backward(parts[:2], *grads[:2], ctx.rule, *kept[3:])
        copy(parts[2], grads[2])
        x = rms_norm(hidden, norm, ctx.rule)
        nothing = None, None, None
        grads_matrices = (flat.t() @ x).split(sizes) if any(wanted[:3]) else nothing
        del x
        biases = column_sums(flat).split(sizes) if any(wanted[3:]) else nothing
        grad_x = products_backward(flat, matrices)
        residual = grads[3].contiguous()
        grad_hidden, of_norm = rms_norm_backward(grad_x, hidden, norm, ctx.rule, residual)
        # autograd itself rounds what is wider than its weight
        of_weights = of_norm, *grads_matrices, *biases, *of_norms
        return grad_hidden, None, None, None, None, *of_weights
