"""The collectives of Ulysses and their adjoints: token shards <-> head shards.

Plain Ulysses (R = 1), two ranks, q, k and v of one layer in one exchange:

    rank 0  tokens 0..S-1     [ S, H q | K k | K v ]  --+-->  rank 0  all tokens  [ T, H/2 q | K/2 k | K/2 v ]
    rank 1  tokens S..2S-1    [ S, H q | K k | K v ]  --+-->  rank 1  all tokens  [ T, H/2 q | K/2 k | K/2 v ]

One copy packs the send buffer; what arrives already is [T, heads, E] in packed order, and q', k', v' are views of it.
A kv head that several ranks need is written once for each of them into the buffer; the adjoint sums their gradients.

With row-parallel ranks (R > 1, layout.py) the same single all-to-all has uneven parts:

    to ranks of my row set        [ S, query q | key k | key v ]        they attend with my rows as queries
    to all others                 [ S,           key k | key v ]        they only need my rows as keys

and the keys are put into packed order on arrival, one copy for k and v together.

Letters: T packed tokens, S tokens on this rank, H query heads, K kv heads, E head dim, U head-parallel and R
row-parallel size; `query` and `key` are the heads on one rank after the exchange (HeadLayout).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import HeadLayout, head_layout
from .plan import AttentionPlan

_WIDE = 16  # bytes that a GPU's thread moves at once


class SeqAllToAll4D(torch.autograd.Function):
    """Trade a scattered axis for a gathered one over `group`.

    scatter_idx=2, gather_idx=1 turns [B, S/P, H, E] into [B, S, H/P, E]; scatter_idx=1, gather_idx=2 turns it back.
    All ranks of the group call it together, in backward too. H (or S) must be divisible by the P ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup | None,
        input: Tensor,
        scatter_idx: int = 2,
        gather_idx: int = 1,
    ) -> Tensor:
        ctx.group, ctx.axes = group, (scatter_idx, gather_idx)
        return _trade_axes(input, group, scatter_idx, gather_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        scatter_idx, gather_idx = ctx.axes
        return None, _trade_axes(grad, ctx.group, gather_idx, scatter_idx), None, None


def _trade_axes(
    input: Tensor, group: dist.ProcessGroup | None, scatter: int, gather: int
) -> Tensor:
    if input.dim() != 4 or {scatter, gather} != {1, 2}:
        raise ValueError(
            f"input has {input.dim()} axes, scatter_idx {scatter} and gather_idx {gather}; "
            "it must be [B, S, H, E] with scatter_idx and gather_idx 1 and 2 in either order"
        )
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return input
    if input.shape[scatter] % ranks:
        raise ValueError(
            f"axis {scatter} of the input has {input.shape[scatter]} entries, which {ranks} ranks do not divide; "
            "use UlyssesAttention, which splits any head count and length"
        )
    send = dense(input.unflatten(scatter, (ranks, -1)).movedim(scatter, 0))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return dense(received.movedim(0, gather)).flatten(gather, gather + 1)


# --- q, k, v: token shards -> head shards ------------------------------------------------------------------------


def exchange_qkv(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Send q [S, H, E], k and v [S, K, E] to the ranks that attend with them; differentiable.

    Returns q' [T/R, query, E], k' and v' [T, key, E]. All ranks of the group call it together, in backward too.
    """
    if plan.ranks == 1:
        return query, key, value
    return _ExchangeQKV.apply(query, key, value, plan)


class _ExchangeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads = plan, (query.shape[1], key.shape[1])
        return exchange_qkv_forward(query, key, value, plan)

    @staticmethod
    def backward(
        ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor
    ) -> tuple[Tensor | None, ...]:
        return *exchange_qkv_backward(dquery, dkey, dvalue, ctx.plan, *ctx.heads), None


def exchange_qkv_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `exchange_qkv` without recording a graph."""
    if plan.ranks == 1:
        return query, key, value
    heads = head_layout(query.shape[1], key.shape[1], plan.head_parallel_size)
    got = _pack_heads(query, key, value, heads, plan).exchange(
        heads, plan
    )  # what was sent is free again
    return _split_heads(got, heads, plan)


def _pack_heads(
    query: Tensor, key: Tensor, value: Tensor, heads: HeadLayout, plan: AttentionPlan
) -> "_Regions":
    send = _Regions(None, query, heads, plan)
    copy(send.near[:, :, : heads.query], _by_rank(query, plan))
    for part in send.key_parts:
        _write_heads(part[:, :, : heads.key], key, heads)
        _write_heads(part[:, :, heads.key :], value, heads)
    return send


def _split_heads(
    got: "_Regions", heads: HeadLayout, plan: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    query = _to_rows(got.near[:, :, : heads.query], plan)
    if plan.row_parallel_size == 1:
        keys = _to_rows(got.near[:, :, heads.query :], plan)
    else:
        query = dense(
            query
        )  # a view would keep the keys' receive buffer alive beside their packed copy
        keys = got.flat.new_empty(plan.total, 2 * heads.key, got.near.shape[-1])
        for part, pieces in zip(got.key_parts, plan.pieces):
            rows = _to_rows(part, plan).split([b - a for a, b in pieces])
            for (a, b), values in zip(pieces, rows):
                copy(keys[a:b], values)
    return query, keys[:, : heads.key], keys[:, heads.key :]


def _to_rows(values: Tensor, plan: AttentionPlan) -> Tensor:
    """Put what U ranks hold of a row set [U, S, ...] into packed order [U * S, ...]; a copy only in a dense batch."""
    if plan.batch == 1:
        return values.flatten(0, 1)
    return dense(values.unflatten(1, (plan.batch, -1)).transpose(0, 1)).flatten(0, 2)


def _to_ranks(rows: Tensor, plan: AttentionPlan) -> Tensor:
    """Undo `_to_rows`."""
    if plan.batch == 1:
        return rows.unflatten(0, (plan.head_parallel_size, -1))
    return dense(
        rows.unflatten(0, (plan.batch, plan.head_parallel_size, -1)).transpose(0, 1)
    ).flatten(1, 2)


def exchange_qkv_backward(
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
    plan: AttentionPlan,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the adjoint of `exchange_qkv`: gradients of head shards -> of token shards; kv copies are summed."""
    if plan.ranks == 1:
        return dquery, dkey, dvalue
    heads = head_layout(num_heads, num_kv_heads, plan.head_parallel_size)
    got = _pack_gradients(dquery, dkey, dvalue, heads, plan).exchange(heads, plan)
    dquery = dense(got.near[..., : heads.query, :].transpose(0, 1)).flatten(1, 2)
    total = _sum_rows(got.key_parts)
    return (
        dquery,
        _sum_heads(total[..., : heads.key, :], heads, num_kv_heads).to(dquery.dtype),
        _sum_heads(total[..., heads.key :, :], heads, num_kv_heads).to(dquery.dtype),
    )


def _pack_gradients(
    dquery: Tensor, dkey: Tensor, dvalue: Tensor, heads: HeadLayout, plan: AttentionPlan
) -> "_Regions":
    send = _Regions(None, dquery, heads, plan)
    copy(send.near[:, :, : heads.query], _to_ranks(dquery, plan))
    for part, pieces in zip(send.key_parts, plan.pieces):
        for grad, slots in ((dkey, slice(heads.key)), (dvalue, slice(heads.key, None))):
            rows = [grad[a:b] for a, b in pieces]
            copy(part[:, :, slots], _to_ranks(rows[0] if len(rows) == 1 else torch.cat(rows), plan))
    return send


class _Regions:
    """One exchange buffer: before [r, U, S, 2 key, E], near [U, S, query + 2 key, E], after [R-1-r, U, S, 2 key, E].

    `near` goes to, or came from, the ranks of this rank's own row set r; the send and receive buffers look the same.
    """

    def __init__(self, flat: Tensor | None, like: Tensor, heads: HeadLayout, plan: AttentionPlan):
        ranks, rows, mine = plan.head_parallel_size, plan.row_parallel_size, plan.row_set
        shape = (ranks, plan.local_tokens, 2 * heads.key, like.shape[-1])
        far = math.prod(shape[1:])
        wide = far + plan.local_tokens * heads.query * like.shape[-1]
        sizes = (mine * ranks * far, ranks * wide, (rows - 1 - mine) * ranks * far)
        self.splits = (
            None
            if rows == 1
            else [wide if r == mine else far for r in range(rows) for _ in range(ranks)]
        )
        self.flat = like.new_empty(sum(sizes)) if flat is None else flat
        before, near, after = self.flat.split(sizes)
        self.near = near.view(ranks, plan.local_tokens, -1, like.shape[-1])
        own = self.near[:, :, heads.query :]
        self.key_parts = [
            *before.view(-1, *shape),
            own,
            *after.view(-1, *shape),
        ]  # k | v of every row set

    def exchange(self, heads: HeadLayout, plan: AttentionPlan) -> "_Regions":
        received = torch.empty_like(self.flat)
        dist.all_to_all_single(received, self.flat, self.splits, self.splits, group=plan.group)
        return _Regions(received, self.near, heads, plan)


def _by_rank(values: Tensor, plan: AttentionPlan) -> Tensor:
    """View [S, U * heads, E] as [U, S, heads, E]."""
    return values.unflatten(1, (plan.head_parallel_size, -1)).transpose(0, 1)


def _write_heads(part: Tensor, values: Tensor, heads: HeadLayout) -> None:
    """Write kv heads [S, K, E] for U ranks: part [U, S, key, E], slot j of the U * key gets head j // repeat."""
    if heads.repeat == 1:
        copy(part, values.unflatten(1, (-1, heads.key)).transpose(0, 1))
    elif heads.key == 1:
        copy(part.unflatten(0, (-1, heads.repeat)), values.transpose(0, 1)[:, None, :, None])
    else:  # a block straddles kv groups
        for slot in range(part.shape[0] * heads.key):
            copy(part[slot // heads.key, :, slot % heads.key], values[:, slot // heads.repeat])


def _sum_rows(parts: list[Tensor]) -> Tensor:
    """Sum the k | v gradients of all row sets [U, S, 2 key, E], in float32 or better."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


def _sum_heads(grads: Tensor, heads: HeadLayout, num_kv_heads: int) -> Tensor:
    """Sum the copies of every kv head: [U, S, key, E] -> [S, K, E]."""
    slots = dense(grads.transpose(0, 1)).flatten(1, 2)
    return slots if heads.repeat == 1 else slots.unflatten(1, (num_kv_heads, heads.repeat)).sum(2)


# --- attention output: head shards -> token shards ---------------------------------------------------------------


def exchange_out(output: Tensor, plan: AttentionPlan) -> Tensor:
    """Bring attention outputs [T/R, H/U, E] back to their tokens' ranks [S, H, E]; differentiable, collective."""
    return output if plan.ranks == 1 else _ExchangeOut.apply(output, plan)


class _ExchangeOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return exchange_out_forward(output, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchange_out_backward(grad, ctx.plan), None


def exchange_out_forward(output: Tensor, plan: AttentionPlan) -> Tensor:
    """Do `exchange_out` without recording a graph."""
    if plan.ranks == 1:
        return output
    received = _exchange_near(dense(_to_ranks(output, plan)), plan)
    return dense(received.transpose(0, 1)).flatten(1, 2)


def exchange_out_backward(grad: Tensor, plan: AttentionPlan) -> Tensor:
    """Apply the adjoint of `exchange_out`: [S, H, E] -> [T/R, H/U, E]."""
    if plan.ranks == 1:
        return grad
    return _to_rows(_exchange_near(dense(_by_rank(grad, plan)), plan), plan)


def _exchange_near(send: Tensor, plan: AttentionPlan) -> Tensor:
    """All-to-all among the ranks of one row set; the others get empty parts."""
    received = torch.empty_like(send)
    splits = None
    if plan.row_parallel_size > 1:
        ranks, part = plan.head_parallel_size, send.numel() // plan.head_parallel_size
        splits = [
            part * (r == plan.row_set) for r in range(plan.row_parallel_size) for _ in range(ranks)
        ]
    dist.all_to_all_single(received.view(-1), send.view(-1), splits, splits, group=plan.group)
    return received


# --- copies between layouts --------------------------------------------------------------------------------------


def copy(target: Tensor, source: Tensor) -> None:
    """Copy between strided tensors of one dtype; `source` may be broadcast. Without a graph.

    torch moves strided tensors element by element; seen as elements of 16 bytes, bfloat16 heads move 2.4 times as fast.
    """
    if _is_wide(target) and _is_wide(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


def dense(x: Tensor) -> Tensor:
    """Return x with its axes in memory order; x itself if they are. Without a graph."""
    if x.is_contiguous():
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy(out, x)
    return out


def _is_wide(x: Tensor) -> bool:
    """Say whether the rows of the last axis are whole elements of 16 bytes, on a device that has such."""
    sizes = (x.shape[-1], *x.stride()[:-1], x.storage_offset())
    whole = all(size * x.element_size() % _WIDE == 0 for size in sizes)
    return whole and x.stride(-1) == 1 and x.device.type in ("cpu", "cuda")
