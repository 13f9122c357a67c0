"""Rotary positions, exact to millions of tokens: their tables, and queries and keys that are turned by them.

Angles in float32 are off by 0.03 rad at one million tokens. The frequencies are therefore the float32 values that
transformers computes (a trained model has seen those), and angle, cosine and sine are taken in float64 once per batch.
All scaling to longer windows happens in the table of cosines and sines, so that the rotation knows nothing of it.

Queries and keys are normalised and rotated in one pass over memory in each direction. A Projection is all that a layer
does to its input before attention, as one node: hidden -> norm -> q, k, v -> rotate.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.ops.linear import GradientSums, Products, Saved
from models.ops.norm import NormRule, rms_norm, rms_norm_backward, triton_kernels
from ulysses.parallel.layout import Tensors, copy_strided

NO_NORM_RULE = NormRule(0.0)


# ---------------------------------------------------------------- the tables


@functools.cache
def rope_parameters(
    config: ModelConfig, device: torch.device | str = "cpu", kind: str = "main"
) -> tuple[Tensor, float]:
    """Return transformers' float32 inverse frequencies [E/2], scaling included, and the factor of cosine and sine.

    `kind` is the rotary kind of a layer.

    They are computed on the CPU whatever `device` is, so that every device rotates by the same values, and moved once
    for each device, because a copy makes the host wait.
    """
    dim = int(config.head_dim * config.partial_rotary_factor)  # the columns that are rotated
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "local":
        theta, scaling = config.rope_local_theta or theta, None
    periods = theta**exponents
    frequencies, factor = 1.0 / periods, 1.0
    if scaling is None:
        return frequencies.to(device), factor
    # `unscaled` is 1 for high frequencies, which stay, and 0 for low ones, which are divided by the factor
    if scaling.rope_type == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position_embeddings / wavelengths
        assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - unscaled) * frequencies / scaling.factor + unscaled * frequencies
    else:  # yarn, 2309.00071: a ramp between the dimensions that turn beta_fast and beta_slow times
        low, high = (
            dim
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
        )
        if scaling.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (
            high - low or 0.001
        )
        unscaled = 1 - ramp.clamp(0, 1)
        frequencies = (1 - unscaled) * (
            1.0 / (scaling.factor * periods)
        ) + unscaled * frequencies
        # a larger cosine and sine keep attention over more keys as sharp as it was
        above, below = (
            (scaling.mscale, scaling.mscale_all_dim)
            if scaling.mscale and scaling.mscale_all_dim
            else (1, 0)
        )
        growth = 0.1 * math.log(scaling.factor)
        factor = scaling.attention_factor or (above * growth + 1) / (below * growth + 1)
    return frequencies.to(device), factor


def rotary_table(
    positions: Tensor, config: ModelConfig, kind: str = "main"
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [S, E/2] float32, for integer positions [S], for the layers of one rotary kind.

    Both are multiplied by YaRN's attention factor, which so reaches queries and keys.
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
    rule: NormRule = NO_NORM_RULE,
    *norms: Tensor,
    back: bool = False,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Rotate query [S, H, E] and key [S, K, E] by (cos, sin) [S, E/2] into `out`, without a graph.

    A column of a head's first half is rotated with the same column of its second half. Narrower tables rotate the first
    columns of every head only. `out` may be query and key. `back` rotates the other way, which is the gradient.

    `norms` are the weights of RMSNorms that query and key pass through first: [E] for those of every head, [H E] and
    [K E] for those of whole rows.
    """
    if norms and len(norms[0]) > query.shape[-1]:  # of whole rows
        query, key = (
            rms_norm(x.flatten(1), norm, rule).view_as(x)
            for x, norm in zip((query, key), norms)
        )
        norms = ()
    out = out or (query.new_empty(query.shape), key.new_empty(key.shape))
    if 2 * cos.shape[-1] < query.shape[-1]:  # the other columns of a head are not rotated
        for x, norm, target in zip((query, key), norms or (None, None), out):
            target.copy_(rms_norm(x, norm, rule))
        first, second = (x[..., : 2 * cos.shape[-1]] for x in out)
        rotate_pair(first, second, cos, sin, back=back, out=(first, second))
        return out
    if (kernels := triton_kernels(query)) and triton_kernels(key):
        weights = tuple(map(rule.scale, norms)) or (None, None)
        kernels.rotate(query, key, cos, sin, -1.0 if back else 1.0, out, rule.eps, weights)
        return out
    cos, sin = cos[:, None], (-sin if back else sin)[:, None]
    for x, norm, target in zip((query, key), norms or (None, None), out):
        if norm is not None:
            x = rms_norm(at_least_float32(x), at_least_float32(norm), rule)
        first, second = x.chunk(2, -1)
        rotated = first * cos - second * sin, second * cos + first * sin
        target.copy_(torch.cat(rotated, -1))
    return out


class Projection(NamedTuple):
    """What a layer does to its input before attention: the three matrices, and the norms before and after them.

    norms: of queries and of keys, or none. cos, sin: [S, E/2]; narrower tables rotate the first columns of heads only.
    """

    matrices: Products
    head_dim: int
    rule: NormRule
    norm: Tensor | None
    norms: Sequence[Tensor]
    cos: Tensor
    sin: Tensor

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return [self.norm, *self.norms, *self.matrices.tensors]

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        """Return query [S, H, E] and key [S, K, E], both rotated, value [S, K, E], and hidden [S, D] itself.

        The last is for the residual: its gradient comes to this operation, which adds it in the norm's backward.
        """
        (hidden,) = inputs
        results = self.matrices.forward(rms_norm(hidden, self.norm, self.rule))
        query, key, value = (x.unflatten(1, (-1, self.head_dim)) for x in results)
        # only the backward of norms reads query and key as they were before
        saved, out = ((query, key), None) if self.norms else ((), (query, key))
        rotated = rotate_pair(query, key, self.cos, self.sin, self.rule, *self.norms, out=out)
        return [*rotated, value, hidden], (hidden, *saved)

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        hidden, *before_norms = saved
        matrices = self.matrices
        flat = hidden.new_empty(len(hidden), sum(matrices.widths))
        parts = [
            part.view_as(grad) for part, grad in zip(flat.split(matrices.widths, 1), grads)
        ]
        rotate_pair(grads[0], grads[1], self.cos, self.sin, back=True, out=parts[:2])
        for part, x, norm in zip(parts, before_norms, self.norms):
            if len(norm) > self.head_dim:  # of whole rows
                part, x = part.view(len(part), len(norm)), x.flatten(1)
            # which turns the part into the gradient of x
            _, of_norm = rms_norm_backward(part, x, norm, self.rule)
            sums.add(norm, of_norm)
        copy_strided(parts[2], grads[2])
        to_x = matrices.back(flat)
        if matrices.tensors:
            x = rms_norm(hidden, self.norm, self.rule)
            matrices.gradients(flat, x, sums)
            del x
        residual = grads[3].contiguous()
        to_hidden, of_norm = rms_norm_backward(to_x, hidden, self.norm, self.rule, residual)
        sums.add(self.norm, of_norm)
        return [to_hidden]
