"""Sums over sequences whose tokens lie on several ranks, with the gradient rule of the engine.

    rank 0   a a a a b b    local sums  [sum a, sum b', 0     ]  --+
                                                                  +-- all-reduce: [a, b, c] on every rank
    rank 1   b b c c c c    local sums  [0,     sum b'', sum c]  --+

Forward adds over the sequence-parallel group; backward is the IDENTITY. Every rank of the group then evaluates the loss
of every sequence and back-propagates it to its own tokens only, so that the sum over ranks is the whole gradient,
counted once. (The adjoint of the all-reduce would multiply it by the number of ranks.)

Letters: T packed tokens, S tokens on this rank, N sequences.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import ShardedBatch


def segment_sums(values: Tensor, batch: ShardedBatch) -> Tensor:
    """Sum per-token values [S, ...] over each sequence of the batch [N, ...]; the tail is left out.

    The sums are taken in float64, without float atomics, and returned in float32 or better. All ranks of the
    sequence-parallel group call it together and get the same result; each back-propagates to its own tokens (identity
    backward).
    """
    return _SegmentSums.apply(values, batch)


def sequence_last(values: Tensor, batch: ShardedBatch) -> Tensor:
    """Return the values [S] at the last token of each sequence [N]; ranks and gradient as in `segment_sums`."""
    # masked_fill and not torch.where, which would copy the 0 to a GPU and make the host wait
    return segment_sums(values.masked_fill(~batch.is_last, 0), batch)


@torch.no_grad()
def gather_tokens(values: Tensor, batch: ShardedBatch) -> Tensor:
    """Collect per-token values [S, ...] in packed order [T, ...] on every rank, without the tail; no gradient."""
    plan, gathered = batch.attention_plan, values
    if batch.mesh.sp_group is not None:
        gathered = values.new_empty(plan.total, *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=batch.mesh.sp_group)
    packed = torch.empty_like(gathered)
    packed[plan.by_rank] = gathered
    return packed[: batch.num_tokens]


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: ShardedBatch) -> Tensor:
        ctx.sequence_ids, ctx.dtype = batch.sequence_ids, values.dtype
        # column by column: a GPU adds the rows of a vector in parallel, those of a matrix one after the other
        columns = values.double().reshape(len(values), -1).t().contiguous()
        starts = batch.sequence_starts
        sums = torch.stack(
            [torch.segment_reduce(c, "sum", offsets=starts, unsafe=True) for c in columns], 1
        )
        if batch.mesh.sp_group is not None:
            dist.all_reduce(sums, group=batch.mesh.sp_group)
        wide = torch.promote_types(values.dtype, torch.float32)
        return sums.view(-1, *values.shape[1:]).to(wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padded = torch.cat([grad, grad.new_zeros((1, *grad.shape[1:]))])  # the tail's row
        return padded.index_select(0, ctx.sequence_ids).to(ctx.dtype), None
