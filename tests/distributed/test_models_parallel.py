"""Models under real ZeRO-3 at every memory level equal one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from models.decoder import Decoder
from tests.engine_case import HYBRID, SHAPE, Case, build_trainer, sequences, zero_engine
from tests.harness import device, run_distributed
from tests.memory_case import assert_same_gradients
from tests.zero_case import filled, whole, whole_gradients
from ulysses.memory.levels import LEVELS, TILE_ROWS, LayerMemory
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.zero.engine import full_parameters

TIED = replace(SHAPE, model_type="qwen2", attention_bias=True, tie_word_embeddings=True)
TOKENS = sequences(4, seed=2, longest=25)


def loss_of(model, batch):
    return -(model(batch).logps * batch.loss_weights).sum()


def decays_after_an_update(case):
    """The model, the optimizer and an export have the same float32 numbers; everything else is in bfloat16."""
    trainer, _ = build_trainer(case)
    trainer.train_step()
    engine = trainer.engine
    masters = {s.name: whole(s, s.state("master")).cpu() for s in engine.slices}
    start = case.weights()
    for name, found in full_parameters(engine):
        exact = name.endswith(("A_log", "dt_bias"))
        if found is None:
            continue
        assert (found.dtype == torch.float32) == exact, name
        assert torch.equal(found.view(-1), masters[name].to(found.dtype)), name
        before = torch.empty_like(found)
        start.fill(name, before.shape, 0, before.view(-1))
        assert not exact or not torch.equal(before, found), name
        assert not exact or not torch.equal(found, found.bfloat16().float()), name
    engine.destroy()


@pytest.mark.parametrize("how", [{}, {"resident": True}, {"offload_optimizer": True}])
def test_the_decays_of_linear_attention_stay_in_float32(how):
    case = Case("sft", sp=2, shape=HYBRID, dtype=torch.bfloat16, lr=1e-3, engine=how)
    run_distributed(decays_after_an_update, 2, case)


def under_zero(case, expected, tolerance):
    """Every level and tiling in the engine against plain torch in one process."""
    (engine, mesh), rank, world = zero_engine(case), dist.get_rank(), dist.get_world_size()
    decoder = next(m for m in engine.module.modules() if isinstance(m, Decoder))
    batch = pack_shard(TOKENS if case.sp == world else TOKENS[rank::world], mesh, device())
    settings = [*((level, 4 + 3 * rank) for level in LEVELS), ("block", TILE_ROWS)]
    for level, rows in [*settings, (["keep_attention", "none"], TILE_ROWS)]:
        decoder.set_memory(LayerMemory(level, rows))
        engine.backward(loss_of(engine, batch) * world)
        assert_same_gradients(whole_gradients(engine.gradients()), expected, tolerance)
        engine.skip_step()
    engine.destroy()


@pytest.mark.parametrize(
    "case, tolerance",
    [
        (Case("sft", sp=2), 1e-5),
        (Case("sft", shape=TIED), 1e-5),
        (Case("sft", sp=2, shape=TIED, dtype=torch.bfloat16), 0.1),
    ],
    ids=["untied", "tied-dp", "bfloat16"],
)
def test_zero3_gradients_at_every_level(case, tolerance):
    model = filled(case.model(None, "auto"), case.weights())
    loss_of(model, pack_shard(TOKENS, ParallelMesh(1))).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    run_distributed(under_zero, 2, case, expected, tolerance)
