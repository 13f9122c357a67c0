"""Random numbers that depend on a key alone: the same on any number of ranks and in any order of drawing.

Whole tensors come from a generator that is seeded by their key (seed_of, keyed_generator). Single numbers of arrays are
hashes of their keys (scatter_bits), the same in torch and numpy.
"""

import hashlib
from typing import TypeVar

import numpy as np
import torch

Bits = TypeVar("Bits", torch.Tensor, np.ndarray)  # int64


def wrapped(number: int) -> int:
    """Return the signed 64-bit integer with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


# splitmix64's increment, an odd number near 2**64 / golden ratio
STEP = wrapped(0x9E3779B97F4A7C15)


def seed_of(*key: object) -> int:
    """Return a generator's seed from the parts of a key, such as (seed, parameter name)."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def keyed_generator(device: torch.device | str, *key: object) -> torch.Generator:
    """Return a generator whose numbers follow from the key and the type of the device."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def scatter_bits(values: Bits) -> Bits:
    """Hash an int64 tensor or numpy array by the finaliser of splitmix64, a bijection (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * wrapped(factor)
    return values ^ _shifted(values, 31)


def uniform_bits(values: Bits) -> Bits:
    """Return the upper 53 bits of hashes as integers in [0, 2**53): one for every double in [0, 1)."""
    return _shifted(values, 11)


def _shifted(values: Bits, count: int) -> Bits:
    """Shift right and fill with zeros, which >> does not do for signed integers."""
    return (values >> count) & ((1 << (64 - count)) - 1)
