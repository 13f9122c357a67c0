"""Row-wise work in tiles of rows, so that only one tile's intermediate results are in memory.

    forward:   rows [S, D] --tile by tile, no graph--> rows + out [S, D]
    backward:  for each tile: forward with a graph, then its gradients

Ranks may have different numbers of tiles: nothing inside a tile communicates, and the module's parameters are gathered
once around the whole call. A tile calls the module's own forward, so adapters inside it work.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from losses.precision import at_least_float32
from ulysses.parallel.layout import Tensors

TILE_ROWS = 8192
EXPERT_TILES = 4  # times as many rows where there are experts, because every tile makes gradients of all experts


def tile_rows(total: int, limit: int = TILE_ROWS) -> int:
    """Return the rows of one of `total`'s equal tiles, at most `limit`.

    Short sequences lose nothing by running whole, so up to twice as many rows are one tile.
    """
    return total if total <= 2 * limit else -(-total // -(-total // limit))


def tiles(total: int, rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows; one empty slice if there are no rows, so that the module still runs."""
    for start in range(0, max(total, 1), max(rows, 1)):
        yield slice(start, min(start + rows, total))


@torch.no_grad()
def add_by_tiles(function: Callable[[slice], Tensor], rows: Tensor, tile: int) -> Tensor:
    """Return rows + function(part) for the slice of every tile, without a graph."""
    if tile >= len(rows):
        return rows + function(slice(0, len(rows)))
    out = torch.empty_like(rows)
    for part in tiles(len(rows), tile):
        torch.add(rows[part], function(part), out=out[part])
    return out


def tile_gradients(
    function: Callable[[Tensor], Tensor],
    rows: Tensor,
    grad: Tensor,
    parameters: Tensors,
    tile: int,
) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward of each tile; return the gradients of `rows` and of `parameters`.

    Parameters that are not used get zeros; sums as in `sum_tiles`.
    """

    def of_tile(part: slice) -> Tensors:
        leaf = rows[part].detach().requires_grad_()
        with torch.enable_grad():
            out = function(leaf)
        return torch.autograd.grad(
            out, (leaf, *parameters), grad[part], allow_unused=True, materialize_grads=True
        )

    return sum_tiles(of_tile, rows, parameters, tile)


def sum_tiles(
    gradients: Callable[[slice], Tensors],
    rows: Tensor,
    parameters: Tensors,
    tile: int,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `rows` and of `parameters`.

    `gradients` returns those of one tile, the rows' first. Parameter gradients of several tiles are summed in float32
    or better.
    """
    sums: list[Tensor] = []
    for part in tiles(len(rows), tile):
        grad_part, *grads = gradients(part)
        if tile >= len(rows):
            grad_rows, sums = grad_part, grads
            break
        if part.start == 0:
            grad_rows, sums = torch.empty_like(rows), [at_least_float32(g) for g in grads]
        else:
            for total, g in zip(sums, grads):
                total.add_(g)
        del grads
        grad_rows[part] = grad_part
    return grad_rows, [total.to(p.dtype) for total, p in zip(sums, parameters)]
