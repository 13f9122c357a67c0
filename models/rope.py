"""Rotary positions, exact to millions of tokens, and their scaling to windows longer than the original one.

Angles in float32 are off by 0.03 rad at one million tokens. The frequencies are therefore the float32 values that
transformers computes (a trained model has seen those), and angle, cosine and sine are taken in float64 once per batch.
All scaling happens in the table of cosines and sines, so that whoever rotates by it has it.

Shapes: S local tokens, E columns of a head that are rotated.
"""

import functools

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
    s = config.rope_scaling
    if kind == "local":
        theta, s = config.rope_local_theta or theta, None
    periods = theta**exponents
    frequencies, factor = 1.0 / periods, 1.0
    if s is not None:
        from models.rope_scaling import scaled

        frequencies, factor = scaled(periods, s, theta)
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
