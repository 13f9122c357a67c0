"""The attention kernel is proven once for each machine, version and shape, and never remembered if it is wrong."""

from unittest import mock

import pytest
import torch

from ulysses.check import kernel_proof

CASE = torch.float32, 4, 2, 16, 64


def test_a_proof_is_remembered_with_all_that_it_depends_on(tmp_path):
    device = torch.device("cpu")
    with mock.patch.object(kernel_proof, "prove_kernel") as prove:
        for kernel in ("torch", "torch", "reference"):
            kernel_proof.prove_once(tmp_path / "cache", kernel, device, *CASE)
        assert prove.call_count == 2
        kernel_proof.prove_once(tmp_path / "cache", "torch", device, *CASE[:-1], 4096)
        with mock.patch.object(torch, "__version__", "9.9"):
            kernel_proof.prove_once(tmp_path / "cache", "torch", device, *CASE)
        assert prove.call_count == 4


def test_a_wrong_kernel_is_not_remembered(tmp_path):
    wrong = FloatingPointError("wrong gradient")
    with mock.patch.object(kernel_proof, "prove_kernel", side_effect=wrong) as prove:
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                kernel_proof.prove_once(tmp_path, "torch", torch.device("cpu"), *CASE)
    assert prove.call_count == 2 and not [*tmp_path.iterdir()]
