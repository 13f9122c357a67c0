"""Row-wise work in tiles of rows, so that only one tile's intermediate results are in memory.

    forward:   rows [S, D] --tile by tile, no graph--> out [S, D]
    backward:  for each tile: forward with a graph, then its gradients     (weight gradients are summed in float32)

Ranks may have different numbers of tiles: nothing inside a tile communicates, and the module's parameters are gathered
once around the whole call. A tile calls the module's own forward, so adapters inside it work.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

# short sequences lose nothing by running whole, so "auto" cuts from twice as many rows on
AUTO_ROWS = 8192

RowFunction = Callable[[Tensor], Tensor]
TileRows = int | Literal["auto"]


def tile_rows(total: int, limit: TileRows = "auto") -> int:
    """Return the rows of one tile if `total` rows are cut into equal tiles of at most `limit`; 0 means no limit."""
    if limit == "auto":
        limit = AUTO_ROWS if total > 2 * AUTO_ROWS else 0
    if limit == 0 or total <= limit:
        return total
    return -(-total // -(-total // limit))


def tiles(total: int, rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows; one empty slice if there are no rows, so that the module still runs."""
    for start in range(0, max(total, 1), max(rows, 1)):
        yield slice(start, min(start + rows, total))


@torch.no_grad()
def run_tiles(function: RowFunction, rows: Tensor, tile: int) -> Tensor:
    """Return function(rows), computed in tiles of `tile` rows, without a graph."""
    if tile >= rows.shape[0]:
        return function(rows)
    out = torch.empty_like(rows)
    for part in tiles(rows.shape[0], tile):
        out[part] = function(rows[part])
    return out


def tile_gradients(
    function: RowFunction,
    rows: Tensor,
    grad: Tensor,
    parameters: Sequence[nn.Parameter],
    tile: int,
) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward of each tile; return the gradients of `rows` and of `parameters`.

    Parameter gradients of several tiles are summed in float32 or better; parameters that are not used get zeros.
    """
    if tile >= rows.shape[0]:
        return _tile_gradients(function, rows, grad, parameters)
    grad_rows = torch.empty_like(rows)
    sums: list[Tensor] = []
    for part in tiles(rows.shape[0], tile):
        grad_rows[part], grads = _tile_gradients(function, rows[part], grad[part], parameters)
        if not sums:
            sums = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        else:
            for total, g in zip(sums, grads):
                total.add_(g)
    return grad_rows, [total.to(p.dtype) for total, p in zip(sums, parameters)]


def _tile_gradients(
    function: RowFunction, rows: Tensor, grad: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        out = function(leaf)
    grad_rows, *grads = torch.autograd.grad(
        out, (leaf, *parameters), grad, allow_unused=True, materialize_grads=True
    )
    return grad_rows, grads
