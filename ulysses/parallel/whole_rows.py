"""The all-to-alls of layers that run over whole documents, head by head: recurrences.

    rank 0  tokens 0..S-1     [ S, all heads ]  --+-->  rank 0  all tokens  [ T, half of the heads ]
    rank 1  tokens S..2S-1    [ S, all heads ]  --+-->  rank 1  all tokens  [ T, half of the heads ]

One exchange carries all parts of a layer's rows, for example queries, keys and values, whose heads may have different
widths and numbers. U = gcd(P, value heads) ranks split the heads; in attention it may be another number. The P / U sets
of U ranks do the same work, and each set returns the outputs of its own ranks' tokens. A key head that several ranks
need travels to each of them.

Letters: T packed tokens, S tokens on this rank, P sequence-parallel ranks, U ranks that split the heads.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import (
    all_to_all,
    exchange_out_backward,
    exchange_out_forward,
    sum_heads,
    write_heads,
)
from .layout import AttentionPlan, head_layout


class HeadExchange:
    """Split the heads of rows over the ranks of a plan; `parts` gives the number of heads and their width of each part.

    The part with most heads holds the value heads. Another part has as many heads, or fewer: key heads, each of which
    serves several value heads.

    widths: the columns of every part on one rank after the exchange.
    """

    def __init__(self, parts: Sequence[tuple[int, int]], plan: AttentionPlan) -> None:
        self.plan, self.mesh, self.heads = plan, plan.mesh, [heads for heads, _ in parts]
        values, ranks = max(self.heads), self.mesh.sequence_parallel_size
        self.ranks = math.gcd(ranks, values)
        self.my_set, self.my_block = divmod(self.mesh.sp_rank, self.ranks)
        self.layouts = [head_layout(values, heads, self.ranks) for heads in self.heads]
        self.widths = [layout.key * width for layout, (_, width) in zip(self.layouts, parts)]
        # the first axes of a send buffer
        self.sizes = ranks // self.ranks, self.ranks, plan.local_tokens

    def my_columns(self, columns: Tensor, part: int) -> Tensor:
        """Return this rank's columns, or heads, of a tensor that has all those of a part along axis 0; with a graph."""
        if self.ranks == 1:
            return columns
        layout = self.layouts[part]
        slots = torch.arange(layout.key, device=columns.device) + self.my_block * layout.key
        return columns.unflatten(0, (self.heads[part], -1))[slots // layout.repeat].flatten(
            0, 1
        )

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Send the parts of local rows [S, columns] to the ranks of their heads; return packed rows [T, sum of widths].

        All ranks of the group call it together, and its adjoint too.
        """
        send = parts[0].new_empty(*self.sizes, sum(self.widths))
        views = send[0].split(self.widths, -1)
        for view, part, heads, layout in zip(views, parts, self.heads, self.layouts):
            view = view.unflatten(-1, (layout.key, -1))
            write_heads(view, part.unflatten(1, (heads, -1)), layout)
        send[1:] = send[0]
        received = all_to_all(send, self.mesh, self.mesh.sequence_parallel_size)
        return self._packed(received.flatten(0, 2))

    def to_heads_backward(self, grad: Tensor) -> list[Tensor]:
        """Bring gradients of packed rows back to local rows, part by part; those of a key head's copies are summed."""
        send = self._by_rank(grad)
        received = all_to_all(send, self.mesh, self.mesh.sequence_parallel_size)
        sets = received.view(*self.sizes, -1)
        wide = torch.promote_types(sets.dtype, torch.float32)
        total = sets[0] if len(sets) == 1 else sets.sum(0, dtype=wide)
        views = total.split(self.widths, -1)
        return [
            sum_heads(view.unflatten(-1, (layout.key, -1)), layout, heads)
            .flatten(1)
            .to(grad.dtype)
            for view, heads, layout in zip(views, self.heads, self.layouts)
        ]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Bring outputs [T, my heads, V] back to their tokens' ranks [S, heads, V]."""
        rows = self._by_rank(out).unflatten(0, (self.sizes[0], -1))[self.my_set]
        return exchange_out_forward(rows, self.plan, self.ranks)

    def to_tokens_backward(self, grad: Tensor) -> Tensor:
        """Send the outputs' gradients where the outputs came from; other sets' tokens get zeros here."""
        mine = exchange_out_backward(grad, self.plan, self.ranks)
        if self.sizes[0] == 1:
            return self._packed(mine)
        rows = mine.new_zeros(self.sizes[0], *mine.shape)
        rows[self.my_set] = mine
        return self._packed(rows.flatten(0, 1))

    def _packed(self, rows: Tensor) -> Tensor:
        """Put rows [T, ...] of all ranks, one after the other, into packed order."""
        if self.mesh.row_parallel_size == 1:
            return rows
        packed = torch.empty_like(rows)
        packed[self.plan.by_rank] = rows
        return packed

    def _by_rank(self, packed: Tensor) -> Tensor:
        """Put packed rows [T, ...] into the order of the ranks that hold them."""
        return packed[self.plan.by_rank].contiguous()
