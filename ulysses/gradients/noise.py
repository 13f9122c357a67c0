"""Gaussian noise that is the same for every partitioning.

A parameter's flattened elements fall into fixed blocks of 65,536. Each block's noise comes from a generator keyed by
(seed, step, parameter name, block), is drawn whole, and is then sliced to what this rank holds:

    blocks     |----- 0 -----|----- 1 -----|--- 2 (tail unused)
    rank 1              [=================]       draws 0, 1, 2 whole, uses the marked part

So ranks that meet in a block draw it twice and agree. Equal on any topology of one device type. Blocks are drawn
into one buffer by the dozen and added together: on a GPU the number of kernels is what this costs.
"""

import hashlib

import torch
from torch import Tensor

NOISE_BLOCK = 65_536
TOGETHER = 64  # blocks in the buffer, 16 MiB


def block_seed(seed: int, step: int, name: str, block: int) -> int:
    """Return a 63-bit key; stable across processes and versions, unlike `hash`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def add_block_noise(
    grad: Tensor, start: int, sigma: float, *, seed: int, step: int, name: str
) -> None:
    """Add noise of standard deviation sigma to `grad`, elements start .. start + numel - 1 of parameter `name`."""
    if sigma == 0 or not grad.numel():
        return
    end = start + grad.numel()
    dtype = grad.dtype if grad.dtype == torch.float64 else torch.float32
    blocks = range(start // NOISE_BLOCK, (end - 1) // NOISE_BLOCK + 1)
    # float64 gradients get the float32 draw, so that the precision of a run does not change its noise
    noise = torch.empty(
        min(len(blocks), TOGETHER) * NOISE_BLOCK, dtype=torch.float32, device=grad.device
    )
    rows = noise.split(NOISE_BLOCK)
    generator = torch.Generator(device=grad.device)
    for i in range(0, len(blocks), TOGETHER):
        drawn = blocks[i : i + TOGETHER]
        for block, row in zip(drawn, rows):
            generator.manual_seed(block_seed(seed, step, name, block))
            row.normal_(generator=generator)
        first = drawn[0] * NOISE_BLOCK
        low, high = max(start, first), min(end, (drawn[-1] + 1) * NOISE_BLOCK)
        grad[low - start : high - start].add_(
            noise[low - first : high - first].to(dtype), alpha=sigma
        )
