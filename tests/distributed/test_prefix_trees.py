"""Sequences that continue others, which continue others: loss and gradients are those of the whole sequences."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.moe import times_counted
from tests.engine_case import HYBRID, SHAPE
from tests.family_case import FAMILIES
from tests.forest_case import as_trees, forest
from tests.harness import device, run_distributed
from tests.memory_case import build
from ulysses import ParallelMesh, pack_shard
from ulysses.memory.levels import LayerMemory

VOCABULARY = SHAPE.vocab_size
MODELS = {
    "llama": SHAPE,
    "three heads": replace(SHAPE, num_attention_heads=3, num_key_value_heads=1, head_dim=8),
    "qwen3_5": HYBRID,
    **{
        name: ModelConfig.from_hf(FAMILIES[name] | {"vocab_size": VOCABULARY})
        for name in ("gpt-oss", "gemma3", "qwen3_5_moe")
    },
}


def loss_of(model, sequences, mesh):
    batch = pack_shard(sequences, mesh, device())
    logps = model(batch).logps
    return -(logps * batch.loss_weights.to(logps.dtype)).sum(), batch


def on_ranks(sp, name, dtype, level):
    config = MODELS[name]
    mesh = ParallelMesh(sp, num_heads=config.num_attention_heads, windows=config.windows)
    model = CausalLM(config, mesh, memory=LayerMemory(level)).to(dtype)
    model.load_state_dict(build(dtype, config).state_dict())
    loss, batch = loss_of(model, as_trees(forest(0, VOCABULARY)), mesh)
    loss.backward()
    values = [loss.detach(), *(p.grad for p in model.parameters())]
    if mesh.sp_group is not None:
        for x in values:
            dist.all_reduce(x, group=mesh.sp_group)
    deepest = max(map(len, batch.attention_plan.prefixes.values()))
    return values, batch.num_tokens_shared, deepest


@cache
def one_by_one(name, dtype):
    config, loss = MODELS[name], 0.0
    model = CausalLM(config, attention="reference").to(dtype)
    model.load_state_dict(build(dtype, config).state_dict())
    for one in forest(0, VOCABULARY):
        value, _ = loss_of(model, [one.sequence], ParallelMesh())
        value.backward()
        loss = loss + value.detach()
    return [loss, *(p.grad for p in model.parameters())]


def distances(found, wanted):
    """How far a loss is from the right one, and how far all gradients together are."""
    both = (torch.cat([x.double().flatten() for x in values[1:]]) for values in (found, wanted))
    return [
        float((x - y).norm() / y.norm())
        for x, y in ((found[0].double(), wanted[0]), tuple(both))
    ]


@pytest.mark.parametrize(
    "sp, name, level",
    [
        (2, "llama", "block"),
        (3, "three heads", "none"),
        (2, "qwen3_5", "keep_attention"),
        (3, "qwen3_5", "block"),
        (1, "gpt-oss", "none"),
        (3, "gpt-oss", "keep_attention"),
        (2, "gemma3", "keep_attention"),
        (2, "qwen3_5_moe", "keep_attention"),
    ],
)
def test_a_forest_is_its_whole_sequences(sp, name, level):
    """Windows, sinks, linear attention and experts; branches at any token, and trained tokens that several share."""

    def results(dtype):
        return run_distributed(on_ranks, sp, sp, name, dtype, level)[0]

    exact, whole = (one_by_one(name, dtype) for dtype in (torch.float64, torch.float32))
    got, tokens_shared, deepest = results(torch.float64)
    assert tokens_shared > 400 and deepest > 1
    for x, y in zip(got, exact):
        assert (x - y).norm() < 5e-14 * y.norm(), x.shape
    # what whole sequences lose to rounding is allowed besides
    for error, rounding in zip(
        distances(results(torch.float32)[0], exact), distances(whole, exact)
    ):
        assert error < 1e-6 + rounding


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_prefix_count_once_for_each_sequence(seed):
    """Each whole sequence is its prefix's rows and its own, and experts count a row as often as it is read so."""
    trees = as_trees(forest(seed, VOCABULARY))
    batch = pack_shard(trees, ParallelMesh())
    plan, wanted = batch.attention_plan, torch.zeros(batch.num_tokens, dtype=torch.int64)
    for i, own in enumerate(zip(plan.cu_seqlens, plan.cu_seqlens[1:])):
        rows = torch.cat([torch.arange(*part) for part in (*plan.prefixes.get(i, ()), own)])
        assert batch.tokens[rows].equal(trees[i].tokens)
        assert batch.positions[rows].equal(torch.arange(len(rows)))
        wanted[rows] += 1
    assert batch.num_tokens_shared == sum(len(s.tokens) for s in trees) - batch.num_tokens
    assert times_counted(batch).equal(wanted)
