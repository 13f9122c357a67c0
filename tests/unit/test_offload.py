"""Offload to host memory: every byte comes back, the budget holds, and layers leave one behind and return one ahead."""

import pytest
import torch

from tests.memory_case import TILED, assert_same, batch, build, gradients
from ulysses.memory.offload import Group, HostPool, Offloader
from ulysses.memory.tiling import TilingOptions

# what the planner mixes: the first layers at one level, the last at a faster one
MIXTURES = [("pair", "pair", "block"), ("pair", "pair", "keep_attention"), ("pair", "keep_exchange", "keep_exchange"),
            ("block", "block", "keep_attention"), ("keep_attention", "keep_exchange", "keep_exchange")]  # fmt: skip


@pytest.mark.parametrize("level", ["pair", "block", "keep_attention", "keep_exchange"])
@pytest.mark.parametrize("budget", [None, 3 * 1024, 0])
def test_offload_returns_every_byte(level: str, budget: int | None) -> None:
    expected = gradients(build())[1]
    offloader = Offloader("cpu", budget, chunk_bytes=1024, copy=True)
    model = build(recompute=level, tiling=TILED, offloader=offloader, offload=[True, False, True])
    for _ in range(2):
        model.zero_grad()
        assert_same(gradients(model)[1], expected)
        assert budget is None or offloader.pool.allocated <= budget
        assert len(offloader.pool._free) * 1024 == offloader.pool.allocated
    held = offloader.pool.allocated
    dropped = model(batch()).logps.sum()
    del dropped
    assert offloader.pool.allocated == held == len(offloader.pool._free) * 1024


def test_on_cpu_offload_moves_nothing() -> None:
    offloader = Offloader("cpu")
    assert_same(gradients(build(recompute="block", offloader=offloader))[1], gradients(build())[1])
    assert offloader.pool.allocated == 0


def test_groups_leave_one_behind_and_come_back_one_ahead() -> None:
    offloader = Offloader("cpu", chunk_bytes=64, copy=True)
    groups, tensors, kept = [], [], []
    for i in range(4):
        groups.append(Group(offloader))
        tensors.append(torch.randn(30) + i)
        kept.append(groups[i].keep(tensors[i].clone()))
        assert groups[i].keep(kept[i].tensor) is kept[i]  # the same tensor again is stored once
        groups[i].close()
    assert [k.away for k in kept] == [True, True, True, False]
    assert torch.equal(groups[3].get(kept[3]), tensors[3])
    assert [k.away for k in kept] == [True, True, False, False]
    assert torch.equal(groups[1].get(kept[1]), tensors[1])  # out of order is only slower
    assert [k.away for k in kept] == [False, False, False, False]
    assert torch.equal(groups[2].get(kept[2]), tensors[2]) and torch.equal(groups[0].get(kept[0]), tensors[0])


def test_host_pool_keeps_its_budget() -> None:
    pool = HostPool(100, chunk_bytes=40, pin=False)
    chunks = pool.take(70)
    assert chunks is not None and len(chunks) == 2 and pool.take(1) is None
    pool.give(chunks)
    assert pool.take(80) is not None and pool.allocated == 80


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("away", [0, 2, 3])
@pytest.mark.parametrize("levels", MIXTURES, ids="+".join)
def test_mixed_levels_leave_in_groups_of_heads(levels: tuple[str, ...], away: int, chunks: int) -> None:
    offloader = Offloader("cpu", None, chunk_bytes=1024, copy=True)
    tiling = TilingOptions(mlp_rows=7, head_chunks=chunks)
    model = build(recompute=levels, tiling=tiling, offloader=offloader, offload=[i < away for i in range(3)])
    expected = gradients(build())[1]
    for _ in range(2):
        model.zero_grad()
        assert_same(gradients(model)[1], expected)
    assert (offloader.pool.allocated > 0) == (away > 0)
