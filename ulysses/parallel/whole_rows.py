"""The all-to-alls of layers that run over whole documents, head by head: recurrences.

    rank 0  tokens 0..S-1     [ S, all heads ]  --+-->  rank 0  all tokens  [ T, half of the heads ]
    rank 1  tokens S..2S-1    [ S, all heads ]  --+-->  rank 1  all tokens  [ T, half of the heads ]

One exchange carries all tensors of a layer, whose heads may have different widths and numbers. U = gcd(P, value heads)
ranks split the heads, which need not be as many as split those of attention; the P / U sets of U ranks then do the same
work, and each brings the outputs of its own ranks' tokens back. A key head that several ranks need travels to each.

Letters: T packed tokens, S tokens on this rank, P sequence-parallel ranks, U ranks that split the heads.
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import dense, sum_heads, write_heads
from .layout import AttentionPlan, HeadLayout, count_rows, head_layout


class RowHeads:
    """Split `value_heads`, and the `key_heads` that they need, over the ranks of a plan.

    own_values, own_keys: the heads of one rank after the exchange; place: which block of them is this rank's.
    """

    def __init__(self, key_heads: int, value_heads: int, plan: AttentionPlan) -> None:
        self.plan, self.ranks = plan, math.gcd(plan.mesh.sequence_parallel_size, value_heads)
        self.keys = head_layout(value_heads, key_heads, self.ranks)
        self.values = HeadLayout(self.keys.query, self.keys.query, 1)
        self.key_heads, self.place = key_heads, plan.mesh.sp_rank % self.ranks

    @staticmethod
    def own_heads(degree: int, key_heads: int, value_heads: int) -> tuple[int, int, int]:
        """Return how many key and value heads each of so many ranks has, and how many ranks split them."""
        ranks = math.gcd(degree, value_heads)
        layout = head_layout(value_heads, key_heads, ranks)
        return layout.key, layout.query, ranks

    def own(self, per_head: Tensor, *, keys: bool = False) -> Tensor:
        """Return this rank's part of a tensor whose first axis counts heads; with a graph."""
        layout = self.keys if keys else self.values
        slots = torch.arange(layout.key * self.ranks).view(self.ranks, -1)[self.place]
        return per_head[(slots // layout.repeat).to(per_head.device)]

    def _views(self, buffer: Tensor, widths: Sequence[int], count: int) -> list[Tensor]:
        """View a buffer [..., w] as its parts [..., heads, E], of which the first `count` are of key heads."""
        heads = [(self.keys if i < count else self.values).key for i in range(len(widths))]
        parts = buffer.split([n * width for n, width in zip(heads, widths)], -1)
        return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads)]

    def to_heads(self, parts: Sequence[Tensor], count: int) -> list[Tensor]:
        """Send parts [S, heads, E], of which the first `count` have key heads, where they are needed.

        Returns [T, own heads, E] of each, views of one tensor in their order. All ranks of the group call it together,
        and its adjoint too.
        """
        plan, P = self.plan, self.plan.mesh.sequence_parallel_size
        widths = [part.shape[-1] for part in parts]
        width = sum(
            (self.keys if i < count else self.values).key * w for i, w in enumerate(widths)
        )
        send = parts[0].new_empty(P // self.ranks, self.ranks, plan.local_tokens, width)
        for i, (view, part) in enumerate(zip(self._views(send[0], widths, count), parts)):
            write_heads(view, part, self.keys if i < count else self.values)
        send[1:] = send[0]
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=plan.mesh.sp_group)
        return self._views(self._packed(received.view(-1, width)), widths, count)

    def to_heads_backward(self, grads: Sequence[Tensor], count: int) -> list[Tensor]:
        """Bring gradients [T, own heads, E] back to [S, heads, E]; those of a key head's copies are summed."""
        plan, P = self.plan, self.plan.mesh.sequence_parallel_size
        widths = [grad.shape[-1] for grad in grads]
        send = self._by_rank(torch.cat([grad.flatten(1) for grad in grads], 1))
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=plan.mesh.sp_group)
        sets = received.view(P // self.ranks, self.ranks, plan.local_tokens, -1)
        wide = torch.promote_types(sets.dtype, torch.float32)
        total = sets[0] if len(sets) == 1 else sets.sum(0, dtype=wide)
        views = self._views(total, widths, count)
        key_heads = [self.key_heads] * count + [self.values.key * self.ranks] * len(views)
        return [
            sum_heads(view, self.keys if i < count else self.values, heads).to(grad.dtype)
            for i, (view, grad, heads) in enumerate(zip(views, grads, key_heads))
        ]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Bring outputs [T, own heads, V] back to their tokens' ranks [S, heads, V]."""
        rows = self._by_rank(out).view(-1, self.ranks, self.plan.local_tokens, *out.shape[1:])
        received = self._within_set(rows[self._set])
        return dense(received.transpose(0, 1)).flatten(1, 2)

    def to_tokens_backward(self, grad: Tensor) -> Tensor:
        """Send the outputs' gradients where the outputs came from; those of other sets' tokens are zeros here."""
        mine = grad.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        received = self._within_set(dense(mine))
        sets = self.plan.mesh.sequence_parallel_size // self.ranks
        rows = received.new_zeros(sets, *received.shape)
        rows[self._set] = received
        return self._packed(rows.flatten(0, 2))

    @property
    def _set(self) -> int:
        return self.plan.mesh.sp_rank // self.ranks

    def _within_set(self, send: Tensor) -> Tensor:
        """Exchange [U, ...] with the ranks of this one's set; the others get nothing, but take part."""
        mesh = self.plan.mesh
        send, ranks = send.contiguous(), range(mesh.sequence_parallel_size)
        received = torch.empty_like(send)
        splits = [int(rank // self.ranks == self._set) for rank in ranks]
        dist.all_to_all_single(received, send, splits, splits, group=mesh.sp_group)
        return received

    def _packed(self, rows: Tensor) -> Tensor:
        """Put rows [T, ...] of all ranks, one after the other, into packed order."""
        if self.plan.mesh.row_parallel_size == 1:
            return rows
        arcs, found = [*chain(*self.plan.pieces)], torch.empty_like(rows)
        for (start, end), part in zip(arcs, rows.split([count_rows([arc]) for arc in arcs])):
            found[start:end] = part
        return found

    def _by_rank(self, packed: Tensor) -> Tensor:
        """Put packed rows [T, ...] into the order of the ranks that hold them."""
        if self.plan.mesh.row_parallel_size == 1:
            return packed.contiguous()
        return torch.cat([packed[start:end] for start, end in chain(*self.plan.pieces)])
