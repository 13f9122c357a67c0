"""The rank grid: numbers, groups, refusals, and collectives over one group only."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import device, full, run_distributed
from tests.unit.test_batch import LENGTHS
from ulysses import ParallelMesh, Sequence, pack_shard
from ulysses.parallel import gather_tokens, segment_sums, sequence_last


def grid(sp, num_heads):
    mesh = ParallelMesh(sp, num_heads=num_heads)
    total = torch.tensor([float(mesh.rank)], device=device())
    if mesh.sp_group is not None:
        dist.all_reduce(total, group=mesh.sp_group)
    assert copy.deepcopy(mesh) is mesh and mesh.is_main == (mesh.rank == 0)
    sizes = mesh.world_size, mesh.sequence_parallel_size, mesh.data_parallel_size
    assert sizes == (4, sp, 4 // sp)
    return mesh.dp_rank, mesh.sp_rank, mesh.row_parallel_size, total.item()


def test_sequence_axis_is_innermost():
    two = [(0, 0, 1, 1.0), (0, 1, 1, 1.0), (1, 0, 1, 5.0), (1, 1, 1, 5.0)]
    assert run_distributed(grid, 4, 2, None) == two
    for heads, rows in ((14, 2), ((14, 32, 3), 4)):
        assert run_distributed(grid, 4, 4, heads) == [(0, rank, rows, 6.0) for rank in range(4)]
    assert run_distributed(grid, 4, 1, 14) == [(rank, 0, 1, rank) for rank in range(4)]


def refusal(sp):
    with pytest.raises(ValueError) as caught:
        ParallelMesh(sp)
    return str(caught.value)


def test_impossible_degrees_are_refused_on_every_rank():
    wanted = "sequence_parallel_size is 3 but must divide the number of processes, 4; set it to one of [1, 2, 4]"
    assert run_distributed(refusal, 4, 3) == [wanted] * 4
    assert refusal(0).endswith("the number of processes, 1; set it to one of [1]")


def sums(sp, num_heads):
    mesh = ParallelMesh(sp, num_heads=num_heads)
    batch = pack_shard([Sequence(np.arange(n), np.ones(n)) for n in LENGTHS], mesh, device())
    draw = torch.Generator().manual_seed(1 + mesh.dp_rank)
    full = torch.rand(sum(LENGTHS), generator=draw, dtype=torch.float64).to(device())
    padded = torch.cat([full, full.new_full((sp,), torch.nan)])  # the tail must not count
    local = padded[batch.cu_seqlens[batch.sequence_ids] + batch.positions].requires_grad_()
    totals, last = segment_sums(local, batch), sequence_last(local, batch)
    ends = (torch.tensor(LENGTHS).cumsum(0) - 1).to(device())
    torch.testing.assert_close(totals, torch.stack([x.sum() for x in full.split(LENGTHS)]))
    assert torch.equal(last, full[ends])
    weights = torch.arange(1.0, 8, dtype=torch.float64, device=device())
    # this rank's tokens' share, not sp times it
    (grad,) = torch.autograd.grad((totals * weights).sum(), local)
    assert torch.equal(grad, torch.cat([weights, weights.new_zeros(1)])[batch.sequence_ids])
    (grad,) = torch.autograd.grad((last * weights).sum(), local)
    at_ends = torch.zeros_like(full).index_put((ends,), weights)
    assert torch.equal(gather_tokens(grad, batch), at_ends)
    assert torch.equal(gather_tokens(local.detach(), batch), full)
    return totals.detach()


@pytest.mark.parametrize("sp, num_heads", [(2, 4), (4, 4), (4, 14), *full((2, 1))])
def test_sums_over_sequences_and_their_gradient_rule(sp, num_heads):
    results = run_distributed(sums, 4, sp, num_heads)
    for rank in range(4):
        assert torch.equal(results[rank], results[rank // sp * sp])
