"""Offload on a GPU: real copies on a side stream give back every bit, in less memory, step after step."""

import weakref

import pytest
import torch

from models.arch import ModelConfig
from models.decoder import CausalLM
from tests.memory_case import all_chunks_are_free
from tests.model_folder import init_weights
from tests.unit.test_graphs_gpu import pack
from ulysses.memory.levels import LayerMemory
from ulysses.memory.offload import Group, Offloader

LAYERS, TOKENS = 8, 6000
SHAPE = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
})  # fmt: skip


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(level, dtype, offloader, away=None):
    """Return the gradients of every step, and the most bytes that were allocated beside weights and gradients."""
    model = CausalLM(
        SHAPE, attention="reference", memory=LayerMemory(level, 1000, offloader, away)
    ).to("cuda", dtype)
    init_weights(model, seed=1)
    # steps of different lengths, so that host chunks and device memory are used again for other sizes
    steps = [pack(1, TOKENS - 7 * i, 2000, seed=i) for i in range(3)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # from the start, so that the peak is one of activations
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = []
    for batch in steps:
        model(batch).logps.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).cpu())
        model.zero_grad(set_to_none=False)
    return grads, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["block", "keep_attention"])
def test_offloaded_gradients_are_bitwise_the_same(level, dtype, deterministic):
    expected, whole = train(level, dtype, None)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(level, dtype, None)[0])), (
        "the case itself must repeat"
    )
    kept = (
        TOKENS * SHAPE.hidden_size * expected[0].element_size()
    )  # at least this much per layer
    for away in (None, LAYERS // 2):
        offloader = Offloader("cuda", chunk_bytes=1 << 20)
        found, peak = train(level, dtype, offloader, away)
        for a, b in zip(found, expected):
            assert torch.equal(a, b), away
        assert all_chunks_are_free(offloader)
        if away is None:
            assert (
                peak < whole - (LAYERS - 4) * kept
            )  # two layers' groups at a time, and one being given back


@pytest.mark.gpu
def test_copies_wait_for_the_computation_and_it_for_them():
    """Long kernels before the tensor is made, and others that take its memory at once when it has left."""
    offloader = Offloader("cuda", chunk_bytes=1 << 20)
    slow, size = torch.randn(4096, 4096, device="cuda"), 32 << 20
    groups, values = [], []
    for i in range(6):
        product = slow
        for _ in range(20):
            product = product @ slow * 1e-4
        group = Group(offloader)
        nothing = product[0, 0].nan_to_num().clamp(0, 0)
        value = torch.full((size // 4,), float(i), device="cuda") + nothing
        groups.append(group)
        values.append(weakref.ref(value))
        group.keep(value)
        del value, product
        group.close()
        torch.full((size // 4,), -1.0, device="cuda")  # takes freed memory
    assert [value() is None for value in values] == [True] * 5 + [False]
    for i in reversed(range(6)):
        (back,) = groups.pop().tensors()
        assert bool((back == i).all())
        del back
        torch.full((size // 4,), -1.0, device="cuda")
