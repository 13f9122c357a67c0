"""Moments in 8 bits: bitsandbytes' update on whole tensors, and float32 moments that restore every bit."""

import pytest
import torch
from bitsandbytes.optim import AdamW8bit

from ulysses.zero.eight_bit import PLACES, EightBitSubGroup
from ulysses.zero.update import ParameterGroup

LENGTHS = (
    4096,
    5003,
    300,
    8192 + 17,
)  # blocks of 256, ends of blocks, and one too small for 8 bits
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def updated(device, start, *, same_table, apart=False):
    """Our sub-group after some updates, and what bitsandbytes' and torch's optimizers make of the same parameters."""
    flat = start.to(device, copy=True)
    theirs = [part.clone().requires_grad_() for part in flat.split(LENGTHS)]
    optimizer = AdamW8bit(theirs, **SETTINGS)
    if same_table:
        optimizer.name2qmap["dynamic"][0] = -1.0
    exact = flat.clone().requires_grad_()
    in_float32 = torch.optim.AdamW([exact], **SETTINGS)
    weights = [part.clone() for part in flat.split(LENGTHS)]
    few = EightBitSubGroup(ParameterGroup([], 0.1), [], weights, [*LENGTHS], flat)
    rates = 10.0 ** torch.randint(-6, 0, (sum(LENGTHS),))
    for step in range(8):
        grad = (torch.randn(sum(LENGTHS)) * rates).to(flat)
        if not apart:
            few.gradient_sums().copy_(grad)
        for own, part in zip(theirs, grad.split(LENGTHS)):
            own.grad = part * 0.25
        exact.grad = grad * 0.25
        lr = 1e-2 / (step + 1)
        few.update((grad if apart else few.gradient_sums()).split(LENGTHS), lr, 0.25)
        for other in (optimizer, in_float32):
            other.param_groups[0]["lr"] = lr
            other.step()
    assert torch.equal(torch.cat(weights), flat)
    return few, torch.cat([own.detach() for own in theirs]), exact.detach()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_update_is_that_of_bitsandbytes_and_restores_every_bit(device):
    torch.manual_seed(0)
    start = torch.randn(sum(LENGTHS))
    # their table gives the largest element of a block -0.993 of it, if that is negative: a small part of what eight
    # bits lose of such gradients, which is a third of the change
    for same_table, apart, most in (
        (True, True, 1e-6),
        (True, False, 1e-6),
        (False, False, 0.1),
    ):
        few, wanted, exact = updated(device, start, same_table=same_table, apart=apart)
        assert (few.master - wanted).norm() <= most * (wanted - exact).norm()
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    tensors = [
        x for state in few.moments.values() for x in state.values() if torch.is_tensor(x)
    ]
    before = [x.clone() for x in tensors]
    assert {x.dtype for x in before} == {torch.uint8, torch.float32} and few.updates == 8
    for kind in PLACES:
        for at, length in zip(starts, LENGTHS):
            values = few.state(kind, at, length)
            few.restore(kind, at, values.clone())
            assert torch.equal(few.state(kind, at, length), values)
    assert all(map(torch.equal, tensors, before))
