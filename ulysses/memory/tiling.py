"""Row-wise work in tiles of rows, so that only one tile's intermediate results are in memory.

    forward:   rows [S, D] --tile by tile, no graph--> rows + out [S, D]
    backward:  for each tile: what its gradients need of forward, then these (models/ops/gated_mlp.py)

Ranks may have different numbers of tiles: nothing inside a tile communicates, and the module's parameters are gathered
once around the whole call.

Shapes: S local tokens, D width.
"""

from collections.abc import Iterator

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
