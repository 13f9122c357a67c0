"""The all-to-alls of Ulysses and their adjoints, from token shards to head shards and back.

Plain Ulysses (R = 1) on two ranks; one exchange carries all tensors of a layer, here q, k and v:

    rank 0  tokens 0..S-1     [ S, H q | K k | K v ]  --+-->  rank 0  all tokens  [ T, H/2 q | K/2 k | K/2 v ]
    rank 1  tokens S..2S-1    [ S, H q | K k | K v ]  --+-->  rank 1  all tokens  [ T, H/2 q | K/2 k | K/2 v ]

What arrives is in packed order already, and q', k', v' are views of it. A kv head that several ranks need is written
into the buffer once for each of them; the adjoint sums their gradients.

With row-parallel ranks (R > 1, layout.py) the same single all-to-all has parts of two sizes:

    to ranks of my row set        [ S, query q | key k | key v ]        my rows are queries there
    to all others                 [ S,           key k | key v ]        my rows are only keys there

and the keys are put into packed order when they arrive, in one copy for k and v together.

Linear attention has no queries in this sense: all of its tensors go to every set of U ranks, where U is the greatest
common divisor of the ranks and of the layer's value heads. The sets do the same work, and each returns the outputs of
its own ranks' tokens.

Letters: T packed tokens, S tokens on this rank, H query heads, K kv heads, E head dim, U ranks that split the heads, R
row-parallel size; `query` and `key` are the numbers of heads on one rank after the exchange (HeadLayout).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import (
    AttentionPlan,
    HeadLayout,
    Tensors,
    contiguous,
    copy_strided,
    head_layout,
)
from .ranges import rows_between

Parts = Sequence[tuple[int, int]]  # side by side in a tensor: how many heads, and how wide each


class SentPart(NamedTuple):
    """A part of a tensor: its heads on all ranks, how wide each is, and how the ranks that split heads share them."""

    heads: int
    width: int
    layout: HeadLayout

    @property
    def columns(self) -> int:
        """Its columns on one rank after the exchange."""
        return self.layout.key * self.width


class HeadExchange:
    """Exchange the tensors of a layer under a plan; all ranks of the group call a method together.

    Nothing records a graph, except `my_columns`.

    Args:
        tensors: the parts of each tensor. The part with the most heads holds queries or values. Another part may have
            fewer; each of its heads then serves several of those.
        has_queries: whether the first tensor, which has one part, holds the queries of softmax attention: its rows go
            to the ranks of this rank's row set alone, and so does the output.
    """

    def __init__(
        self, tensors: Sequence[Parts], plan: AttentionPlan, *, has_queries: bool
    ) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.queries = int(has_queries)  # how many of the tensors hold queries
        most = max(heads for heads, _ in chain(*tensors))
        self.ranks = self.mesh.head_parallel_size
        if not has_queries:
            self.ranks = math.gcd(self.mesh.sequence_parallel_size, most)
        self.sets = self.mesh.sequence_parallel_size // self.ranks
        self.my_set, self.my_block = divmod(self.mesh.sp_rank, self.ranks)
        self.set_rows = self.ranks * plan.local_tokens
        self.tensors = [
            [
                SentPart(heads, width, head_layout(most, heads, self.ranks))
                for heads, width in parts
            ]
            for parts in tensors
        ]
        # columns on one rank after the exchange: of every tensor, of the queries and of all else
        self.columns = [sum(part.columns for part in parts) for parts in self.tensors]
        self.query_columns = sum(self.columns[: self.queries])
        self.key_columns = sum(self.columns[self.queries :])

    def my_columns(self, columns: Tensor, part: int) -> Tensor:
        """Return this rank's columns, or heads, of a tensor that has all those of a part along axis 0; with a graph."""
        heads, _, layout = [*chain(*self.tensors)][part]
        slots = torch.arange(layout.key, device=columns.device) + self.my_block * layout.key
        return columns.unflatten(0, (heads, -1))[slots // layout.repeat].flatten(0, 1)

    def to_heads(self, tensors: Tensors) -> Tensors:
        """Send local rows of all heads, [S, columns] or [S, heads, E], to the ranks that compute with them.

        Return this rank's heads of the queries [T/R, ...] and of everything else [T, ...] in packed order.
        """
        received = self._send_rows(tensors)
        if self.mesh.row_parallel_size == 1:
            shards = received.view(self.plan.total, -1).split(self.columns, 1)
        else:
            keys = received.new_empty(self.plan.total, self.key_columns)
            for rows, part in self._arcs(received):
                copy_strided(keys[rows], part)
            shards = keys.split(self.columns[self.queries :], 1)
            if self.queries:
                # a view would keep the keys' receive buffer alive next to their copy
                query = self._regions(received)[self.my_set][..., : self.query_columns]
                shards = contiguous(query.flatten(0, 1)), *shards
        if not self.queries:  # the kernels of linear attention read contiguous rows
            shards = tuple(map(contiguous, shards))
        return [x.unflatten(1, (-1, *y.shape[2:])) for x, y in zip(shards, tensors)]

    def to_heads_backward(self, grads: Tensors) -> Tensors:
        """Bring gradients of head shards back to token shards; those of a head's copies are summed."""
        regions = self._regions(self._send_gradients(grads))
        total, *others = (region[..., -self.key_columns :] for region in regions)
        if others:  # add those of all sets, in float32 or better
            total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
        for part in others:
            total += part
        shares = total.split(self.columns[self.queries :], -1)
        if self.queries:
            shares = regions[self.my_set][..., : self.query_columns], *shares
        tensors = []
        for grad, share, parts in zip(grads, shares, self.tensors):
            rows = [
                sum_heads(view, part.layout, part.heads).to(grad.dtype).flatten(1)
                for view, part in zip(_by_part(share, parts), parts)
            ]
            whole = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
            tensors.append(whole.unflatten(1, (-1, *grad.shape[2:])))
        return tensors

    def to_tokens(self, out: Tensor) -> Tensor:
        """Bring outputs [T/R, H/U, E], or [T, H/U, E] where there are no queries, to their tokens' ranks [S, H, E]."""
        if not self.queries:
            out = out[self.plan.by_rank].unflatten(0, (-1, self.set_rows))[self.my_set]
        received = self._all_to_all(contiguous(out).unflatten(0, (self.ranks, -1)))
        return contiguous(received.transpose(0, 1)).flatten(1, 2)

    def to_tokens_backward(self, grad: Tensor) -> Tensor:
        """Send the outputs' gradients where the outputs came from; other sets' tokens get zeros there."""
        by_head = contiguous(_by_rank(grad, self.ranks))
        rows = self._all_to_all(by_head).flatten(0, 1)
        # without row sets, the rows of one set are all rows in packed order
        if self.queries or self.sets == self.mesh.row_parallel_size == 1:
            return rows
        of_sets = rows.new_zeros(self.sets, *rows.shape)
        of_sets[self.my_set] = rows
        packed = rows.new_empty(self.plan.total, *rows.shape[1:])
        packed[self.plan.by_rank] = of_sets.flatten(0, 1)
        return packed

    def _send_rows(self, tensors: Tensors) -> Tensor:
        """Write local rows of all heads to a send buffer, and return what arrives."""
        send = self._buffer(tensors[0])
        regions = self._regions(send)
        mine = regions.pop(self.my_set)
        for tensor, share, parts in zip(tensors, mine.split(self.columns, -1), self.tensors):
            columns = tensor.flatten(1).split([part.heads * part.width for part in parts], 1)
            for part, values, view in zip(parts, columns, _by_part(share, parts)):
                write_heads(view, values.unflatten(1, (part.heads, part.width)), part.layout)
        for region in regions:
            copy_strided(region, mine[..., self.query_columns :])
        return self._exchange(send)

    def _send_gradients(self, grads: Tensors) -> Tensor:
        """Write gradients of head shards to a send buffer, and return what arrives."""
        grads = [grad.flatten(1) for grad in grads]
        if self.mesh.row_parallel_size == 1:
            return self._exchange(torch.cat(grads, 1).view(-1))
        send = self._buffer(grads[0])
        if self.queries:
            query, *grads = grads
            view = self._regions(send)[self.my_set][..., : self.query_columns]
            copy_strided(view, query.unflatten(0, (self.ranks, -1)))
        for rows, part in self._arcs(send):
            for view, grad in zip(part.split(self.columns[self.queries :], 1), grads):
                copy_strided(view, grad[rows])
        return self._exchange(send)

    def _buffer(self, like: Tensor) -> Tensor:
        """Return a buffer of all rows that this rank sends, or receives."""
        count, tokens = self.mesh.sequence_parallel_size, self.plan.local_tokens
        columns = count * self.key_columns + self.ranks * self.query_columns
        return like.new_empty(tokens * columns)

    def _regions(self, buffer: Tensor) -> list[Tensor]:
        """View a buffer as what each set of ranks sends or receives [U, S, columns].

        k | v of the sets before mine    q | k | v of my set    k | v of the sets after mine
        """
        sizes = [self.set_rows * self.key_columns] * self.sets
        sizes[self.my_set] += self.set_rows * self.query_columns
        return [x.view(self.ranks, self.plan.local_tokens, -1) for x in buffer.split(sizes)]

    def _arcs(self, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the packed rows of every arc and its part [rows, columns] of a buffer, without queries."""
        held = [*chain(*self.plan.row_sets)]  # the packed rows of all ranks, in their order
        for number, region in enumerate(self._regions(buffer)):
            first = number * self.set_rows
            arcs = rows_between(held, first, first + self.set_rows)
            rows = region[..., -self.key_columns :].flatten(0, 1)
            for (a, b), part in zip(arcs, rows.split([b - a for a, b in arcs])):
                yield slice(a, b), part

    def _exchange(self, send: Tensor) -> Tensor:
        """Return the receive buffer; the send buffer is free as soon as the caller drops it."""
        tokens = self.plan.local_tokens
        near, far = (tokens * x for x in (sum(self.columns), self.key_columns))
        return self._all_to_all(send, near, far)

    def _all_to_all(self, send: Tensor, near: int = 1, far: int = 0) -> Tensor:
        """Exchange rows of the first axis: `near` with each rank of my set, and `far` with each rank of other sets.

        If all ranks are one set, they share the rows equally.
        """
        received, splits = torch.empty_like(send), None
        if self.sets > 1:
            by_set = [far] * self.sets
            by_set[self.my_set] = near
            splits = [rows for rows in by_set for _ in range(self.ranks)]
        dist.all_to_all_single(received, send, splits, splits, group=self.mesh.sp_group)
        return received


def _by_part(share: Tensor, parts: Sequence[SentPart]) -> list[Tensor]:
    """View a tensor's columns [U, S, columns] as the heads of its parts, each [U, S, key, width]."""
    views = share.split([part.columns for part in parts], -1)
    return [view.unflatten(-1, (-1, part.width)) for view, part in zip(views, parts)]


def _by_rank(values: Tensor, ranks: int) -> Tensor:
    """View [S, U * heads, E] as [U, S, heads, E]."""
    return values.unflatten(1, (ranks, -1)).transpose(0, 1)


def write_heads(part: Tensor, values: Tensor, heads: HeadLayout) -> None:
    """Write heads [S, K, E] for U ranks into part [U, S, key, E]: slot j of the U * key gets head j // repeat."""
    if heads.repeat == 1:
        copy_strided(part, _by_rank(values, len(part)))
    elif heads.key == 1:
        copy_strided(
            part.unflatten(0, (-1, heads.repeat)), values.transpose(0, 1)[:, None, :, None]
        )
    else:  # a block of query heads covers parts of several kv groups
        for slot in range(part.shape[0] * heads.key):
            copy_strided(
                part[slot // heads.key, :, slot % heads.key], values[:, slot // heads.repeat]
            )


def sum_heads(grads: Tensor, heads: HeadLayout, num_heads: int) -> Tensor:
    """Sum the copies of every head: [U, S, key, E] -> [S, K, E]."""
    slots = contiguous(grads.transpose(0, 1)).flatten(1, 2)
    return slots if heads.repeat == 1 else slots.unflatten(1, (num_heads, heads.repeat)).sum(2)
