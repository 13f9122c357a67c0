"""Half-precision products that are added up in float32: a failing one is an error, and none is tried beforehand."""

import pytest
import torch

from losses import linear_logprobs


def run(**options):
    hidden, weight = (
        torch.randn(n, 8, device="cuda", dtype=torch.float16).requires_grad_() for n in (6, 5)
    )
    targets = torch.zeros(6, dtype=torch.int64, device="cuda")
    linear_logprobs(hidden, weight, targets, **options).logps.sum().backward()


@pytest.mark.gpu
def test_a_failing_product_is_an_error(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch, "addmm", fail)
    with pytest.raises(RuntimeError, match="misaligned address"):
        run(tile_rows=2)


@pytest.mark.gpu
def test_no_product_is_made_only_to_try_it(monkeypatch):
    run()
    shapes, plain = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, **rest: shapes.append(a.shape) or plain(a, b, **rest)
    )
    run()
    assert shapes and torch.Size([16, 16]) not in shapes
