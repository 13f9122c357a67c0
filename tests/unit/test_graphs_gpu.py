"""Layers that run as CUDA graphs give the numbers of layers that run one by one, whatever comes in between."""

import json
from dataclasses import replace

import pytest
import torch

from models.arch import ModelConfig
from models.decoder import CausalLM
from tests.memory_case import assert_same_gradients, packed
from tests.model_folder import init_weights
from ulysses.memory.graphs import padded
from ulysses.memory.levels import LayerMemory

SHAPE = ModelConfig.from_hf(
    json.loads("""{
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": true
}""")
)
QWEN3 = replace(SHAPE, model_type="qwen3", attention_bias=False)
# windows shorter than most documents, norms after both halves, tanh-GELU
GEMMA = ModelConfig.from_hf(
    SHAPE.to_hf()
    | {"model_type": "gemma3_text", "sliding_window": 50, "query_pre_attn_scalar": 64}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_act": None}
    | {"hidden_activation": None, "rope_parameters": None}
)


def pack(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 512, (n,), generator=draw) for n in lengths]
    return packed(*rows, device="cuda")


def model(shape, graphs):
    made = CausalLM(shape, memory=LayerMemory(graphs=graphs)).to("cuda", torch.bfloat16)
    init_weights(made, seed=1)
    return made


def step(trained, batch):
    """Return the log-probabilities and all gradients of a batch."""
    logps = trained(batch).logps
    (logps * torch.linspace(0.5, 1.5, len(logps), device="cuda")).sum().backward()
    found = [logps.detach().clone(), *(p.grad.clone() for p in trained.parameters())]
    trained.zero_grad()
    return found


def assert_same(found, expected):
    """Kernels may choose other tiles for other numbers of rows, so bits may differ."""
    of_found, of_expected = (
        {str(number): x for number, x in enumerate(some)} for some in (found, expected)
    )
    assert_same_gradients(of_found, of_expected, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPE, QWEN3, GEMMA], ids=["qwen2", "qwen3", "gemma3"])
def test_packs_of_many_sizes_weights_that_change_and_passes_in_between(shape):
    graphs, plain = model(shape, True), model(shape, False)
    layers = graphs.model.graphs
    packs = [
        pack(200, 1, 300),
        pack(150, 350, seed=1),
        pack(90, 60, 50, 290, seed=2),
        pack(*[20] * 40, seed=3),
    ]
    for _ in range(3):
        for batch in packs:
            with torch.no_grad():
                evaluated = graphs(batch).logps
            assert_same([evaluated], [plain(batch).logps.detach()])
            assert_same(step(graphs, batch), step(plain, batch))
        graphs(packs[0])  # a pass that is never differentiated
        with torch.no_grad():  # an update in place
            for ours, theirs in zip(graphs.parameters(), plain.parameters()):
                change = 0.01 * torch.randn_like(ours)
                ours += change
                theirs += change
    assert {size[0] for size in layers._recorded} == {512, 1024 - 128}, (
        "three packs share one size"
    )


@pytest.mark.gpu
def test_what_graphs_cannot_do_runs_without_them():
    graphs, plain, batch = model(SHAPE, True), model(SHAPE, False), pack(100, 200)
    for _ in range(2):
        step(graphs, batch)
    layers = graphs.model.graphs
    assert len(layers._recorded) == 1
    # two forward passes before the first backward: the second may not overwrite what the first one keeps
    other = pack(120, 180, seed=5)
    (graphs(batch).logps.sum() + 2 * graphs(other).logps.sum()).backward()
    (plain(batch).logps.sum() + 2 * plain(other).logps.sum()).backward()
    expected = [p.grad for p in plain.parameters()]
    assert_same([p.grad for p in graphs.parameters()], expected)
    graphs.zero_grad()
    plain.zero_grad()
    # two backward passes add up
    for trained in (graphs, plain):
        for one in (batch, other):
            trained(one).logps.sum().backward()
    assert_same([p.grad for p in graphs.parameters()], [p.grad for p in plain.parameters()])
    # a hook sees every call
    seen = []
    handle = graphs.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    graphs(batch)
    handle.remove()
    assert seen == [1]
    # weights elsewhere
    graphs.zero_grad()
    for p in graphs.parameters():
        p.data = p.data.clone() * 0.5
    for p in plain.parameters():
        p.data = p.data * 0.5
    plain.zero_grad()
    for _ in range(3):
        assert_same(step(graphs, batch), step(plain, batch))


def test_sizes_are_few_and_at_most_an_eighth_too_large():
    for count in (1, 127, 128, 129, 1000, 6500, 7168, 100_001):
        size = padded(count, 128, 8)
        assert count <= size < max(count + 128, 1.125 * count) and padded(size, 128, 8) == size
    assert len({padded(n, 128, 8) for n in range(4096, 8193)}) == 9


@pytest.mark.gpu
def test_a_graph_is_recorded_while_an_ordinary_pass_is_referred_to():
    """As in a step whose first micro-batch has a new size and whose second one has a size seen once."""
    graphs, plain, batch = model(SHAPE, True), model(SHAPE, False), pack(100, 200)
    step(graphs, batch)
    loss = graphs(pack(700, 20)).logps.sum()
    loss.backward()
    graphs.zero_grad()
    assert_same(step(graphs, batch), step(plain, batch))
    assert len(graphs.model.graphs._recorded) == 1
    assert loss.grad_fn is not None
