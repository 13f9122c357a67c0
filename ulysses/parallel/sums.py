"""Sums over sequences that lie across ranks, with the gradient rule of the engine.

    rank 0   a a a a b b    local sums  [sum a, sum b', 0     ]  --+
                                                                  +-- all-reduce: [a, b, c] on every rank
    rank 1   b b c c c c    local sums  [0,     sum b'', sum c]  --+

Forward adds over the sequence-parallel group; backward is the IDENTITY. Every rank of the group then evaluates and
back-propagates the loss of every sequence, and its gradient is exactly its own tokens' share, so the sum over ranks is
the whole gradient, once. (The adjoint of the all-reduce would multiply it by sp.)

Letters: T packed tokens, S tokens on this rank, N sequences.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .device import to_device

if TYPE_CHECKING:
    from .batch import ShardedBatch

FAN_IN = 64


class SegmentIndex(NamedTuple):
    """Index tensors, made once per batch on the host, that make segment sums a few gathers and dense sums.

    levels: gather indices [rows, <= 64]; an index one past the end reads zero. They sum tokens to partial sums and
    those to sequences, as a tree: accurate in float32, the same on every run. sequence_ids [S] sends gradients back.
    last_local [M], last_sequence [M]: local position and sequence of the last tokens that this rank holds.
    """

    levels: tuple[Tensor, ...]
    sequence_ids: Tensor
    last_local: Tensor
    last_sequence: Tensor
    num_sequences: int


def segment_index(
    cu_seqlens: Tensor,
    ranges: list[tuple[int, int]],
    num_sequences: int,
    device: torch.device | str,
) -> SegmentIndex:
    """Prepare the segment sums of a rank that holds these packed ranges (host `cu_seqlens`, tail included)."""
    indices = torch.cat([torch.arange(a, b) for a, b in ranges])
    ids = torch.bucketize(indices, cu_seqlens[1:].long(), right=True)
    count = torch.bincount(ids, minlength=num_sequences + 1)[:num_sequences]
    # Tokens are in packed order, so a sequence's tokens are consecutive here even if other ranks hold some between.
    levels: list[Tensor] = []
    while not levels or (count.numel() and int(count.max()) > 1):
        width = max(1, min(FAN_IN, int(count.max()) if count.numel() else 1))
        rows = torch.div(count + width - 1, width, rounding_mode="floor").clamp(min=1)
        first = (count.cumsum(0) - count).repeat_interleave(rows)
        within = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
        offset = within[:, None] * width + torch.arange(width)
        levels.append(
            torch.where(
                offset < count.repeat_interleave(rows)[:, None], first[:, None] + offset, -1
            )
        )
        count = rows
    sizes = [indices.numel(), *(level.shape[0] for level in levels)]
    last = cu_seqlens[1 : num_sequences + 1].long() - 1
    at = torch.searchsorted(indices, last).clamp(max=indices.numel() - 1)
    held = torch.nonzero(indices[at] == last).flatten()
    return SegmentIndex(
        levels=tuple(
            to_device(level.where(level >= 0, size), device) for level, size in zip(levels, sizes)
        ),
        sequence_ids=to_device(ids, device),
        last_local=to_device(at[held], device),
        last_sequence=to_device(held, device),
        num_sequences=num_sequences,
    )


def segment_sums(values: Tensor, batch: "ShardedBatch") -> Tensor:
    """Sum per-token values [S, ...] over every sequence of the batch [N, ...], tail excluded.

    float32 or better, without float atomics. All ranks of the sequence-parallel group call it together and get the same
    result; each gets the gradient of its own tokens (identity backward).
    """
    return _SegmentSums.apply(values, batch.segments, batch.mesh.sp_group)


def sequence_last(values: Tensor, batch: "ShardedBatch") -> Tensor:
    """Take per-token values [S] at every sequence's last token [N]; collective and gradient as in `segment_sums`."""
    return _SequenceLast.apply(values, batch.segments, batch.mesh.sp_group)


@torch.no_grad()
def gather_tokens(values: Tensor, batch: "ShardedBatch") -> Tensor:
    """Collect per-token values [S, ...] in packed order [T, ...], tail dropped, on every rank; no gradient."""
    gathered = values.contiguous()
    if batch.mesh.sp_group is not None:
        parts = [torch.empty_like(gathered) for _ in range(batch.mesh.sequence_parallel_size)]
        dist.all_gather(parts, gathered, group=batch.mesh.sp_group)
        gathered = torch.cat(parts)
    ranges = [piece for pieces in batch.attention_plan.pieces for piece in pieces]
    if len(ranges) > 1:
        in_rank_order = gathered.split([b - a for a, b in ranges])
        gathered = torch.cat(
            [part for _, part in sorted(zip(ranges, in_rank_order), key=lambda both: both[0])]
        )
    return gathered[: batch.num_tokens]


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: SegmentIndex, group: Any) -> Tensor:
        ctx.index, ctx.dtype = index, values.dtype
        sums = values if values.dtype == torch.float64 else values.float()
        for level in index.levels:
            sums = torch.cat([sums, sums.new_zeros((1, *sums.shape[1:]))])[level].sum(1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        padded = torch.cat([grad, grad.new_zeros((1, *grad.shape[1:]))])  # the tail's row
        return padded.index_select(0, ctx.index.sequence_ids).to(ctx.dtype), None, None


class _SequenceLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: SegmentIndex, group: Any) -> Tensor:
        ctx.index, ctx.dtype, ctx.shape = index, values.dtype, values.shape
        result = values.new_zeros((index.num_sequences, *values.shape[1:]))
        result = result if values.dtype == torch.float64 else result.float()
        result.index_copy_(
            0, index.last_sequence, values.index_select(0, index.last_local).to(result.dtype)
        )
        if group is not None:
            dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        full = grad.new_zeros(ctx.shape)
        full.index_copy_(0, ctx.index.last_local, grad.index_select(0, ctx.index.last_sequence))
        return full.to(ctx.dtype), None, None
