"""The update of master weights in one pass against torch's AdamW, on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [(4096, 64, 5008), (4099, 1, 777)], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [True, False], ids=["gradients-apart", "sums"])
def test_update_equals_torchs_adamw(lengths, dtype, apart):
    """Weights lie apart from each other, as those that stay whole do; what lies between them is not touched.

    Gradients are in the sums, or of one micro-batch in the weights' dtype, wherever they are.
    """
    from ulysses.zero.gpu_kernels import OnePassSubGroup
    from ulysses.zero.update import ParameterGroup

    torch.manual_seed(0)
    master = torch.randn(sum(lengths), device="cuda", requires_grad=True)
    theirs = master.detach().clone().requires_grad_()
    settings = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    flat = master.detach()
    plain = torch.optim.AdamW([theirs], **settings)
    memory = torch.full((len(lengths), 8192), 7.0, dtype=dtype, device="cuda")
    weights = [row[:length] for row, length in zip(memory, lengths)]
    few = OnePassSubGroup(ParameterGroup([], **settings), [], weights, [*lengths], flat)
    for step in range(4):
        theirs.grad = (torch.randn_like(theirs) * 10.0 ** (step - 2)).to(dtype).float()
        if apart:
            grads = [part.to(dtype, copy=True) for part in theirs.grad.split(lengths)]
        else:
            few.gradient_sums().copy_(theirs.grad)
            grads = [*few.gradient_sums().split(lengths)]
        theirs.grad *= 0.25
        lr = plain.param_groups[0]["lr"] = 0.1 / (step + 1)
        few.update(grads, lr, 0.25)
        plain.step()
        torch.testing.assert_close(flat, theirs.detach(), rtol=2e-6, atol=2e-6)
    for name, want in plain.state[theirs].items():
        torch.testing.assert_close(few.moments[name].cpu(), want.cpu(), rtol=2e-6, atol=1e-7)
    for row, own, part in zip(memory, weights, flat.split(lengths)):
        assert torch.equal(own, part.to(dtype)) and (row[len(own) :] == 7).all()
