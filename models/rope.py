"""Rotary positions, exact to millions of tokens, and their scaling to windows longer than the original one.

Angles in float32 are off by 0.03 rad at one million tokens. The frequencies are therefore the float32 values that
transformers computes (a trained model has seen those), and angle, cosine and sine are taken in float64 once per batch.
All scaling happens in the table of cosines and sines, so that whoever rotates by it has it.

Shapes: S local tokens, E columns of a head that are rotated.
"""

import functools
import math
from typing import Any

import torch

from models.arch import ModelConfig


@functools.cache
def rope_parameters(
    config: ModelConfig, device: torch.device | str = "cpu", kind: str = "main"
) -> tuple[torch.Tensor, float]:
    """Return transformers' float32 inverse frequencies [E/2], scaling included, and the factor of cosine and sine.

    `kind` is the rotary kind of a layer.

    Computed on the CPU whatever `device` is, so that every device rotates by the same values, and moved once: a copy
    makes the host wait.
    """
    dim = int(config.head_dim * config.partial_rotary_factor)  # the columns that turn
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    theta: float = config.rope_theta
    s: Any = config.rope_scaling
    if kind == "local":
        theta, s = config.rope_local_theta or theta, None
    periods = theta**exponents
    frequencies, factor = 1.0 / periods, 1.0
    # `stays` is 0 for long waves, whose frequency is divided by the factor, and 1 for short ones
    if s is None:
        pass
    elif s.rope_type == "linear":
        frequencies = frequencies / s.factor
    elif s.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = s.original_max_position_embeddings / wavelengths
        low, high = s.low_freq_factor, s.high_freq_factor
        stays = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - stays) * frequencies / s.factor + stays * frequencies
    else:  # yarn, 2309.00071: a ramp between the dimensions that turn beta_fast and beta_slow times
        low, high = (
            dim
            * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (s.beta_fast or 32, s.beta_slow or 1)
        )
        if s.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (
            high - low or 0.001
        )
        stays = 1 - ramp.clamp(0, 1)
        frequencies = (1 - stays) * (1.0 / (s.factor * periods)) + stays * frequencies
        # attention over more keys stays as sharp as it was
        above, below = (s.mscale, s.mscale_all_dim) if s.mscale and s.mscale_all_dim else (1, 0)
        growth = 0.1 * math.log(s.factor)
        factor = s.attention_factor or (above * growth + 1) / (below * growth + 1)
    return frequencies.to(device), factor


def rotary_table(
    positions: torch.Tensor, config: ModelConfig, kind: str = "main"
) -> tuple[torch.Tensor, torch.Tensor]:
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


def rotary_tables(
    positions: torch.Tensor, config: ModelConfig
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the table of every rotary kind of the model's layers; once per batch, shared by all layers of a kind."""
    kinds = dict.fromkeys(kind.rotary for kind in config.layers)
    return {kind: rotary_table(positions, config, kind) for kind in kinds}
