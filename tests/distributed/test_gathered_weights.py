"""Weights are gathered once per direction at every level, and none outlives its layer's forward."""

import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from models.layers import DecoderLayer
from tests import engine_case
from tests.harness import run_distributed
from ulysses.memory.levels import LEVELS, TILE_ROWS, LayerMemory
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh

LAYERS = 6
SHAPE = replace(engine_case.SHAPE, num_hidden_layers=LAYERS, vocab_size=300)
# no parameter is too small to be partitioned between uses
MATRICES = {"layer_matrices": 7680, "vocabulary_matrices": 2 * 300 * 32}


def batch():
    return pack_shard([Sequence(torch.arange(9), torch.ones(9))], ParallelMesh(1))


def train(engine):
    engine.backward(engine(batch()).logps.sum())
    engine.step(engine.gradients(), 0.0)


def evaluate(engine):
    with engine.inference():
        engine(batch())


def alive_before_backward(rank):
    own = F.linear
    case = engine_case.Case("sft", shape=SHAPE, lora_rank=rank)
    engine, _ = engine_case.zero_engine(case, **MATRICES)
    gathered = []

    def watch(layer, _):
        gathered.extend(StorageWeakRef(p.data.untyped_storage()) for p in layer.parameters())

    for layer in engine.module.modules():
        if isinstance(layer, DecoderLayer):
            layer.register_forward_pre_hook(watch)
    loss = engine(batch()).logps.sum()
    gc.collect()
    assert gathered and all(storage.expired() for storage in gathered) and F.linear is own
    engine.backward(loss)


@pytest.mark.parametrize("rank", [0, 4])
def test_no_gathered_weight_outlives_its_layers_forward(rank):
    run_distributed(alive_before_backward, 2, rank, cpu=True)


def gathers(levels):
    """How often each parameter is gathered in a step, by level; the ranks disagree about the number of tiles."""
    engine, _ = engine_case.zero_engine(engine_case.Case("sft", shape=SHAPE), **MATRICES)
    decoder = engine.module.model
    names = {p: name for name, p in engine.module.named_parameters()}
    calls = Counter()

    def counted(own, group, *args, **options):
        calls.update(names[q] for q in group)
        return own(group, *args, **options)

    found, tilings = {}, (TILE_ROWS, 2 + 2 * dist.get_rank())
    decoder.set_memory(LayerMemory(levels[-1]))
    for _ in range(2):  # DeepSpeed learns the order of the layers
        evaluate(engine)
        train(engine)
    for p in names:
        p.all_gather_coalesced = partial(counted, p.all_gather_coalesced)
    for level, rows in product(levels, tilings):
        decoder.set_memory(LayerMemory(level, rows))
        evaluate(engine)
        calls.clear()
        train(engine)
        found[f"{level} {rows}"] = dict(calls)
    return found


def test_weights_are_gathered_once_per_direction():
    """Neither a recomputed layer nor the tiles of its MLP gather again.

    What ends the forward may stay for the backward. A pass without a backward half before each step changes nothing.
    """
    last = ("lm_head", "model.norm", f"model.layers.{LAYERS - 1}.")
    for found in run_distributed(gathers, 2, LEVELS, cpu=True):
        assert len(found) == 2 * len(LEVELS)
        for calls in found.values():
            assert len(calls) == 3 + 9 * LAYERS
            for name, count in calls.items():
                kept = name.startswith(last) and count == 1
                assert kept or count == 2, (calls, name)
