"""Offload to host memory: every byte comes back, the budget holds, and layers leave one behind and return one ahead."""

import pytest
import torch

from tests.memory_case import TILE, assert_same, batch, build, gradients
from ulysses.memory.offload import Group, HostPool, Offloader

MIXTURES = [("pair", "pair", "block"), ("pair", "pair", "pair"), ("block", "block", "keep_attention"),
            ("keep_attention", "keep_attention", "none"), ("none", "none", "none")]  # fmt: skip


def all_chunks_are_free(offloader: Offloader) -> bool:
    """Return whether the pool can hand out all that it holds without allocating more; it takes the chunks."""
    held = offloader.pool.allocated
    return offloader.pool.take(held) is not None and offloader.pool.allocated == held


@pytest.mark.parametrize("away", [(True, True, True), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("budget", [None, 3 * 1024, 0])
@pytest.mark.parametrize("levels", MIXTURES, ids="+".join)
def test_offload_returns_every_byte(levels, budget, away):
    expected = gradients(build())[1]
    offloader = Offloader("cpu", budget, chunk_bytes=1024, copy=True)
    model = build(recompute=levels, mlp_tile=TILE, offloader=offloader, offload=away)
    for _ in range(2):
        model.zero_grad()
        assert_same(gradients(model)[1], expected)
        assert budget is None or offloader.pool.allocated <= budget
    assert (offloader.pool.allocated > 0) == (budget != 0 and levels[0] != "none")
    held = offloader.pool.allocated
    dropped = model(batch()).logps.sum()
    del dropped
    assert offloader.pool.allocated == held and all_chunks_are_free(offloader)


def test_on_cpu_offload_moves_nothing():
    offloader = Offloader("cpu")
    assert_same(gradients(build(recompute="block", offloader=offloader))[1], gradients(build())[1])
    assert offloader.pool.allocated == 0


def test_groups_leave_one_behind_and_come_back_one_ahead():
    offloader = Offloader("cpu", chunk_bytes=64, copy=True)
    groups, tensors, kept = [], [], []
    for i in range(4):
        groups.append(Group(offloader))
        tensors.append(torch.randn(30) + i)
        kept.append(groups[i].keep(tensors[i].clone()))
        assert groups[i].keep(kept[i].tensor) is kept[i]  # the same tensor again is stored once
        groups[i].close()
    assert [k.away for k in kept] == [True, True, True, False]
    away = {3: [True, True, False, False], 1: [False] * 4, 2: [False] * 4, 0: [False] * 4}  # any order works
    for i, expected in away.items():
        assert torch.equal(groups[i].get(kept[i]), tensors[i]) and [k.away for k in kept] == expected


def test_host_pool_keeps_its_budget():
    pool = HostPool(100, chunk_bytes=40, pin=False)
    chunks = pool.take(70)
    assert chunks is not None and len(chunks) == 2 and pool.take(1) is None
    pool.give(chunks)
    assert pool.take(80) is not None and pool.allocated == 80
