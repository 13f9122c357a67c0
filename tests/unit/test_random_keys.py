"""Numbers that follow from a key alone: the published splitmix64 sequence, alike on torch and numpy."""

import numpy as np
import torch

from ulysses.parallel.random_keys import STEP, scatter_bits, uniform_bits, wrapped

# the first outputs of splitmix64 from seed 0, as in Vigna's reference implementation
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_hashes_are_splitmix64_on_torch_and_numpy():
    states = torch.arange(1, 5) * STEP
    found = scatter_bits(states)
    assert found.tolist() == [wrapped(number) for number in SPLITMIX64]
    assert scatter_bits(states.numpy()).tolist() == found.tolist()
    assert uniform_bits(found).tolist() == [number >> 11 for number in SPLITMIX64]
    many = uniform_bits(scatter_bits(np.arange(100_000))) * 2.0**-53
    assert (
        0 <= many.min()
        and many.max() < 1
        and abs(many.mean() - 0.5) < 0.003
        and abs(many.var() - 1 / 12) < 0.002
    )
