"""Index maps of the any-degree layout: partitions, balance, and the real exchange code on simulated ranks."""

import random
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ulysses.parallel import UlyssesAttention, exchange
from ulysses.parallel.layout import (
    arc_calls,
    causal_cost,
    causal_prefix,
    head_layout,
    padded_total,
    row_sets,
    shard_ranges,
)
from ulysses.parallel.plan import dense_plan, packed_plan

HEADS = [(32, 8), (64, 8), (24, 8), (14, 2), (12, 2), (16, 2), (28, 4), (40, 8)]  # Llama-3 and Qwen2.5, every size
RAGGED = [5, 1, 37, 1, 1, 60, 13, 2, 9]


def simulated_mesh(sp, rank, num_heads, group=None):
    """What ParallelMesh would be on this rank, without processes."""
    from math import gcd

    heads = gcd(sp, num_heads)
    return SimpleNamespace(
        sequence_parallel_size=sp, sp_rank=rank, head_parallel_size=heads, row_parallel_size=sp // heads, sp_group=group
    )


def with_tail(lengths, ranks):
    total, padded = sum(lengths), padded_total(sum(lengths), ranks)
    return torch.tensor([0, *lengths, *([padded - total] if padded > total else [])]).cumsum(0)


class SimulatedGroup:
    """all_to_all_single between threads: a board of send buffers and two barriers."""

    def __init__(self, ranks):
        self.board, self.barrier = [None] * ranks, threading.Barrier(ranks, timeout=20)
        self.received = [[] for _ in range(ranks)]  # elements that reached each rank, call by call

    def all_to_all_single(self, received, send, output_splits=None, input_splits=None, *, group):
        rank, ranks = group, len(self.board)
        self.board[rank] = send.flatten().split(input_splits or [send.numel() // ranks] * ranks)
        self.barrier.wait()
        received.copy_(torch.cat([parts[rank] for parts in self.board]).view(received.shape))
        self.received[rank].append(received.numel())
        assert [p[rank].numel() for p in self.board] == list(output_splits or [send.numel() // ranks] * ranks)
        self.barrier.wait()

    def run(self, function):
        results, errors = [None] * len(self.board), []

        def call(rank):
            try:
                results[rank] = function(rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(self.board))]
        [t.start() for t in threads]
        [t.join() for t in threads]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sp", range(1, 17))
def test_every_head_meets_its_kv_head(heads, sp):
    num_heads, num_kv_heads = heads
    ranks = simulated_mesh(sp, 0, num_heads).head_parallel_size
    layout = head_layout(num_heads, num_kv_heads, ranks)
    ratio = layout.query // layout.key
    assert layout.query * ranks == num_heads and ratio * layout.key == layout.query
    assert layout.key * ranks == layout.repeat * num_kv_heads
    for u in range(ranks):
        for i in range(layout.query):
            slot = u * layout.key + i // ratio
            assert slot // layout.repeat == (u * layout.query + i) // (num_heads // num_kv_heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sp", range(1, 17))
def test_exchange_brings_every_row_and_key_where_it_is_needed(heads, sp, monkeypatch):
    num_heads, num_kv_heads = heads
    cu = with_tail(RAGGED, sp)
    total = int(cu[-1])
    mesh = simulated_mesh(sp, 0, num_heads)
    sets = row_sets(cu, mesh.row_parallel_size, mesh.head_parallel_size)
    query = (torch.arange(total)[:, None] * 1000 + torch.arange(num_heads)).double()[..., None]  # names row and head
    key = (torch.arange(total)[:, None] * 1000 + torch.arange(num_kv_heads)).double()[..., None]
    group = SimulatedGroup(sp)
    monkeypatch.setattr(exchange, "dist", group)
    layout = head_layout(num_heads, num_kv_heads, mesh.head_parallel_size)

    def on_rank(rank):
        plan = packed_plan(cu, sets, simulated_mesh(sp, rank, num_heads, rank), "cpu")
        mine = torch.cat([torch.arange(a, b) for a, b in shard_ranges(sets, rank, mesh.head_parallel_size)])
        got = exchange.exchange_qkv_forward(query[mine], key[mine], -key[mine], plan)
        back = exchange.exchange_out_forward(got[0], plan)
        grads = exchange.exchange_qkv_backward(*got, plan, num_heads, num_kv_heads)
        again = exchange.exchange_out_backward(back, plan)
        return plan, mine, got, back, grads, again

    for rank, (plan, mine, got, back, grads, again) in enumerate(group.run(on_rank)):
        u, rows = rank % plan.head_parallel_size, [i for a, b in sets[plan.row_set] for i in range(a, b)]
        held = torch.arange(u * layout.query, (u + 1) * layout.query)
        kv = torch.arange(u * layout.key, (u + 1) * layout.key) // layout.repeat
        assert torch.equal(got[0][..., 0], (torch.tensor(rows)[:, None] * 1000 + held).double())
        if sp > 1:
            assert torch.equal(got[1][..., 0], (torch.arange(total)[:, None] * 1000 + kv).double())
            assert torch.equal(got[2], -got[1])
        assert torch.equal(back, query[mine]) and torch.equal(again, got[0])
        copies = plan.row_parallel_size * layout.repeat  # the adjoint sums all copies
        assert torch.equal(grads[0], query[mine])
        # Every key and value arrives once per slot, every query row once; gradients go back the same way.
        rows_and_keys = total // plan.row_parallel_size * layout.query + 2 * total * layout.key
        if sp > 1:
            sizes = group.received[rank]
            assert sizes[0] == sizes[2] == rows_and_keys and sizes[1] == sizes[3] == len(mine) * num_heads
        assert torch.equal(grads[1], copies * key[mine]) and torch.equal(grads[2], -copies * key[mine])


@pytest.mark.parametrize(("heads", "sp"), [((14, 2), 4), ((3, 1), 2), ((28, 4), 8), ((14, 2), 8), ((32, 8), 3)])
def test_no_key_is_copied_for_a_second_piece_of_rows(heads, sp, monkeypatch):
    """All pieces of a rank's rows attend to slices of one buffer that holds every key and value once."""
    num_heads, num_kv_heads = heads
    group = SimulatedGroup(sp)
    monkeypatch.setattr(exchange, "dist", group)
    cu = with_tail([90, 1, 400, 7], sp)
    key_heads = head_layout(num_heads, num_kv_heads, simulated_mesh(sp, 0, num_heads).head_parallel_size).key
    seen = [[] for _ in range(sp)]

    def on_rank(rank):
        mesh = simulated_mesh(sp, rank, num_heads, rank)
        plan = packed_plan(cu, row_sets(cu, mesh.row_parallel_size, mesh.head_parallel_size), mesh, "cpu")

        def kernel(q, k, v, **_):
            seen[rank].append((k, v))
            return q

        q, k = (torch.ones(plan.local_tokens, h, 4) for h in heads)
        UlyssesAttention(mesh, *heads, 4, kernel)(q, k, k, plan=plan)
        return plan

    for plan, calls in zip(group.run(on_rank), seen):
        assert len(calls) == len(plan.calls)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for pair in calls for x in pair}
        assert list(storages.values()) == [4 * plan.total * 2 * key_heads * 4]
    assert max(map(len, seen)) > 1


@pytest.mark.parametrize(("batch", "sp", "num_heads"), [(1, 4, 14), (3, 2, 4), (3, 4, 14), (2, 3, 2)])
def test_dense_shards_arrive_in_document_order(batch, sp, num_heads, monkeypatch):
    local, group = 4, SimulatedGroup(sp)
    values = torch.arange(batch * local * sp * num_heads).double().view(batch, local * sp, num_heads, 1)
    monkeypatch.setattr(exchange, "dist", group)

    def on_rank(rank):
        plan = dense_plan(batch, local, simulated_mesh(sp, rank, num_heads, rank), "cpu")
        mine = values[:, rank * local : (rank + 1) * local].flatten(0, 1)
        got = exchange.exchange_qkv_forward(mine, mine, mine, plan)
        assert torch.equal(exchange.exchange_out_forward(got[0], plan), mine)
        return plan, got

    for rank, (plan, (query, key, _)) in enumerate(group.run(on_rank)):
        block = num_heads // plan.head_parallel_size
        heads = values.flatten(0, 1)[:, rank % plan.head_parallel_size * block :][:, :block]
        assert torch.equal(key, heads)
        rows = [slice(a, b) for a, b in [c.rows for c in plan.calls]]
        for call, at in zip(plan.calls, rows):
            stop = call.causal_keys[1]
            assert torch.equal(query[at], heads[stop - (at.stop - at.start) : stop])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
def test_row_sets_partition_the_pack_and_calls_cover_every_row(rows):
    cu = with_tail(RAGGED, rows)
    sets = row_sets(cu, rows)
    assert len({sum(b - a for a, b in arcs) for arcs in sets}) == 1
    order = torch.cat([torch.arange(a, b) for arcs in sets for a, b in arcs])
    assert torch.equal(order.sort().values, torch.arange(int(cu[-1])))
    documents = torch.bucketize(torch.arange(int(cu[-1])), cu[1:], right=True)
    for arcs in sets:
        assert arcs == sorted(arcs)
        row = 0
        for call, (a, b) in zip(arc_calls(cu, arcs), arcs, strict=True):
            assert call.rows == (row, row + b - a)
            row += b - a
            assert call.causal.cu_k[-1] == call.causal_keys[1] - call.causal_keys[0]
            assert call.full.cu_k[-1] == call.keys[1] - call.keys[0]
            for i in range(call.causal.cu_q.numel() - 1):
                first, last = a + call.causal.cu_q[i], a + call.causal.cu_q[i + 1] - 1
                low, high = (call.causal_keys[0] + call.causal.cu_k[j] for j in (i, i + 1))
                assert first <= last == high - 1  # bottom-right: the last query's own key is the last key
                assert documents[first] == documents[last] == documents[low]
                assert low == cu[documents[low]]  # keys start with the document
                assert call.keys[0] + call.full.cu_k[i + 1] == cu[documents[low] + 1]  # and, in full, end with it


def cost_spread(lengths, rows):
    cu = with_tail(lengths, rows)
    costs = [causal_cost(cu, arcs) for arcs in row_sets(cu, rows)]
    mean = sum(costs) / rows
    return max(abs(cost / mean - 1) for cost in costs)


@pytest.mark.parametrize("rows", range(2, 17))
def test_causal_cost_is_balanced(rows):
    draw = random.Random(rows)
    mixed = [draw.randint(1, 400) for _ in range(150)]
    assert cost_spread([32768], rows) < 0.05
    assert cost_spread([*mixed, 16000], rows) < 0.05
    assert cost_spread([16000, *mixed], rows) < 0.05
    assert cost_spread([1] * 5000 + [30000], rows) < 0.05
    assert cost_spread([4096] * 9, rows) < 0.05
    assert cost_spread([8192, 3, 1, 5000, 700, 1, 20000], rows) < 0.05
    for _ in range(20):
        lengths = [int(10 ** draw.uniform(0, 4.5)) for _ in range(draw.randint(1, 80))]
        if sum(lengths) > 2000:
            assert cost_spread(lengths, rows) < 0.05, lengths


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sp", range(1, 17))
def test_a_million_tokens(heads, sp):
    """Every token on one rank, equal shards, equal work, few pieces: one sequence, and a pack of 2,000."""
    mesh = simulated_mesh(sp, 0, heads[0])
    draw = random.Random(sp)
    for lengths in ([1 << 20], [draw.randint(1, 1000) for _ in range(2000)]):
        cu = with_tail(lengths, sp)
        sets = row_sets(cu, mesh.row_parallel_size, mesh.head_parallel_size)
        shards = [shard_ranges(sets, rank, mesh.head_parallel_size) for rank in range(sp)]
        held = sorted(piece for pieces in shards for piece in pieces)
        assert held[0][0] == 0 and held[-1][1] == cu[-1] and all(a[1] == b[0] for a, b in pairwise(held))
        assert {sum(b - a for a, b in pieces) for pieces in shards} == {int(cu[-1]) // sp}
        costs = [causal_cost(cu, arcs) for arcs in sets]
        assert max(costs) < 1.005 * sum(costs) / len(costs) and min(costs) > 0.995 * sum(costs) / len(costs)
        assert sum(map(len, sets)) <= 2 * mesh.row_parallel_size - 1


def test_costs_are_counted_as_a_kernel_would():
    cu = with_tail(RAGGED, 4)
    row_costs = torch.cat([torch.arange(1, n + 1) for n in (cu[1:] - cu[:-1]).tolist()])
    every = causal_prefix(cu, torch.arange(int(cu[-1]) + 1))
    assert torch.equal(every[1:] - every[:-1], row_costs)
    assert causal_cost(cu, [(3, 40), (41, 100)]) == int(row_costs[3:40].sum() + row_costs[41:100].sum())


def test_contiguous_shards_would_not_be_balanced():
    cu = torch.tensor([0, 4096])
    costs = [causal_cost(cu, [(i * 1024, (i + 1) * 1024)]) for i in range(4)]
    assert sum(costs) == 4096 * 4097 // 2
    assert max(costs) > 1.7 * sum(costs) / 4


@pytest.mark.parametrize("rows", range(2, 17))
def test_few_arcs(rows):
    assert sum(len(arcs) for arcs in row_sets(with_tail([65536], rows), rows)) <= 2 * rows - 1
    mixed = [random.Random(rows).randint(1, 2000) for _ in range(60)]
    assert sum(len(arcs) for arcs in row_sets(with_tail(mixed, rows), rows)) <= 2 * rows


def test_long_packs_keep_their_index_arithmetic_exact():
    length = 3_000_000  # causal cost 4.5e12, far past int32
    cu = with_tail([length], 2)
    assert causal_cost(cu, [(0, length)]) == length * (length + 1) // 2
    assert cost_spread([length], 2) < 0.005


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_kv_heads is 3 but must divide the 14 query heads"):
        head_layout(14, 3, 2)
    with pytest.raises(ValueError, match=r"splits heads 4 ways, which does not divide 14 .*num_heads=14"):
        head_layout(14, 2, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "start"), [(8, 0), (8, 1), (12, 3), (1, 0), (64, 2)])
def test_copies_between_layouts_take_any_stride_and_start(dtype, width, start):
    """Whole 16-byte elements or not: every value arrives, and nothing beside the target changes."""
    values = torch.arange(start + 5 * 3 * 2 * width).remainder(251).to(dtype)[start:].view(5, 3, 2 * width)  # exact in bfloat16
    for source in (values[..., :width], values[..., width:], values[:, :1, :width].expand(5, 3, width), values[..., ::2]):
        source = source.transpose(0, 1)
        target = torch.full((3, 7, width + 8), -1.0, dtype=dtype)
        exchange.copy(target[:, 1:6, 8:], source)
        assert torch.equal(target[:, 1:6, 8:], source)
        assert (target[..., :8] == -1).all() and (target[:, 0] == -1).all() and (target[:, 6] == -1).all()
        assert exchange.dense(source).is_contiguous() and torch.equal(exchange.dense(source), source)
    whole = torch.ones(2, 3, dtype=dtype)
    assert exchange.dense(whole) is whole
