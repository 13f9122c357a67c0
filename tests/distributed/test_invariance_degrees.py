"""THE invariance test where the degree does not divide the heads: ranks share heads and split query rows.

Models with 3, 6 and 14 query heads on 2 to 4 processes; packs with one-token sequences and shards without a trained
token. SFT or DPO on every topology, the other stages on one or two, with changing recompute levels and kernels; the
whole product is marked full. (PPO: test_ppo.py.)
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.families import RopeScaling
from tests.distributed.test_invariance_stages import check
from tests.engine_case import MOE, QWEN3, SHAPE, Case
from tests.harness import device, full, run_distributed
from tests.model_folder import init_weights
from tests.shuffled_loader import ShuffledLoader
from tests.stage_case import COMPARED, STAGE_CASES
from tests.unit.test_layout import simulated_mesh
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.stages.cached_reference import read_reference

# name: query heads, kv heads, head dim, processes, degree -> ranks that exchange heads x ranks that split rows
TOPOLOGIES = {
    "6/2 2x2": (6, 2, 8, 4, 4),
    "14/2 2x2": (14, 2, 4, 4, 4),
    "3/1 1x2": (3, 1, 8, 2, 2),
    "3/1 1x4": (3, 1, 8, 4, 4),
    "3/1 1x2 dp 2": (3, 1, 8, 4, 2),
    "6/2 2x2 dim 64": (6, 2, 64, 4, 4),
    "4/2 1x3": (4, 2, 8, 3, 3),
    "6/2 3x1": (6, 2, 8, 3, 3),  # plain Ulysses whose blocks straddle kv groups
}
LEVELS = ("none", "block", "keep_attention")
SAMPLED = [
    ("sft", "6/2 2x2", "none", "reference"),
    ("sft", "14/2 2x2", "block", "auto"),
    ("sft", "3/1 1x4", "keep_attention", "reference"),
    ("sft", "3/1 1x2 dp 2", "block", "reference"),
    ("sft", "4/2 1x3", "none", "auto"),
    ("sft", "6/2 3x1", "keep_attention", "auto"),
    ("dpo", "6/2 2x2", "keep_attention", "auto"),
    ("dpo", "14/2 2x2", "keep_attention", "reference"),
    ("dpo", "3/1 1x2", "none", "reference"),
    ("dpo", "3/1 1x4", "block", "auto"),
    ("dpo", "6/2 2x2 dim 64", "none", "reference"),
    ("dpo", "4/2 1x3", "block", "auto"),
    ("pt", "6/2 2x2 dim 64", "block", "reference"),
    ("rm", "14/2 2x2", "keep_attention", "reference"),
    ("kto", "6/2 2x2", "block", "auto"),
    ("kto", "3/1 1x4", "keep_attention", "reference"),
]


def case_of(
    stage: str, topology: str, level: str = "none", kernel: str = "auto", **more: Any
) -> tuple[Case, int]:
    heads, kv_heads, head_dim, world, sp = TOPOLOGIES[topology]
    shape = replace(
        SHAPE, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    more |= {"options": STAGE_CASES[stage].options, "shape": shape, "ragged": True}
    return Case(stage, sp=sp, recompute=level, attention=kernel, **more), world


@pytest.mark.parametrize("stage, topology, level, kernel", SAMPLED)
def test_degrees_that_do_not_divide_the_heads(
    stage: str, topology: str, level: str, kernel: str
) -> None:
    check(*case_of(stage, topology, level, kernel, packing_seed=1))


@pytest.mark.parametrize(
    "stage, heads, world, sp, level",
    [
        ("dpo", 4, 4, 2, "block"),
        ("sft", 4, 4, 4, "keep_attention"),
        ("sft", 3, 4, 4, "block"),
        *full(("sft", 4, 1, 1, "none"), ("rm", 4, 2, 2, "none"), ("dpo", 3, 3, 3, "none")),
    ],
)
def test_norms_of_heads_and_yarn(
    stage: str, heads: int, world: int, sp: int, level: str
) -> None:
    """Qwen3 with 4 query heads or an odd number, stretched to four times its window."""
    shape = replace(
        QWEN3,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        rope_scaling=RopeScaling("yarn", 4.0, 16),
    )
    check(Case(stage, sp=sp, recompute=level, shape=shape, packing_seed=1), world)


@pytest.mark.parametrize(
    "stage, world, sp, level",
    [
        ("sft", 1, 1, "none"),
        ("dpo", 2, 2, "keep_attention"),
        ("sft", 3, 3, "block"),
        ("kto", 4, 2, "none"),
        ("sft", 4, 4, "keep_attention"),
        ("rm", 2, 2, "block"),
        ("distill", 2, 2, "none"),
        *full(("pt", 2, 1, "keep_attention")),
    ],
)
def test_experts(stage: str, world: int, sp: int, level: str) -> None:
    """Of 128 experts of a layer most get no token."""
    options = STAGE_CASES[stage].options
    case = Case(stage, sp=sp, recompute=level, shape=MOE, packing_seed=1, options=options)
    check(case, world)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("stage", COMPARED)
def test_full_product(stage: str, topology: str, level: str, kernel: str) -> None:
    check(*case_of(stage, topology, level, kernel, budget=256))


def reference_values(file: Path, case: Case) -> list[np.ndarray]:
    """Compute the reference's values, and return those of every example."""
    mesh = ParallelMesh(case.sp, num_heads=case.shape.num_attention_heads)
    model = case.model(mesh)
    init_weights(model, seed=0)
    model.to(device())
    data = case.data()

    def logps(batch: ShardedBatch) -> Tensor:
        return model(batch).logps

    with torch.no_grad():
        engine = SimpleNamespace(device=device())
        parts = SimpleNamespace(
            mesh=mesh, engine=engine, tokens_per_microbatch=case.budget, say=print
        )
        values = read_reference(data, file, logps, parts)
    return np.split(values, data.lengths.cumsum()[:-1])


@pytest.mark.parametrize("topology", ["3/1 1x4", *full(("14/2 2x2",))])
def test_cached_reference(tmp_path: Path, topology: str) -> None:
    case, world = case_of("dpo", topology)
    found = run_distributed(reference_values, world, tmp_path / "many", case)
    (alone,) = run_distributed(
        reference_values, 1, tmp_path / "one", replace(case, sp=1, budget=1000)
    )
    assert len(alone) == len(case.data()) > 10
    for values in found:
        for ours, one in zip(values, alone, strict=True):
            np.testing.assert_allclose(ours, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto"])
def test_the_data_are_as_ragged_as_claimed(stage: str) -> None:
    """The step holds one-token sequences, and some rank's shard no trained token while another's does."""
    case, _ = case_of(stage, "3/1 1x4", packing_seed=1)
    data = case.data()
    loader = ShuffledLoader(
        data, case.examples, tokens_per_microbatch=case.budget, seed=3, packing_seed=1
    )
    lengths, valid = set(), []
    for micro_batch in loader.step(0, 0):
        sequences = [s for example in micro_batch for s in example.sequences]
        lengths |= {len(s.tokens) for s in sequences}
        shards = [pack_shard(sequences, simulated_mesh(4, rank, 3)) for rank in range(4)]
        assert {s.mesh.row_parallel_size for s in shards} == {4}
        valid.append([s.num_valid for s in shards])
    assert 1 in lengths and max(lengths) > 20
    assert any(0 in counts and any(counts) for counts in valid)
