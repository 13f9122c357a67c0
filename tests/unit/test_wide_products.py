"""Half-precision products that are added up in float32: tried once, and only a missing one is passed over."""

import pytest
import torch

from losses import linear_logprobs


def test_wide_products_are_tried_once_and_only_a_missing_one_is_passed_over(monkeypatch):
    plain, complaints, tried = torch.mm, ["CUDA error: misaligned address"], []

    def mm(a, b, *, out_dtype=None):
        return plain(a, b) if out_dtype is None else plain(a.float(), b.float())

    def addmm(*_, **__):
        tried.append(complaints[-1])
        raise RuntimeError(complaints[-1])

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr("losses.logprobs._has_wide_mm", lambda weight: True)
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw).bfloat16().requires_grad_() for n in (6, 5))
    targets = torch.tensor([0, 1, 2, 3, 4, 0])

    def gradient():
        return torch.autograd.grad(linear_logprobs(hidden, weight, targets, tile_rows=2).logps.sum(), weight)[0]

    with pytest.raises(RuntimeError, match="misaligned address"):
        gradient()
    complaints.append("self and mat2 must have the same dtype")
    first, again = gradient(), gradient()
    assert tried == complaints and torch.equal(first, again)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, targets[:, None]).sum()
    (wanted,) = torch.autograd.grad(exact, weight)
    assert (first - wanted).norm() < 1e-2 * wanted.norm()
