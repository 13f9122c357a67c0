"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

    hidden -project-> heads -to_heads-> shards -mix-> results -to_tokens-> rows -output-> middle -feed_forward-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, mix's results    all but mix (and feed_forward's last product)
    block            the layer's input                   the same and mix

All levels but "none" run in layer_node.py.

Shapes: S local tokens, D width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ulysses.memory.tiling import TILE_ROWS

if TYPE_CHECKING:
    from ulysses.memory.offload import Offloader

LEVELS = ("none", "keep_attention", "block")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]


class LayerMemory(NamedTuple):
    """Say what the model keeps for backward and how it is cut.

    recompute: one level for all layers or one per layer, the same on all ranks. mlp_tile: rows of an MLP that run at a
    time if there are more than twice as many, except where level "none" keeps its whole graph. offloaded_layers: so
    many of the first layers, or all, keep their saved tensors in host memory if there is an offloader; level "none"
    ignores it. graphs: small steps run as CUDA graphs (memory/graphs.py), which need level "none" and weights that
    stay.
    """

    recompute: str | Sequence[str] = "none"
    mlp_tile: int = TILE_ROWS
    offloader: "Offloader | None" = None
    offloaded_layers: int | None = None
    graphs: bool = False
