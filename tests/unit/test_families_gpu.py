"""Every family on a GPU in bfloat16: windows, wide heads and all, as near to float64 as plain attention is."""

import pytest
import torch

from models.arch import ModelConfig
from tests.family_case import FAMILIES
from tests.memory_case import build, packed

LENGTHS = (700, 1, 333, 64)
# hidden size, query heads, kv heads, head dim
SIZES = {"64": (256, 4, 2, 64), "128": (256, 4, 1, 128), "256": (256, 2, 1, 256)}


def gradients(model, device):
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 131, (n,), generator=draw) for n in LENGTHS]
    batch = packed(*rows, device=device)
    logps = model(batch).logps
    weights = torch.linspace(-1, 1, len(logps), device=device, dtype=logps.dtype)
    (logps * weights).sum().backward()
    return [logps.detach(), *(p.grad for p in model.parameters())]


def error(found, exact):
    """Of the log-probabilities, and of all gradients together."""
    off = [(a.cpu().double() - b).norm() for a, b in zip(found, exact)]
    sizes = [b.norm() for b in exact]
    grads, size = (torch.stack(x[1:]).norm() for x in (off, sizes))
    return float(off[0] / sizes[0]), float(grads / size)


@pytest.mark.gpu
@pytest.mark.parametrize("level, tile", [("none", 1 << 16), ("keep_attention", 200)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float64_as_with_plain_attention(name, size, level, tile):
    hidden, heads, kv_heads, head_dim = SIZES[size]
    changes = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": 512, "max_position_embeddings": 1024,
    }  # fmt: skip
    if FAMILIES[name].get("sliding_window"):
        changes["sliding_window"] = 100
    if FAMILIES[name].get("linear_key_head_dim"):
        pytest.importorskip("fla")
        changes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = ModelConfig.from_hf(FAMILIES[name] | changes)
    exact = gradients(build(torch.float64, config), "cpu")
    memory = {"recompute": level, "mlp_tile": tile}
    errors = []
    for kernel in ("auto", "reference"):
        model = build(torch.bfloat16, config, **memory).cuda()
        for module in model.modules():
            if hasattr(module, "kernel"):
                module.kernel = kernel
        errors.append(error(gradients(model, "cuda"), exact))
    for ours, plain in zip(*errors):
        assert ours < 1.3 * plain, errors
