"""Index maps for any number of heads and ranks: partitions, balance, and the real exchange code on simulated ranks."""

import math
import random
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from tests.fake_ranks import FakeWorld
from tests.harness import full
from ulysses.parallel import exchange
from ulysses.parallel.attention import head_exchange
from ulysses.parallel.layout import head_layout, packed_plan, row_sets, shard_ranges, squares

# query and kv heads of Llama-3 and Qwen2.5, every size
HEADS = [
    tuple(map(int, heads.split("/")))
    for heads in "32/8 64/8 24/8 14/2 12/2 16/2 28/4 40/8".split()
]
RAGGED = [5, 1, 37, 1, 1, 60, 13, 2, 9]


def simulated_mesh(sp, rank, num_heads, group=None):
    """What ParallelMesh would be on this rank, without processes."""
    heads = math.gcd(sp, num_heads)
    return SimpleNamespace(
        sequence_parallel_size=sp, sp_rank=rank, head_parallel_size=heads, row_parallel_size=sp // heads,
        row_set=rank // heads, sp_group=group, windows=(),
    )  # fmt: skip


def with_tail(lengths, ranks):
    return torch.tensor([0, *lengths, *filter(None, [-sum(lengths) % ranks])]).cumsum(0)


class SimulatedGroup(FakeWorld):
    """all_to_all_single between threads; `received` holds the elements that reached each rank, call by call."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.received = [[] for _ in range(ranks)]

    def all_to_all_single(
        self, received, send, output_splits=None, input_splits=None, *, group
    ):
        even = [len(send) // self.size] * self.size
        everyone = self.gather(group, send.clone().split(input_splits or even))
        parts = [parts[group] for parts in everyone]
        assert [*map(len, parts)] == (output_splits or even)
        received.copy_(torch.cat(parts))
        self.received[group].append(received.numel())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sp", range(1, 17))
def test_exchange_brings_every_row_and_key_where_it_is_needed(heads, sp, monkeypatch):
    num_heads, num_kv_heads = heads
    cu = with_tail(RAGGED, sp)
    total, ranks = int(cu[-1]), math.gcd(sp, num_heads)
    sets = row_sets(cu, sp // ranks)
    # every number names its row and its head
    query, key = (
        (torch.arange(total)[:, None] * 1000 + torch.arange(n)).double()[..., None]
        for n in heads
    )
    group = SimulatedGroup(sp)
    monkeypatch.setattr(exchange, "dist", group)
    layout = head_layout(num_heads, num_kv_heads, ranks)

    def on_rank(rank):
        plan = packed_plan(cu, sets, simulated_mesh(sp, rank, num_heads, rank), "cpu")
        mine = torch.cat([torch.arange(a, b) for a, b in shard_ranges(sets, rank, ranks)])
        parts = [[(n, 1)] for n in (num_heads, num_kv_heads, num_kv_heads)]
        there = head_exchange(parts, plan, has_queries=True)
        got = there.to_heads((query[mine], key[mine], -key[mine]))
        back = there.to_tokens(got[0])
        return mine, got, back, there.to_heads_backward(got), there.to_tokens_backward(back)

    for rank, (mine, (q, k, v), back, grads, again) in enumerate(group.run(on_rank)):
        rows = torch.cat([torch.arange(a, b) for a, b in sets[rank // ranks]])
        held = rank % ranks * layout.query + torch.arange(layout.query)
        assert torch.equal(q[..., 0], query[rows][:, held, 0])
        if sp > 1:
            # a kernel gives each of the kv heads to as many query heads in turn
            for_each_query = k.repeat_interleave(layout.query // layout.key, 1)
            assert torch.equal(for_each_query, key[:, held // (num_heads // num_kv_heads)])
            assert torch.equal(v, -k)
            # k' and v' are parts of one buffer, and pieces of rows attend to slices of it: no key is copied again
            buffer, queries, keys = k.untyped_storage(), q.numel(), 2 * k.numel()
            assert buffer.data_ptr() == v.untyped_storage().data_ptr()
            assert buffer.nbytes() == 8 * (keys + queries * (sp == ranks))
            # Every key and value arrives once per slot, every query row once; gradients go back the same way.
            there, out, back_again, out_again = group.received[rank]
            assert there == back_again == queries + keys
            assert out == out_again == len(mine) * num_heads
        assert torch.equal(back, query[mine]) and torch.equal(again, q)
        summed = sp // ranks * layout.repeat * key[mine]  # the adjoint sums all copies
        for found, wanted in zip(grads, (query[mine], summed, -summed), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("ranks, shared", [(1, {True}), (4, {True, False})])
def test_documents_that_are_whole_have_one_tensor_of_bounds(ranks, shared):
    """kernels/short.py is chosen by it."""
    cu = with_tail(RAGGED, ranks)
    sets = row_sets(cu, ranks)
    plans = [packed_plan(cu, sets, simulated_mesh(ranks, r, 1), "cpu") for r in range(ranks)]
    found = {x.documents.cu_q is x.documents.cu_k for plan in plans for x in plan.calls}
    assert found == shared


def cost_spread(cu, sets, windows=(None,)):
    """How far the costs of the row sets are from their mean; every row costs the keys that it sees in all layers."""
    seen = torch.cat([torch.arange(1, n + 1) for n in cu.diff().tolist()])
    keys = sum(seen.clamp(max=window or len(seen)) for window in windows)
    before = torch.cat([keys.new_zeros(1), keys.cumsum(0)])
    costs = [sum(int(before[b] - before[a]) for a, b in arcs) for arcs in sets]
    return max(abs(cost * len(sets) / int(before[-1]) - 1) for cost in costs)


# the others deal rows to as many sets as one of these, or to a number of sets between two of these
@pytest.mark.parametrize(
    "sp", [1, 2, 3, 4, 6, 8, 13, *full(*zip([5, 7, 9, 10, 11, 12, 14, 15, 16]))]
)
def test_causal_cost_is_balanced(sp):
    """Every token on one rank, equal shards, equal work, few pieces, for long sequences and for many documents."""
    draw = random.Random(sp)
    mixed = [draw.randint(1, 1000) for _ in range(2000)]
    packs = [
        [1 << 20], mixed, [*mixed[:150], 16000], [16000, *mixed[:150]], [1] * 5000 + [30000], [4096] * 9
    ]  # fmt: skip
    for count in (draw.randint(1, 80) for _ in range(20)):
        packs.append([2000, *(int(10 ** draw.uniform(0, 4.5)) for _ in range(count))])
    for lengths, heads in product(packs, {math.gcd(sp, heads) for heads, _ in HEADS}):
        cu = with_tail(lengths, sp)
        sets = row_sets(cu, sp // heads)
        shards = [shard_ranges(sets, rank, heads) for rank in range(sp)]
        held = [(0, 0), *sorted(sum(shards, [])), (int(cu[-1]), None)]
        assert all(a[1] == b[0] for a, b in pairwise(held))
        assert {sum(b - a for a, b in pieces) for pieces in shards} == {int(cu[-1]) // sp}
        assert cost_spread(cu, sets) < (0.005 if cu[-1] > 500_000 else 0.05), lengths
        assert sum(map(len, sets)) <= 2 * len(sets) - 1
    windows = (1024,) * 5 + (None,)
    for lengths in ([1 << 20], mixed, [16000, *mixed[:150]]):
        cu = with_tail(lengths, sp)
        assert cost_spread(cu, row_sets(cu, sp, windows=windows), windows) < 0.05
        assert cost_spread(cu, row_sets(cu, sp, windows=windows[:5]), windows[:5]) < 0.05
    # what this measure says of plain shards
    contiguous = [[(i, i + 1024)] for i in range(0, 4096, 1024)]
    assert cost_spread(torch.tensor([0, 4096]), contiguous) > 0.7


@pytest.mark.parametrize("length, prefix", [(1, 0), (7, 0), (40, 0), (1, 30), (25, 9), (3, 60)])
@pytest.mark.parametrize("windows", [(), (None,), (1,), (8,), (40,), (8, None, 8), (5, 33)])
def test_squares_are_twice_the_pairs_that_rows_and_their_windows_meet(length, prefix, windows):
    """Counted pair by pair; a row's own key counts half, and so does the first one that its window leaves out."""
    wanted = 0.0
    for window, row in product(windows or (None,), range(prefix, prefix + length)):
        wanted += 2 * min(row, window or row) + (row < (window or row + 1))
    found = squares(length, prefix, windows)
    assert found == pytest.approx(wanted / max(1, len(windows)))
    of_rows = squares(1, torch.arange(prefix, prefix + length), windows)
    assert float(of_rows.sum()) == pytest.approx(found)
