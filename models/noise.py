"""Uniform embedding noise (NEFTune, arXiv:2310.05914) that is the same on every topology.

Each element is a hash of (seed, the sequence's key, position, column), so that no split of the ranks and no packing
order changes it.

Shapes: S local tokens, D width, N sequences.
"""

import torch
from torch import Tensor

from ulysses.parallel.batch import ShardedBatch

_ROWS = 4096  # rows hashed at once: 8 bytes per element live for a moment
_MIX1, _MIX2 = (
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)  # splitmix64, as signed integers
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def embedding_noise(batch: ShardedBatch, width: int, alpha: float, seed: int) -> Tensor:
    """Return U(-1, 1) * alpha / sqrt(L * D) for every local token, L its own sequence's length: float32 [S, D].

    The sequence's key is the column "noise_key" (an integer, such as the example's index), else its place in the batch.
    """
    lengths = batch.cu_seqlens.diff().to(torch.int64)
    keys = batch.sequence_columns.get("noise_key")
    keys = (
        torch.arange(len(lengths), device=lengths.device)
        if keys is None
        else keys.to(lengths.device, torch.int64)
    )
    keys = torch.cat([keys, keys.new_zeros(len(lengths) - len(keys))])  # a padding tail has no key
    rows = _mixed(_mixed(keys[batch.sequence_ids] + seed * 0x5851F42D + 1) + batch.positions)
    scale = alpha / (lengths[batch.sequence_ids].float() * width).sqrt()
    columns = torch.arange(1, width + 1, device=rows.device) * _STEP
    noise = torch.empty(len(rows), width, device=rows.device)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        z = _mixed(rows[part, None] + columns)
        uniform = ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-52 - 1.0
        noise[part] = uniform.float() * scale[part, None]
    return noise
