"""The all-to-alls of Ulysses and their adjoints, from token shards to head shards and back; imported by several ranks.

Plain Ulysses (R = 1) on two ranks; one exchange carries q, k and v of a layer:

    rank 0  tokens 0..S-1     [ S, H q | K k | K v ]  --+-->  rank 0  all tokens  [ T, H/2 q | K/2 k | K/2 v ]
    rank 1  tokens S..2S-1    [ S, H q | K k | K v ]  --+-->  rank 1  all tokens  [ T, H/2 q | K/2 k | K/2 v ]

One copy packs the send buffer. What arrives is [T, heads, E] in packed order already, and q', k', v' are views of it.
A kv head that several ranks need is written into the buffer once for each of them; the adjoint sums their gradients.

With row-parallel ranks (R > 1, layout.py) the same single all-to-all has parts of two sizes:

    to ranks of my row set        [ S, query q | key k | key v ]        my rows are queries there
    to all others                 [ S,           key k | key v ]        my rows are only keys there

and the keys are put into packed order when they arrive, in one copy for k and v together.

Letters: T packed tokens, S tokens on this rank, H query heads, K kv heads, E head dim, U head-parallel and R
row-parallel size; `query` and `key` are the numbers of heads on one rank after the exchange (HeadLayout).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import AttentionPlan, HeadLayout, copy, dense, head_layout
from .mesh import HOST_WAITS, ParallelMesh

# --- q, k, v: token shards -> head shards ------------------------------------------------------------------------


def exchange_qkv_forward(qkv: Sequence[Tensor], plan: AttentionPlan) -> tuple[Tensor, ...]:
    """Send q [S, H, E], k and v [S, K, E] to the ranks that attend with them; records no graph.

    Returns q' [T/R, query, E], k' and v' [T, key, E]. All ranks of the group call it together, and its adjoint too.
    """
    mesh, (query, key, value) = plan.mesh, qkv
    heads = head_layout(query.shape[1], key.shape[1], mesh.head_parallel_size)
    send = _Buffer(plan, heads, query)
    copy(send.query, _by_rank(query, mesh.head_parallel_size))
    for part in send.keys:
        write_heads(part[:, :, : heads.key], key, heads)
        write_heads(part[:, :, heads.key :], value, heads)
    received = send.exchange()
    del send, part  # and with them the buffer
    query = received.query.flatten(0, 1)
    if mesh.row_parallel_size == 1:
        keys = received.keys[0].flatten(0, 1)
    else:
        # a view would keep the keys' receive buffer alive next to their copy
        query = dense(query)
        keys = query.new_empty(plan.total, 2 * heads.key, query.shape[-1])
        for rows, part in _packed_rows(received.keys, plan):
            copy(keys[rows], part)
    return query, keys[:, : heads.key], keys[:, heads.key :]


def exchange_qkv_backward(
    grads: Sequence[Tensor], plan: AttentionPlan, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, ...]:
    """Bring gradients of head shards back to token shards; those of a kv head's copies are summed."""
    dquery, dkey, dvalue = grads
    ranks = plan.mesh.head_parallel_size
    heads = head_layout(num_heads, num_kv_heads, ranks)
    send = _Buffer(plan, heads, dquery)
    copy(send.query, dquery.unflatten(0, (ranks, -1)))
    for rows, part in _packed_rows(send.keys, plan):
        copy(part[:, : heads.key], dkey[rows])
        copy(part[:, heads.key :], dvalue[rows])
    received = send.exchange()
    del send, part  # and with them the buffer
    total, *others = received.keys
    if others:  # of all row sets, in float32 or better
        total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    sums = (sum_heads(part, heads, num_kv_heads) for part in total.split(heads.key, -2))
    of_query = dense(received.query.transpose(0, 1)).flatten(1, 2)
    return of_query, *(x.to(dquery.dtype) for x in sums)


class _Buffer:
    """A send or receive buffer of one exchange, with views of its regions.

        k | v of the row sets before mine    q | k | v of my row set    k | v of the row sets after mine

    query [U, S, query, E]; keys: [U, S, 2 key, E] for every row set, k before v.
    """

    def __init__(
        self, plan: AttentionPlan, heads: HeadLayout, like: Tensor, data: Tensor | None = None
    ):
        mesh, tokens = plan.mesh, plan.local_tokens
        ranks, rows, mine = mesh.head_parallel_size, mesh.row_parallel_size, mesh.row_set
        self._plan, self._heads = plan, heads
        # vectors of E numbers for a rank of another row set, and for one of mine
        self._far = tokens * 2 * heads.key
        self._near = self._far + tokens * heads.query
        sizes = [ranks * (self._near if r == mine else self._far) for r in range(rows)]
        self._data = like.new_empty(sum(sizes), like.shape[-1]) if data is None else data
        parts = [part.unflatten(0, (ranks, tokens, -1)) for part in self._data.split(sizes)]
        self.query = parts[mine][:, :, : heads.query]
        self.keys = [part[:, :, -2 * heads.key :] for part in parts]

    def exchange(self) -> "_Buffer":
        """Return the receive buffer; the send buffer is free as soon as the caller drops it."""
        mesh = self._plan.mesh
        sizes = self._near, self._far
        received = all_to_all(self._data, mesh, mesh.head_parallel_size, *sizes)
        return _Buffer(self._plan, self._heads, received, received)


def all_to_all(
    send: Tensor, mesh: ParallelMesh, ranks: int, near: int = 1, far: int = 0
) -> Tensor:
    """Exchange rows of the first axis: `near` of them with each rank of my set, and `far` with each other one.

    Sets are `ranks` neighbours; if one set is all ranks, these share the rows equally.
    """
    received, splits, count = torch.empty_like(send), None, mesh.sequence_parallel_size
    if ranks < count:
        mine = mesh.sp_rank // ranks
        splits = [near if r // ranks == mine else far for r in range(count)]
    with HOST_WAITS:
        dist.all_to_all_single(received, send, splits, splits, group=mesh.sp_group)
    return received


def _packed_rows(keys: list[Tensor], plan: AttentionPlan) -> Iterator[tuple[slice, Tensor]]:
    """Yield the packed rows of every arc and its part [rows, 2 key, E] of a buffer's keys."""
    for row_set, arcs in zip(keys, plan.pieces):
        parts = row_set.flatten(0, 1).split([b - a for a, b in arcs])
        yield from ((slice(a, b), part) for (a, b), part in zip(arcs, parts))


def _by_rank(values: Tensor, ranks: int) -> Tensor:
    """View [S, U * heads, E] as [U, S, heads, E]."""
    return values.unflatten(1, (ranks, -1)).transpose(0, 1)


def write_heads(part: Tensor, values: Tensor, heads: HeadLayout) -> None:
    """Write kv heads [S, K, E] for U ranks: part [U, S, key, E], slot j of the U * key gets head j // repeat."""
    if heads.repeat == 1:
        copy(part, values.unflatten(1, (-1, heads.key)).transpose(0, 1))
    elif heads.key == 1:
        copy(part.unflatten(0, (-1, heads.repeat)), values.transpose(0, 1)[:, None, :, None])
    else:  # a block of query heads covers parts of several kv groups
        for slot in range(part.shape[0] * heads.key):
            copy(part[slot // heads.key, :, slot % heads.key], values[:, slot // heads.repeat])


def sum_heads(grads: Tensor, heads: HeadLayout, num_kv_heads: int) -> Tensor:
    """Sum the copies of every kv head: [U, S, key, E] -> [S, K, E]."""
    slots = dense(grads.transpose(0, 1)).flatten(1, 2)
    return (
        slots if heads.repeat == 1 else slots.unflatten(1, (num_kv_heads, heads.repeat)).sum(2)
    )


# --- attention output: head shards -> token shards ---------------------------------------------------------------


def exchange_out_forward(output: Tensor, plan: AttentionPlan, ranks: int = 0) -> Tensor:
    """Bring attention outputs [T/R, H/U, E] back to their tokens' ranks [S, H, E], as collectively as q, k and v.

    ranks: how many split the heads, if not U; the rows are those of so many neighbours then.
    """
    ranks = ranks or plan.mesh.head_parallel_size
    received = all_to_all(dense(output).unflatten(0, (ranks, -1)), plan.mesh, ranks)
    return dense(received.transpose(0, 1)).flatten(1, 2)


def exchange_out_backward(grad: Tensor, plan: AttentionPlan, ranks: int = 0) -> Tensor:
    """Send the outputs' gradients where the outputs came from: [S, H, E] -> [T/R, H/U, E]."""
    ranks = ranks or plan.mesh.head_parallel_size
    return all_to_all(dense(_by_rank(grad, ranks)), plan.mesh, ranks).flatten(0, 1)
