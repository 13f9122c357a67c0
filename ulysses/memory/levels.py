"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

    hidden -project-> heads -to_heads-> shards -attend-> results -to_tokens-> rows -output-> middle -mlp-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, the results      all but the attention (and the feed-forward's last product)
    block            the layer's input                   all of that, and the attention

All levels but "none" run in layer_node.py.

Shapes: S local tokens, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ulysses.memory.offload import Offloader
from ulysses.memory.tiling import TILE_ROWS

LEVELS = ("none", "keep_attention", "block")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]


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
