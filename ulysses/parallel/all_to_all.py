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

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import HeadLayout, head_layout
from .plan import AttentionPlan


class SeqAllToAll4D(torch.autograd.Function):
    """Trade a scattered axis for a gathered one over `group`.

    scatter_idx=2, gather_idx=1 turns [B, S/P, H, E] into [B, S, H/P, E]; scatter_idx=1, gather_idx=2 turns it back.
    All ranks of the group call it together, in backward too. H (or S) must be divisible by the P ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, input: Tensor, scatter_idx: int = 2, gather_idx: int = 1
    ) -> Tensor:
        ctx.group, ctx.axes = group, (scatter_idx, gather_idx)
        return _trade_axes(input, group, scatter_idx, gather_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        scatter_idx, gather_idx = ctx.axes
        return None, _trade_axes(grad, ctx.group, gather_idx, scatter_idx), None, None


def _trade_axes(input: Tensor, group: dist.ProcessGroup | None, scatter: int, gather: int) -> Tensor:
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
    send = input.unflatten(scatter, (ranks, -1)).movedim(scatter, 0).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received.movedim(0, gather).flatten(gather, gather + 1)


# --- q, k, v: token shards -> head shards ------------------------------------------------------------------------


def exchange_qkv(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Send q [S, H, E], k and v [S, K, E] to the ranks that attend with them; differentiable.

    Returns q' [T/R, query, E], k' and v' [T, key, E]. All ranks of the group call it together, in backward too.
    """
    if plan.ranks == 1:
        return query, key, value
    return _ExchangeQKV.apply(query, key, value, plan)


class _ExchangeQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads = plan, (query.shape[1], key.shape[1])
        return exchange_qkv_forward(query, key, value, plan)

    @staticmethod
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        return *exchange_qkv_backward(dquery, dkey, dvalue, ctx.plan, *ctx.heads), None


def exchange_qkv_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `exchange_qkv` without recording a graph."""
    if plan.ranks == 1:
        return query, key, value
    heads = head_layout(query.shape[1], key.shape[1], plan.head_parallel_size)
    send = _Regions(query, heads, plan)
    send.near[..., : heads.query, :].copy_(_by_rank(query, plan))
    for region in send.key_regions():
        _write_heads(region[..., : heads.key, :], key, heads)
        _write_heads(region[..., heads.key :, :], value, heads)
    return _split_heads(send.exchange(plan), heads, plan)


def _split_heads(got: "_Regions", heads: HeadLayout, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
    near = got.near.flatten(0, 1)
    query = near[:, : heads.query]
    if plan.query_order is not None:
        query = query.index_select(0, plan.query_order)
    elif plan.row_parallel_size > 1:
        query = query.contiguous()  # a view would keep the keys' receive buffer alive beside their packed copy
    if plan.order is None and plan.row_parallel_size == 1:
        keys = near[:, heads.query :]
    else:
        keys = near.new_empty(plan.total, 2 * heads.key, near.shape[-1])
        for region, at in zip(got.key_regions(), got.row_spans(plan)):
            rows = region.flatten(0, -4).flatten(0, 1)
            if plan.order is None:
                keys[slice(*at)] = rows
            else:
                keys.index_copy_(0, plan.order[slice(*at)], rows)
    return query, keys[:, : heads.key], keys[:, heads.key :]


def exchange_qkv_backward(
    dquery: Tensor, dkey: Tensor, dvalue: Tensor, plan: AttentionPlan, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the adjoint of `exchange_qkv`: gradients of head shards -> of token shards; kv copies are summed."""
    if plan.ranks == 1:
        return dquery, dkey, dvalue
    heads = head_layout(num_heads, num_kv_heads, plan.head_parallel_size)
    send = _Regions(dquery, heads, plan)
    near = send.near.flatten(0, 1)
    if plan.query_inverse is not None:
        dquery = dquery.index_select(0, plan.query_inverse)
    near[:, : heads.query].copy_(dquery)
    for region, at in zip(send.key_regions(), send.row_spans(plan)):
        rows = region.flatten(0, -4).flatten(0, 1)
        for grad, part in ((dkey, rows[:, : heads.key]), (dvalue, rows[:, heads.key :])):
            part.copy_(grad[slice(*at)] if plan.order is None else grad.index_select(0, plan.order[slice(*at)]))
    got = send.exchange(plan)
    dquery = got.near[..., : heads.query, :].transpose(0, 1).flatten(1, 2)
    total = _sum_rows(got)
    return (
        dquery,
        _sum_heads(total[..., : heads.key, :], heads, num_kv_heads).to(dquery.dtype),
        _sum_heads(total[..., heads.key :, :], heads, num_kv_heads).to(dquery.dtype),
    )


class _Regions:
    """One exchange buffer: before [r, U, S, 2 key, E], near [U, S, query + 2 key, E], after [R-1-r, U, S, 2 key, E].

    `near` goes to, or came from, the ranks of this rank's own row set r; the send and receive buffers look the same.
    """

    def __init__(self, like: Tensor, heads: HeadLayout, plan: AttentionPlan):
        ranks, rows, me = plan.head_parallel_size, plan.row_parallel_size, plan.row_set
        tokens, width = plan.local_tokens, like.shape[-1]
        self.heads = heads
        self.splits: list[int] | None = None
        far = tokens * 2 * heads.key * width
        wide = tokens * (heads.query + 2 * heads.key) * width
        self.shape = (ranks, tokens, 2 * heads.key, width)
        self.counts = (me, rows - 1 - me)
        if rows > 1:
            self.splits = [wide if r == me else far for r in range(rows) for _ in range(ranks)]
        sizes = (me * ranks * far, ranks * wide, (rows - 1 - me) * ranks * far)
        self._set(like.new_empty(sum(sizes)), sizes)

    def _set(self, flat: Tensor, sizes: tuple[int, ...]) -> None:
        self.flat, self.sizes = flat, sizes
        before, near, after = flat.split(sizes)
        ranks, tokens, _, width = self.shape
        self.near = near.view(ranks, tokens, -1, width)
        self.before = before.view(self.counts[0], *self.shape)
        self.after = after.view(self.counts[1], *self.shape)

    def key_regions(self) -> list[Tensor]:
        """The k | v parts [rows, U, S, 2 key, E] in rank order."""
        return [self.before, self.near[None, :, :, self.heads.query :], self.after]

    def row_spans(self, plan: AttentionPlan) -> list[tuple[int, int]]:
        """Which tokens, in rank order, each key region covers."""
        size = plan.head_parallel_size * plan.local_tokens
        first, second = plan.row_set * size, (plan.row_set + 1) * size
        return [(0, first), (first, second), (second, plan.total)]

    def exchange(self, plan: AttentionPlan) -> "_Regions":
        received = torch.empty_like(self.flat)
        dist.all_to_all_single(received, self.flat, self.splits, self.splits, group=plan.group)
        got = object.__new__(_Regions)
        got.heads, got.shape, got.counts, got.splits = self.heads, self.shape, self.counts, self.splits
        got._set(received, self.sizes)
        return got


def _by_rank(values: Tensor, plan: AttentionPlan) -> Tensor:
    """View [S, U * heads, E] as [U, S, heads, E]."""
    return values.unflatten(1, (plan.head_parallel_size, -1)).transpose(0, 1)


def _write_heads(region: Tensor, values: Tensor, heads: HeadLayout) -> None:
    """Write kv heads [S, K, E] for every destination: region [rows, U, S, key, E], slot j gets head j // repeat."""
    if region.shape[0] == 0:
        return
    ranks, repeat = region.shape[1], heads.repeat
    if repeat == 1:
        region.copy_(values.unflatten(1, (ranks, heads.key)).transpose(0, 1))
    elif heads.key == 1:
        region.unflatten(1, (-1, repeat)).copy_(values.transpose(0, 1)[:, None, :, None])
    else:  # a block straddles kv groups
        for u in range(ranks):
            slots = torch.arange(u * heads.key, (u + 1) * heads.key) // repeat
            for slot, head in enumerate(slots.tolist()):
                region[:, u, :, slot].copy_(values[:, head])


def _sum_rows(got: _Regions) -> Tensor:
    """Sum the k | v gradients over row sets [U, S, 2 key, E], in float32 or better."""
    near = got.key_regions()[1][0]
    if got.counts == (0, 0):
        return near
    total = near.to(torch.promote_types(near.dtype, torch.float32), copy=True)
    for region in (*got.before, *got.after):
        total += region
    return total


def _sum_heads(grads: Tensor, heads: HeadLayout, num_kv_heads: int) -> Tensor:
    """Sum the copies of every kv head: [U, S, key, E] -> [S, K, E]."""
    slots = grads.transpose(0, 1).flatten(1, 2)
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
    if plan.query_inverse is not None:
        output = output.index_select(0, plan.query_inverse)
    received = _exchange_near(output.contiguous(), plan)
    return received.unflatten(0, (plan.head_parallel_size, -1)).transpose(0, 1).flatten(1, 2)


def exchange_out_backward(grad: Tensor, plan: AttentionPlan) -> Tensor:
    """Apply the adjoint of `exchange_out`: [S, H, E] -> [T/R, H/U, E]."""
    if plan.ranks == 1:
        return grad
    grad = _exchange_near(_by_rank(grad, plan).contiguous(), plan).flatten(0, 1)
    return grad if plan.query_order is None else grad.index_select(0, plan.query_order)


def _exchange_near(send: Tensor, plan: AttentionPlan) -> Tensor:
    """All-to-all among the ranks of one row set; the others get empty parts."""
    received = torch.empty_like(send)
    splits = None
    if plan.row_parallel_size > 1:
        ranks, part = plan.head_parallel_size, send.numel() // plan.head_parallel_size
        splits = [part * (r == plan.row_set) for r in range(plan.row_parallel_size) for _ in range(ranks)]
    dist.all_to_all_single(received.view(-1), send.view(-1), splits, splits, group=plan.group)
    return received
