"""The attention kernel is proven once for each machine, version and shape, and never remembered if it is wrong."""

from unittest import mock

import pytest
import torch

from ulysses.check.kernel_proof import prove_once
from ulysses.parallel.attention import prove_kernel

CASE = torch.float32, 4, 2, 16, 64


def test_a_proof_is_remembered_with_all_that_it_depends_on(tmp_path):
    device, prove = torch.device("cpu"), mock.Mock()
    for kernel in ("torch", "torch", "reference"):
        prove_once(tmp_path / "cache", kernel, device, *CASE, prove=prove)
    assert prove.call_count == 2
    prove_once(tmp_path / "cache", "torch", device, *CASE[:-1], 4096, prove=prove)
    with mock.patch.object(torch, "__version__", "9.9"):
        prove_once(tmp_path / "cache", "torch", device, *CASE, prove=prove)
    assert prove.call_count == 4


def test_a_window_of_one_token_has_no_gradients_to_be_off_by():
    prove_kernel("torch", torch.device("cpu"), *CASE, (1, None))


def test_a_wrong_kernel_is_not_remembered(tmp_path):
    prove = mock.Mock(side_effect=FloatingPointError("wrong gradient"))
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            prove_once(tmp_path, "torch", torch.device("cpu"), *CASE, prove=prove)
    assert prove.call_count == 2 and not [*tmp_path.iterdir()]
