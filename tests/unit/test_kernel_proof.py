"""The attention kernel is proven once for each machine, version and shape, and never remembered if it is wrong."""

import sys
from unittest import mock

import pytest
import torch

from models.ops import delta_kernels
from tests.engine_case import HYBRID
from ulysses.check import kernel_proof
from ulysses.check.kernel_proof import check_kernel, choose_kernel, prove_once
from ulysses.config.command_line import check
from ulysses.options import stage_of
from ulysses.parallel.attention import prove_kernel
from ulysses.parallel.kernels.choice import KernelChoice
from ulysses.parallel.mesh import ParallelMesh

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
    assert prove.call_count == 2 and not [*tmp_path.glob("*.json")]


def hybrid_on_a_gpu(monkeypatch, attention):
    """Return the stage of a hybrid's run, with proofs that are only counted."""
    settings = {"path": "x", "attention": attention}
    config = check(
        {"stage": "sft", "data": {"train": ["x"]}, "run": {"steps": 1}, "model": settings}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        kernel_proof, "resolve_kernel", lambda *_, **__: KernelChoice("torch", "")
    )
    monkeypatch.setattr(kernel_proof, "prove_once", proofs := mock.Mock())
    return stage_of(config), proofs


def test_that_kernels_of_linear_attention_are_absent_is_told_before_data_are_read(monkeypatch):
    """And plain torch, which model.attention asks for, needs none."""
    for name in ("fla", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, None)
    delta_kernels.load.cache_clear()
    stage, _ = hybrid_on_a_gpu(monkeypatch, "auto")
    with pytest.raises(ValueError, match=r"install them with pip install -e .\.\[hybrid\]"):
        choose_kernel(stage, HYBRID)
    monkeypatch.setattr(delta_kernels, "load", load := mock.Mock())
    for attention, count in (("torch", 2), ("reference", 1)):
        stage, proofs = hybrid_on_a_gpu(monkeypatch, attention)
        if attention == "reference":
            assert choose_kernel(stage, HYBRID)[0] == "reference"
        check_kernel(stage, HYBRID, attention, torch.device("cuda"), ParallelMesh(), False)
        assert proofs.call_count == count and load.call_count == 1  # before memory is taken
