"""run.deterministic: what is switched on."""

import os

import pytest
import torch

from tests import ROOT
from ulysses.check.setting_checks import CUBLAS, require_determinism


@pytest.fixture(autouse=True)
def switch():
    """Leave torch's switch and cuBLAS' setting as they were."""
    before = os.environ.pop(CUBLAS, None)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop(CUBLAS, None)
    if before is not None:
        os.environ[CUBLAS] = before


def test_operations_without_a_deterministic_kernel_will_raise():
    require_determinism()
    assert (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert os.environ[CUBLAS] == ":4096:8"


def test_a_users_own_workspace_is_kept(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    require_determinism()
    assert os.environ[CUBLAS] == ":16:8"


def test_our_triton_kernels_use_no_atomics():
    """Sums by atomics come in any order; every kernel of ours has its own place to write to."""
    texts = [
        path.read_text()
        for name in ("losses", "models", "ulysses")
        for path in (ROOT / name).rglob("*.py")
    ]
    assert any("@triton.jit" in text for text in texts) and not any(
        "tl.atomic_" in text for text in texts
    )
