"""Attention over real processes against one process: out, dq, dk, dv for every head count and degree.

On GPUs with as many of them as ranks the same tests run over NCCL, and every kernel of the machine in bfloat16 besides.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.harness import device, gpus, run_distributed
from ulysses import ParallelMesh, SeqAllToAll4D, Sequence, UlyssesAttention, pack_shard
from ulysses.parallel import gather_tokens
from ulysses.parallel.kernels import available_kernels

HEADS = [(14, 2), (12, 2), (28, 4), (24, 8), (40, 8), (32, 8), (16, 2)]
RAGGED = [5, 1, 37, 1, 1, 60, 13, 2, 9]
E = 8


def inputs(num_heads, num_kv_heads, total, head_dim=E, dtype=torch.float32):
    """The same q, k, v and upstream gradient on every rank, drawn on the CPU."""
    draw = torch.Generator().manual_seed(num_heads)
    shapes = [(total, h, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [torch.randn(shape, generator=draw).to(device(), dtype) for shape in shapes]


def one_process(num_heads, num_kv_heads, lengths, causal=True, **more):
    """out, dq, dk, dv in float64, a document at a time."""
    q, k, v, upstream = (x.double().requires_grad_() for x in inputs(num_heads, num_kv_heads, sum(lengths), **more))
    outs = []
    for query, key, value in zip(*(x.split(lengths) for x in (q, k, v))):
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        outs.append(sdpa(query, key, value, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
    out = torch.cat(outs)
    (out * upstream).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def many_processes(sp, cases, lengths, kernel="auto", causal=True, stages=False, head_dim=E, dtype=torch.float32):
    results = []
    for num_heads, num_kv_heads in cases:
        mesh = ParallelMesh(sp, num_heads=num_heads)
        batch = pack_shard([Sequence(range(n), [1] * n) for n in lengths], mesh, device())
        plan = batch.attention_plan
        full = inputs(num_heads, num_kv_heads, sum(lengths), head_dim, dtype)
        padded = [torch.cat([x, x.new_ones(batch.total - x.shape[0], *x.shape[1:])]) for x in full]
        q, k, v, upstream = (x[batch.indices].requires_grad_() for x in padded)
        attention = UlyssesAttention(mesh, num_heads, num_kv_heads, head_dim, kernel=kernel)
        if stages:  # forward, then the backward of the middle stage from what it kept
            exchanged = attention.exchange_qkv(q, k, v, plan)
            kept, lse = attention.attend_forward(*(x.detach() for x in exchanged), plan)
            leaf = kept.clone().requires_grad_()
            out = attention.exchange_out(leaf, plan)
            (out * upstream).sum().backward()
            grads = attention.attend_backward(leaf.grad, *(x.detach() for x in exchanged), kept, lse, plan)
            torch.autograd.backward(exchanged, grads)
        else:
            out = attention(q, k, v, plan=plan, causal=causal)
            (out * upstream).sum().backward()
        results.append([gather_tokens(x.detach(), batch) for x in (out, q.grad, k.grad, v.grad)])
    return results if mesh.sp_rank == 0 else None


def compare(got, wanted, tolerance=1e-5):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted):
        error = float((a.double() - b).norm() / b.norm())
        assert error < tolerance, f"{name} is off by {error:.2e}"
        if tolerance <= 1e-5:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sp", range(1, 9))
def test_every_head_count_at_every_degree(sp):
    results = run_distributed(many_processes, sp, sp, HEADS, RAGGED)[0]
    for heads, got in zip(HEADS, results):
        compare(got, one_process(*heads, RAGGED))


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("sp", [2, 4, 3])
def test_plain_kernel_and_separate_stages(sp, stages):
    cases = [(14, 2), (28, 4)]
    results = run_distributed(many_processes, sp, sp, cases, [97, 1, 3], kernel="reference", stages=stages)[0]
    for heads, got in zip(cases, results):
        compare(got, one_process(*heads, [97, 1, 3]))


@pytest.mark.parametrize("sp", [2, 3, 4])
def test_without_causal_mask(sp):
    results = run_distributed(many_processes, sp, sp, [(14, 2), (4, 4)], RAGGED, causal=False)[0]
    compare(results[0], one_process(14, 2, RAGGED, causal=False))
    compare(results[1], one_process(4, 4, RAGGED, causal=False))


LONG = [333, 1, 700, 1, 64, 517]


def every_kernel(sp, heads, head_dim, stages):
    dtype = torch.bfloat16
    return {k: many_processes(sp, [heads], LONG, k, stages=stages, head_dim=head_dim, dtype=dtype) for k in available_kernels("cuda")}


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize(("sp", "heads", "head_dim"), [(2, (14, 2), 64), (2, (32, 8), 128), (3, (14, 2), 128), (4, (28, 4), 64)])
def test_every_kernel_of_this_machine_in_bfloat16(sp, heads, head_dim, stages):
    if gpus() < sp:
        pytest.skip(f"needs {sp} GPUs, one for each rank")
    found = run_distributed(every_kernel, sp, sp, heads, head_dim, stages)[0]
    wanted = one_process(*heads, LONG, head_dim=head_dim, dtype=torch.bfloat16)
    for kernel, (got,) in found.items():
        print(kernel, end=" ")  # shown with a failure
        compare(got, wanted, tolerance=2e-2)


def local_window_kernel(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_):
    """A caller's own kernel on head shards: mean of the values, doubled."""
    outs = []
    for i in range(cu_seqlens_q.numel() - 1):
        values = v[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].repeat_interleave(q.shape[1] // v.shape[1], 1)
        rows = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        mean = values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)[:, None, None]
        outs.append(mean[len(values) - len(rows) :] * 2 + 0 * (rows + k.sum()))
    return torch.cat(outs)


@pytest.mark.parametrize("stages", [False, True])
def test_callable_kernel(stages):
    cases = [(14, 2), (4, 4)]
    many = run_distributed(many_processes, 4, 4, cases, RAGGED, kernel=local_window_kernel, stages=stages)[0]
    one = many_processes(1, cases, RAGGED, kernel=local_window_kernel)
    for a, b in zip(many, one):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def other_layouts(num_heads, num_kv_heads):
    """Packed with cu_seqlens alone, and dense [B, S/P, H, E]; both against the whole in this process."""
    mesh = ParallelMesh(4, num_heads=num_heads)
    attention = UlyssesAttention(mesh, num_heads, num_kv_heads, E)
    alone = UlyssesAttention(None, num_heads, num_kv_heads, E)
    rank = mesh.sp_rank
    q, k, v, upstream = inputs(num_heads, num_kv_heads, 48)
    batch = pack_shard([Sequence(range(n), [1] * n) for n in (30, 1, 17)], mesh, device())
    for given in ({"max_seqlen": 30}, {}):
        out = attention(q[batch.indices], k[batch.indices], v[batch.indices], batch.cu_seqlens, **given)
        whole = alone(q, k, v, torch.tensor([0, 30, 31, 48], dtype=torch.int32, device=device()))
        torch.testing.assert_close(out, whole[batch.indices], rtol=1e-5, atol=1e-5)
    for sequences in (1, 3):
        length = 48 // sequences
        dense = [x.view(sequences, length, -1, E) for x in (q, k, v)]
        mine = [x[:, rank * length // 4 : (rank + 1) * length // 4].clone().requires_grad_() for x in dense]
        full = [x.clone().requires_grad_() for x in dense]
        for causal in (True, False):
            got, whole = attention(*mine, causal=causal), alone(*full, causal=causal)
            part = slice(rank * length // 4, (rank + 1) * length // 4)
            torch.testing.assert_close(got, whole[:, part], rtol=1e-5, atol=1e-5)
            weights = upstream.view(whole.shape)
            grads = torch.autograd.grad((got * weights[:, part]).sum(), mine)
            for a, b in zip(grads, torch.autograd.grad((whole * weights).sum(), full)):
                torch.testing.assert_close(a, b[:, part], rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("heads", [(8, 4), (14, 2), (3, 1)])
def test_other_layouts(heads):
    assert run_distributed(other_layouts, 4, *heads) == [True] * 4


def all_to_all_4d():
    import torch.distributed as dist

    group, rank = dist.group.WORLD, dist.get_rank()
    full = torch.arange(2 * 6 * 4 * 3, dtype=torch.float64, device=device()).view(2, 6, 4, 3)
    mine = full[:, rank * 3 : rank * 3 + 3].clone().requires_grad_()
    heads = SeqAllToAll4D.apply(group, mine, 2, 1)
    assert torch.equal(heads, full[:, :, rank * 2 : rank * 2 + 2])
    back = SeqAllToAll4D.apply(group, heads, 1, 2)
    assert torch.equal(back, mine)
    (heads * (rank + 1)).sum().backward()  # the other rank's heads come back with the other rank's factor
    assert (mine.grad[:, :, :2] == 1).all() and (mine.grad[:, :, 2:] == 2).all()
    with pytest.raises(ValueError, match="axis 2 of the input has 3 entries, which 2 ranks do not divide"):
        SeqAllToAll4D.apply(group, torch.ones(1, 2, 3, 1), 2, 1)
    return True


def test_seq_all_to_all_4d():
    assert run_distributed(all_to_all_4d, 2) == [True, True]
    alone = torch.ones(1, 2, 3, 1)
    assert torch.equal(SeqAllToAll4D.apply(None, alone, 2, 1), alone)
    with pytest.raises(ValueError, match="it must be"):
        SeqAllToAll4D.apply(None, alone, 0, 1)


def one_collective_per_direction(num_heads):
    import torch.distributed as dist

    from ulysses.parallel import exchange

    calls = []

    class Counting:
        def all_to_all_single(self, received, send, output_splits=None, input_splits=None, group=None):
            calls.append(output_splits)
            dist.all_to_all_single(received, send, output_splits, input_splits, group=group)

    exchange.dist = Counting()
    mesh = ParallelMesh(4, num_heads=num_heads)
    batch = pack_shard([Sequence(range(n), [1] * n) for n in (30, 1, 17)], mesh, device())
    x = torch.randn(12, num_heads, E, device=device(), requires_grad=True)
    UlyssesAttention(mesh, num_heads, num_heads, E)(x, x, x, plan=batch.attention_plan).sum().backward()
    return len(calls), all(splits is None for splits in calls)


def test_one_collective_carries_q_k_and_v():
    assert run_distributed(one_collective_per_direction, 4, 4) == [(4, True)] * 4  # equal parts
    assert run_distributed(one_collective_per_direction, 4, 14) == [(4, False)] * 4


def test_wrong_inputs_are_refused():
    attention = UlyssesAttention(None, 4, 2, E)
    q, k = torch.ones(6, 4, E), torch.ones(6, 2, E)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="needs plan or cu_seqlens"):
        attention(q, k, k)
    with pytest.raises(ValueError, match=r"query has shape \(6, 2, 8\); it must be \[S, 4, 8\]"):
        attention(k, k, k, cu)
    with pytest.raises(ValueError, match=r"key is \(6, 4, 8\)"):
        attention(q, q, q, cu)
    with pytest.raises(ValueError, match="give them one dtype"):
        attention(q, k.double(), k.double(), cu)
    with pytest.raises(ValueError, match="cu_seqlens ends at 5 but the 1 ranks hold 6 tokens"):
        attention(q, k, k, torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="must be int32"):
        attention(q, k, k, cu.long())
    with pytest.raises(ValueError, match="num_kv_heads is 3"):
        UlyssesAttention(None, 4, 3, E)
    batch = pack_shard([Sequence(range(5), [1] * 5)], ParallelMesh())
    with pytest.raises(ValueError, match="the query has 6 tokens but the plan gives this rank 5"):
        attention(q, k, k, plan=batch.attention_plan)


def undivided_heads():
    with pytest.raises(ValueError) as caught:
        UlyssesAttention(ParallelMesh(4), 14, 2, E)
    mesh = ParallelMesh(4, num_heads=14)
    batch = pack_shard([Sequence(range(48), [1] * 48)], mesh, device())
    q, k = torch.ones(12, 14, E, device=device()), torch.ones(12, 2, E, device=device())
    attention = UlyssesAttention(mesh, 14, 2, E, kernel="reference")
    with pytest.raises(ValueError, match="without causal needs row_parallel_size 1, not 2"):
        attention(q, k, k, plan=batch.attention_plan, causal=False, window=(3, 3))
    full = torch.randn(48, 14, E, generator=torch.Generator().manual_seed(0)).to(device())
    got = attention(full[batch.indices], k, k, plan=batch.attention_plan, window=(3, -1))
    cu, ones = torch.tensor([0, 48], dtype=torch.int32, device=device()), torch.ones(48, 2, E, device=device())
    whole = UlyssesAttention(None, 14, 2, E)(full, ones, ones, cu, window=(3, -1))
    torch.testing.assert_close(got, whole[batch.indices])
    return str(caught.value)


def test_a_mesh_made_without_the_head_count_is_refused_with_the_remedy():
    message = run_distributed(undivided_heads, 4)[0]
    assert "the mesh splits heads 4 ways, which does not divide 14 query heads" in message
    assert "ParallelMesh(..., num_heads=14)" in message
