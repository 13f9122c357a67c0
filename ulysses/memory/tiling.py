"""Row-wise work in tiles: the memory of one tile, two forwards per step.

    forward:   rows [S, D] --tile by tile, no graph--> out [S, D]          (kept: the input only)
    backward:  for each tile: forward with graph, its gradients at once    (weight gradients summed in float32)

Tile counts may differ between ranks: nothing in a tile communicates, the module's parameters are gathered once around
the whole call. The tile calls the module's own forward, so adapters inside it work.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

RowFunction = Callable[[Tensor], Tensor]
RowGradients = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class TilingOptions:
    """Say how a layer's work is cut to bound its memory.

    mlp_rows: rows of one MLP tile; 0 = never tile; "auto" = tiles of `auto_rows` once there are more than twice as many
    rows, because short ones lose nothing by running whole, and none where backward would have nothing to run again.
    head_chunks: groups of heads that are exchanged and attended to one after the other; 1 = all at once. It must divide
    the kv heads, and the ranks that share heads must divide a group's query heads.
    """

    mlp_rows: int | Literal["auto"] = "auto"
    auto_rows: int = 8192
    head_chunks: int = 1

    def __post_init__(self) -> None:
        if self.mlp_rows != "auto" and (not isinstance(self.mlp_rows, int) or self.mlp_rows < 0):
            raise ValueError(
                f'mlp_rows is {self.mlp_rows!r} but must be "auto", 0 (never tile) or a number of rows'
            )
        if self.head_chunks < 1:
            raise ValueError(
                f"head_chunks is {self.head_chunks} but must be at least 1, which attends to all heads at once"
            )

    def check_heads(self, num_heads: int, num_kv_heads: int, head_parallel_size: int) -> None:
        """Refuse a number of head chunks that the heads or the ranks cannot be split into."""
        fitting = head_chunk_counts(num_heads, num_kv_heads, head_parallel_size)
        if self.head_chunks not in fitting:
            raise ValueError(
                f"head_chunks is {self.head_chunks}, but {num_heads} query and {num_kv_heads} kv heads on "
                f"{head_parallel_size} ranks can be cut into {', '.join(map(str, fitting))}; set one of these"
            )

    def rows(self, total: int, level: str = "") -> int:
        """Return the rows of one tile for `total` rows, in equal tiles; `total` itself means one tile.

        `level` is the layer's recompute level, if there will be a backward: at "none" a tile's forward runs twice, at the
        others it does so anyway.
        """
        limit = self.mlp_rows
        if limit == "auto":
            limit = self.auto_rows if total > 2 * self.auto_rows and level != "none" else 0
        if limit == 0 or total <= limit:
            return total
        return -(-total // -(-total // limit))


def head_chunk_counts(
    num_heads: int, num_kv_heads: int, head_parallel_size: int
) -> tuple[int, ...]:
    """Return the numbers of equal head groups that kv heads and ranks allow, the fewest first."""
    counts = range(1, num_kv_heads + 1)
    return tuple(
        c for c in counts if num_kv_heads % c == 0 and (num_heads // c) % head_parallel_size == 0
    )


def tiles(total: int, rows: int) -> Iterator[slice]:
    """Yield the row slices; one empty slice if there are no rows, so that the module still runs."""
    for start in range(0, max(total, 1), max(rows, 1)):
        yield slice(start, min(start + rows, total))


def run_tiles(function: RowFunction, rows: Tensor, tile_rows: int) -> Tensor:
    """Return function(rows), computed in tiles, without a graph."""
    with torch.no_grad():
        if tile_rows >= rows.shape[0]:
            return function(rows)
        out = torch.empty_like(rows)
        for part in tiles(rows.shape[0], tile_rows):
            out[part] = function(rows[part])
        return out


def tile_gradients(
    function: RowFunction,
    rows: Tensor,
    grad: Tensor,
    parameters: Sequence[nn.Parameter],
    tile_rows: int,
) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward of each tile; return the gradients of `rows` and of `parameters`.

    Several tiles' parameter gradients are summed in float32 or better. A parameter that the function did not use gets
    zeros.
    """
    if tile_rows >= rows.shape[0]:
        return _tile(function, rows, grad, parameters)
    grad_rows = torch.empty_like(rows)
    sums: list[Tensor] = []
    for part in tiles(rows.shape[0], tile_rows):
        grad_rows[part], grads = _tile(function, rows[part], grad[part], parameters)
        if not sums:
            sums = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        else:
            for total, g in zip(sums, grads):
                total.add_(g)
    return grad_rows, [total.to(p.dtype) for total, p in zip(sums, parameters)]


def _tile(
    function: RowFunction, rows: Tensor, grad: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        out = function(leaf)
    grad_rows, *grads = torch.autograd.grad(
        out, (leaf, *parameters), grad, allow_unused=True, materialize_grads=True
    )
    return grad_rows, grads


def tiled(
    run: RowFunction, gradients: RowGradients, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """Return run(rows) with a graph that keeps only `rows`.

    gradients(rows, grad) -> (gradient of rows, those of `parameters`); both work in tiles and record no graph.
    """
    return _Tiled.apply(run, gradients, rows, *parameters)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: RowFunction, gradients: RowGradients, rows: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.gradients = gradients
        return run(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grads = ctx.gradients(*ctx.saved_tensors, grad)
        return None, None, grad_rows, *grads
