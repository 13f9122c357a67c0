"""Rotary positions, exact to millions of tokens: their tables, and queries and keys that are turned by them.

Angles in float32 are off by 0.03 rad at one million tokens. The frequencies are therefore the float32 values that
transformers computes (a trained model has seen those), and angle, cosine and sine are taken in float64 once per batch.
All scaling to longer windows happens in the table of cosines and sines, so that whoever rotates by it has it.

Queries and keys are turned in one pass over memory in each direction, with the norms before it.
ProjectNode is all that a layer does to its input before attention: hidden -> norm -> q, k, v -> rotate, as one node.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.ops.linear import column_sums, products, products_backward
from models.ops.norm import NormRule, rms_norm, rms_norm_backward, triton_kernels
from models.rope_scaling import scaled
from ulysses.parallel.layout import Context, copy

NO_NORM = NormRule(0.0)


# ---------------------------------------------------------------- the tables


@functools.cache
def rope_parameters(
    config: ModelConfig, device: torch.device | str = "cpu", kind: str = "main"
) -> tuple[Tensor, float]:
    """Return transformers' float32 inverse frequencies [E/2], scaling included, and the factor of cosine and sine.

    `kind` is the rotary kind of a layer.

    Computed on the CPU whatever `device` is, so that every device rotates by the same values, and moved once: a copy
    makes the host wait.
    """
    dim = int(config.head_dim * config.partial_rotary_factor)  # the columns that turn
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    theta: float = config.rope_theta
    s = config.rope_scaling
    if kind == "local":
        theta, s = config.rope_local_theta or theta, None
    periods = theta**exponents
    frequencies, factor = 1.0 / periods, 1.0
    if s is not None:
        frequencies, factor = scaled(periods, s, theta)
    return frequencies.to(device), factor


def rotary_table(
    positions: Tensor, config: ModelConfig, kind: str = "main"
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [S, E/2] float32, for integer positions [S], for the layers of one rotary kind.

    Both carry YaRN's attention factor, so that queries and keys do.
    """
    frequencies, factor = rope_parameters(config, positions.device, kind)
    if kind == "none":
        nothing = frequencies.new_zeros(len(positions), len(frequencies))
        return nothing + 1, nothing
    angles = positions.to(torch.float64)[:, None] * frequencies.to(torch.float64)[None, :]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos *= factor
        sin *= factor
    return cos.float(), sin.float()


def rotary_tables(positions: Tensor, config: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the table of every rotary kind of the model's layers; once per batch, shared by all layers of a kind."""
    kinds = dict.fromkeys(kind.rotary for kind in config.layers)
    return {kind: rotary_table(positions, config, kind) for kind in kinds}


# ---------------------------------------------------------------- the rotation


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
        ctx: Context[NormRule],
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        rule: NormRule = NO_NORM,
        *norms: Tensor,
    ) -> Sequence[Tensor]:
        ctx.save_for_backward(cos, sin, *((query, key, *norms) if norms else ()))
        ctx.rest = rule
        return rotate_pair(query, key, cos, sin, rule, *norms)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[NormRule], query: Tensor, key: Tensor
    ) -> tuple[Tensor | None, ...]:
        out = [grad.new_empty(grad.shape) for grad in (query, key)]
        norms = rotate_backward(out, query, key, ctx.rest, *ctx.saved_tensors)
        return *out, None, None, None, *norms


class ProjectNode(torch.autograd.Function):
    """Return query [S, H, E], key and value [S, K, E] of hidden [S, D], positions rotated in, and hidden itself.

    Whoever adds to the latter hands its gradient to this node, which adds it in the norm's backward. `weights` are the
    three matrices, their biases or None, and the norms of queries and keys where there are any.
    """

    @staticmethod
    def forward(
        ctx: Context[NormRule],
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_dim: int,
        rule: NormRule,
        norm: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        matrices, norms = weights[:3], weights[6:]
        x = rms_norm(hidden, norm, rule)
        results = products(x, matrices, weights[3:6])
        query, key, value = (result.unflatten(1, (-1, head_dim)) for result in results)
        kept = (query, key, *norms) if norms else ()
        ctx.save_for_backward(hidden, norm, *matrices, cos, sin, *kept)
        ctx.rest = rule
        out = None if norms else (query, key)
        return *rotate_pair(query, key, cos, sin, rule, *norms, out=out), value, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[NormRule], *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm, *kept = ctx.saved_tensors
        matrices, wanted = kept[:3], ctx.needs_input_grad[6:12]
        sizes = [len(m) for m in matrices]
        flat = hidden.new_empty(len(hidden), sum(sizes))
        parts = [part.view_as(grad) for part, grad in zip(flat.split(sizes, 1), grads)]
        of_norms = rotate_backward(parts[:2], grads[0], grads[1], ctx.rest, *kept[3:])
        copy(parts[2], grads[2])
        x = rms_norm(hidden, norm, ctx.rest)
        nothing = None, None, None
        grads_matrices = (flat.t() @ x).split(sizes) if any(wanted[:3]) else nothing
        del x
        biases = column_sums(flat).split(sizes) if any(wanted[3:]) else nothing
        grad_x = products_backward(flat, matrices)
        residual = grads[3].contiguous()
        grad_hidden, of_norm = rms_norm_backward(grad_x, hidden, norm, ctx.rest, residual)
        # autograd itself rounds what is wider than its weight
        of_weights = of_norm, *grads_matrices, *biases, *of_norms
        return grad_hidden, None, None, None, None, *of_weights
