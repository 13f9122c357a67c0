"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

    hidden -project-> heads -to_heads-> shards -attend-> results -to_tokens-> rows -output-> middle -mlp-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, the results      all but the attention (and the feed-forward's last product)
    block            the layer's input                   all of that, and the attention

All levels but "none" run in layer_node.py. Work on rows, such as a feed-forward, runs there in tiles, so that only one
tile's intermediate results are in memory:

    forward          rows [S, D] --tile by tile, no graph--> rows + out [S, D]
    backward         for each tile: what its gradients need of forward, then these (models/ops/gated_mlp.py)

Ranks may have different numbers of tiles: nothing inside a tile communicates, and the module's parameters are gathered
once around the whole call.

Shapes: S local tokens, D width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ulysses.memory.offload import Offloader

LEVELS = ("none", "keep_attention", "block")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]
TILE_ROWS = 8192
EXPERT_TILES = 4  # times as many rows where there are experts, because every tile makes gradients of all experts


class LayerMemory(NamedTuple):
    """What the layers of a model keep for backward, where, and in which tiles they run.

    recompute: one level for all layers or one per layer, the same on all ranks. mlp_tile: rows of an MLP that run at a
    time if there are more than twice as many, except where level "none" keeps its whole graph. offloader: moves what
    the layers keep to host memory. offloaded_layers: how many of the first layers it does that for, None for all; level
    "none" ignores it. graphs: small steps run as CUDA graphs (memory/graphs.py), which need level "none" and weights
    that stay in their places.
    """

    recompute: str | Sequence[str] = "none"
    mlp_tile: int = TILE_ROWS
    offloader: Offloader | None = None
    offloaded_layers: int | None = None
    graphs: bool = False


def tile_rows(total: int, limit: int) -> int:
    """Return the rows of one of `total`'s equal tiles, at most `limit`.

    Short sequences lose nothing by running whole, so up to twice as many rows are one tile.
    """
    if total <= 2 * limit:
        return total
    count = -(-total // limit)
    return -(-total // count)


def tiles(total: int, rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows; one empty slice if there are no rows, so that the module still runs."""
    for start in range(0, max(total, 1), max(rows, 1)):
        yield slice(start, min(start + rows, total))
