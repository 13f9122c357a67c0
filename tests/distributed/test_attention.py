"""Attention over real processes against one process: out, dq, dk, dv for every head count and degree.

On GPUs with as many of them as ranks the same tests run over NCCL, and every kernel of the machine in bfloat16 besides.
"""

import inspect
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.harness import device, full, need_gpus, run_distributed
from tests.unit.test_kernels import gpu_kernels, naive
from tests.unit.test_layout import HEADS, RAGGED, simulated_mesh
from ulysses import ParallelMesh, SeqAllToAll4D, Sequence, UlyssesAttention, pack_shard
from ulysses.parallel import gather_tokens
from ulysses.parallel.layout import packed_plan

LONG = [333, 1, 700, 1, 64, 517]
E = 8


def inputs(num_heads, num_kv_heads, total, head_dim=E, dtype=torch.float32):
    """The same q, k, v and upstream gradient on every rank, drawn on the CPU."""
    draw = torch.Generator().manual_seed(num_heads)
    shapes = [(total, h, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [torch.randn(shape, generator=draw).to(device(), dtype) for shape in shapes]


def one_process(num_heads, num_kv_heads, lengths, causal=True, window=None, sink=None, **more):
    """out, dq, dk, dv in float64, a document at a time, and the sink's gradient."""
    given = inputs(num_heads, num_kv_heads, sum(lengths), **more)
    q, k, v, upstream = (x.double().requires_grad_() for x in given)
    options = causal, q.shape[-1] ** -0.5, window, sink
    out = naive(q, k, v, (lengths, lengths), *options)
    leaves = [q, k, v, *filter(None.__ne__, [sink])]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def packed(lengths, mesh):
    """A batch of these lengths, and the packed index of every local token (the tail has the last ones)."""
    batch = pack_shard([Sequence(range(n), [1] * n) for n in lengths], mesh, device())
    return batch, batch.cu_seqlens[batch.sequence_ids] + batch.positions


def many_processes(
    sp, cases, lengths, kernel="auto", causal=True, head_dim=E, dtype=torch.float32
):
    """The same of each case on all ranks: heads, a window and whether there is a sink, whose gradient is summed."""
    results = []
    for heads, window, has_sink in cases:
        windows = (window, None, window) if window else ()
        mesh = ParallelMesh(sp, num_heads=heads[0], windows=windows)
        batch, indices = packed(lengths, mesh)
        whole = inputs(*heads, sum(lengths), head_dim, dtype)
        *leaves, upstream = (
            torch.cat([x, x.new_ones(sp, *x.shape[1:])])[indices] for x in whole
        )
        sink = sink_of(heads[0]) if has_sink else None
        if has_sink:  # to which the tail's rows would add
            upstream = upstream * (batch.sequence_ids < len(lengths))[:, None, None]
            leaves.append(sink)
        for leaf in leaves:
            leaf.requires_grad_()
        attention = UlyssesAttention(mesh, *heads, head_dim, kernel=kernel, window=window)
        out = attention(*leaves[:3], plan=batch.attention_plan, causal=causal, sink=sink)
        grads = torch.autograd.grad(out, leaves, upstream)
        found = [gather_tokens(x, batch) for x in (out.detach(), *grads[:3])]
        if has_sink:
            found.append(grads[3].clone())
            if mesh.sp_group is not None:
                dist.all_reduce(found[4], group=mesh.sp_group)
        results.append(found)
    return results if mesh.sp_rank == 0 else None


def compare(got, wanted, tolerance=1e-5):
    """Out, or what was made of it, and the gradients."""
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsink"), got, wanted):
        error = float((a.double() - b).norm() / b.norm())
        assert error < tolerance, f"{name} is off by {error:.2e}"
        if tolerance <= 1e-5:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sp, kernel, causal",
    [
        *((sp, "auto", True) for sp in (1, 2, 3, 4, 8)),
        (3, "reference", False),
        (4, "reference", False),
        *full((5, "auto", True), (6, "auto", True), (7, "auto", True)),
    ],
)
def test_every_head_count_at_every_degree(sp, kernel, causal):
    cases = [(heads, None, False) for heads in HEADS]
    results = run_distributed(many_processes, sp, sp, cases, RAGGED, kernel, causal)[0]
    for heads, got in zip(HEADS, results):
        compare(got, one_process(*heads, RAGGED, causal=causal))


# smaller than documents and shards, equal to one of them, and larger
WINDOWS = [2, 8, 37, 60, 200]


def sink_of(heads):
    return torch.linspace(-2, 2, heads, dtype=torch.float64, device=device())


@pytest.mark.parametrize("world, sp", [(1, 1), (2, 2), (3, 3), (4, 4), *full((4, 2))])
def test_windows_and_sinks_at_every_degree(world, sp):
    """Heads that the degree divides, and heads for which rows are split two, three and four ways."""
    cases = list(product([(4, 2), (3, 1), (14, 2)], WINDOWS, [False, True]))
    cases.append(((4, 2), None, True))
    exact = {"dtype": torch.float64}
    found = run_distributed(many_processes, world, sp, cases, RAGGED, **exact)[0]
    for (heads, window, has_sink), got in zip(cases, found):
        sink = sink_of(heads[0]).requires_grad_() if has_sink else None
        more = {"window": window, "sink": sink, **exact}
        compare(got, one_process(*heads, RAGGED, **more), 1e-11)


def test_a_call_may_have_another_window_and_scale_than_its_module():
    q, k, v, _ = inputs(4, 2, 30, dtype=torch.float64)
    cu, module = torch.tensor([0, 21, 30]), UlyssesAttention(None, 4, 2, E, window=3)
    calls = [(3, None), (5, None), (None, 0.7)]
    for window, scale in calls:
        wanted = naive(q, k, v, ([21, 9],) * 2, True, scale or E**-0.5, window or 3)
        found = module(q, k, v, cu, window=window, softmax_scale=scale)
        torch.testing.assert_close(found, wanted)
        alone = UlyssesAttention(None, 4, 2, E, window=window or 3, softmax_scale=scale)
        assert torch.equal(alone(q, k, v, cu), found)
        dense = alone(*(x[None, :21] for x in (q, k, v)))
        torch.testing.assert_close(dense[0], wanted[:21])


def every_kernel(sp, heads, head_dim):
    more = {"head_dim": head_dim, "dtype": torch.bfloat16}
    return {
        k: many_processes(sp, [(heads, None, False)], LONG, k, **more) for k in gpu_kernels()
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sp, heads, head_dim", [(2, (14, 2), 64), (3, (14, 2), 128), (4, (28, 4), 64)]
)
def test_every_kernel_of_this_machine_in_bfloat16(sp, heads, head_dim):
    need_gpus(sp)
    found = run_distributed(every_kernel, sp, sp, heads, head_dim)[0]
    wanted = one_process(*heads, LONG, head_dim=head_dim, dtype=torch.bfloat16)
    for kernel, (got,) in found.items():
        print(kernel, end=" ")  # shown with a failure
        compare(got, wanted, tolerance=2e-2)


def test_gradients_of_keys_that_many_arcs_share_are_summed_in_float32():
    """32 arcs of one document on one rank: sums in bfloat16 would be off by 9e-3, three times as far as one call."""
    tokens, step = 2048, 32
    pieces = [(i, i + step) for i in range(0, tokens, step)]
    sets = [pieces[::2], pieces[1::2]]
    plan = packed_plan(torch.tensor([0, tokens]), sets, simulated_mesh(2, 1, 1), "cpu")
    attention = UlyssesAttention(None, 2, 1, E, kernel="reference")
    rows = torch.cat([torch.arange(a, b) for a, b in sets[1]])
    q, k, v, dout = inputs(2, 1, tokens, dtype=torch.bfloat16)
    given = [dout[rows], q[rows], k, v]
    found, wanted = (
        attention.attend_backward(x[0], x[1:], attention.attend_forward(x[1:], plan), plan)[0]
        for x in (given, [x.double() for x in given])
    )
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert all(float((a.double() - b).norm() / b.norm()) < 3e-3 for a, b in zip(found, wanted))


def other_layouts(num_heads, num_kv_heads):
    """Packed with cu_seqlens alone, and dense [B, S/P, H, E]; both against the whole in this process."""
    mesh = ParallelMesh(4, num_heads=num_heads)
    attention, alone = (
        UlyssesAttention(where, num_heads, num_kv_heads, E) for where in (mesh, None)
    )
    q, k, v, upstream = inputs(num_heads, num_kv_heads, 48)
    batch, indices = packed((30, 1, 17), mesh)
    whole = alone(q, k, v, torch.tensor([0, 30, 31, 48], device=device()))
    out = attention(q[indices], k[indices], v[indices], batch.cu_seqlens)
    torch.testing.assert_close(out, whole[indices], rtol=1e-5, atol=1e-5)

    def mine(x):
        return x.chunk(4, 1)[mesh.sp_rank]

    for sequences, causal in product((1, 3), (True, False)):
        full = [x.unflatten(0, (sequences, -1)).detach().requires_grad_() for x in (q, k, v)]
        part = [mine(x).detach().requires_grad_() for x in full]
        got, whole = attention(*part, causal=causal), alone(*full, causal=causal)
        weights = upstream.view(whole.shape)
        grads = torch.autograd.grad(got, part, mine(weights))
        for a, b in zip((got, *grads), (whole, *torch.autograd.grad(whole, full, weights))):
            torch.testing.assert_close(a, mine(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(8, 4), (14, 2), (3, 1)])
def test_other_layouts(heads):
    run_distributed(other_layouts, 4, *heads)


def all_to_all_4d():
    group, rank = dist.group.WORLD, dist.get_rank()
    full = torch.arange(2 * 6 * 4 * 3, dtype=torch.float64, device=device()).view(2, 6, 4, 3)
    mine = full[:, rank * 3 : rank * 3 + 3].clone().requires_grad_()
    heads = SeqAllToAll4D.apply(group, mine, 2, 1)
    assert torch.equal(heads, full[:, :, rank * 2 : rank * 2 + 2])
    assert torch.equal(SeqAllToAll4D.apply(group, heads, 1, 2), mine)
    # the other rank's heads come back with the other rank's factor
    (heads * (rank + 1)).sum().backward()
    assert (mine.grad[:, :, :2] == 1).all() and (mine.grad[:, :, 2:] == 2).all()
    uneven = "axis 2 of the input has 3 entries, which 2 ranks do not divide"
    with pytest.raises(ValueError, match=uneven):
        SeqAllToAll4D.apply(group, torch.ones(1, 2, 3, 1), 2, 1)


def test_seq_all_to_all_4d():
    run_distributed(all_to_all_4d, 2)
    alone = torch.ones(1, 2, 3, 1)
    assert torch.equal(SeqAllToAll4D.apply(None, alone, 2, 1), alone)
    assert torch.equal(SeqAllToAll4D.apply(None, alone, scatter_idx=1, gather_idx=2), alone)
    assert [*inspect.signature(SeqAllToAll4D.apply).parameters] == [
        "group",
        "input",
        "scatter_idx",
        "gather_idx",
    ]
    with pytest.raises(ValueError, match="it must be"):
        SeqAllToAll4D.apply(None, alone, 0, 1)
