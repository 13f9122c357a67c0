"""Models under real ZeRO-3 at every memory level equal one process; collectives are counted."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.decoder import CausalLM, Decoder
from tests.engine_case import QWEN3, SHAPE, Case, sequences
from tests.harness import device, gpus, need_gpus, run_distributed
from tests.memory_case import assert_same_gradients
from tests.model_folder import init_weights
from tests.unit.test_kernels import gpu_kernels
from tests.zero_case import filled, trained_engine, whole_gradients
from ulysses.memory.levels import LEVELS, LayerMemory
from ulysses.memory.tiling import TILE_ROWS
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.zero.construct import initialize_distributed

TIED = replace(SHAPE, model_type="qwen2", attention_bias=True, tie_word_embeddings=True)
WIDE = replace(SHAPE, hidden_size=256, head_dim=64)  # a size that every kernel knows
TOKENS = sequences(4, seed=2, longest=25)


def loss_of(model: Any, batch: ShardedBatch) -> torch.Tensor:
    return -(model(batch).logps * batch.loss_weights).sum()


def collectives() -> dict[str, float]:
    """All-to-alls of a layer at sp 2, by level; the ranks disagree about the number of tiles."""
    mesh, counts = ParallelMesh(2), {}
    for level in LEVELS:
        model = CausalLM(SHAPE, mesh, memory=LayerMemory(level, 5 + 3 * dist.get_rank()))
        init_weights(model)
        with mock.patch.object(
            dist, "all_to_all_single", wraps=dist.all_to_all_single
        ) as calls:
            loss_of(model.to(device()), pack_shard(TOKENS, mesh, device())).backward()
        counts[level] = calls.call_count / SHAPE.num_hidden_layers
    return counts


def test_a_level_repeats_only_its_collectives():
    for counts in run_distributed(collectives, 2):
        assert counts == {"pair": 7, "block": 6, "keep_attention": 6, "none": 4}


def under_zero(case: Case, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every level and tiling in the engine against plain torch in one process."""
    initialize_distributed()
    mesh, rank, world = ParallelMesh(case.sp), dist.get_rank(), dist.get_world_size()
    engine = trained_engine(lambda: case.model(mesh), case.weights(), dtype=case.dtype)
    decoder = next(m for m in engine.module.modules() if isinstance(m, Decoder))
    batch = pack_shard(TOKENS if case.sp == world else TOKENS[rank::world], mesh, device())
    settings = [(level, 4 + 3 * rank) for level in LEVELS]
    for level, rows in (
        *settings,
        ("block", TILE_ROWS),
        (["keep_attention", "none"], TILE_ROWS),
    ):
        decoder.set_memory(LayerMemory(level, rows))
        engine.backward(loss_of(engine, batch) * world, last=True)
        assert_same_gradients(whole_gradients(engine.gradients()), expected, tolerance)
        engine.skip_step()
    engine.destroy()


def check(case: Case, tolerance: float = 1e-5) -> None:
    model = filled(case.model(None, "auto"), case.weights())
    loss_of(model, pack_shard(TOKENS, ParallelMesh(1))).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    run_distributed(under_zero, 2, case, expected, tolerance)


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [(Case("sft", sp=2), 1e-5), (Case("sft", shape=TIED), 1e-5), (Case("sft", sp=2, lora_rank=3), 1e-5),
     (Case("sft", sp=2, shape=TIED, dtype=torch.bfloat16), 0.1), (Case("sft", sp=2, shape=QWEN3), 1e-5)],
    ids=["untied", "tied-dp", "adapters", "bfloat16", "qwen3"],
)  # fmt: skip
def test_zero3_gradients_at_every_level(case, tolerance):
    check(case, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", gpu_kernels() if gpus() else ["auto"])
def test_every_kernel_of_this_machine_under_zero3(kernel):
    need_gpus(2)
    check(Case("sft", sp=2, shape=WIDE, dtype=torch.bfloat16, attention=kernel), 0.1)
