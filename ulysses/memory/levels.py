"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

    hidden -project-> heads -to_heads-> shards -mix-> results -to_tokens-> rows -output-> middle -feed_forward-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, mix's results    all but mix (and feed_forward's last product)
    block            the layer's input                   the same and mix
    pair             one input for two layers            the same and the first layer's whole forward pass

All levels but "none" run in layer_node.py.

Shapes: S local tokens, D width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ulysses.memory.size import LayerSize
from ulysses.memory.tiling import TILE_ROWS
from ulysses.parallel.layout import AttentionPlan

LEVELS = ("none", "keep_attention", "block", "pair")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]
# of a module, which only a call of the module runs
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class Mixer(Protocol):
    """Mix tokens, in steps that a layer's node runs, and runs again, one by one.

    A step and its `_backward` communicate alike on all ranks of the sequence-parallel group, and record no graph;
    `project`, `mix` and `output` record one.

    has_gate: whether `output` makes a gate of the layer's input.
    """

    has_gate: bool

    @property
    def is_watched(self) -> bool:
        """Whether only a call of the module, forward(normalised rows, rope, plan), runs somebody's hook."""

    @property
    def output_is_fresh(self) -> bool:
        """Whether nobody else may hold what `output` returns."""

    @property
    def stages(self) -> tuple[Sequence[nn.Module | nn.Parameter], ...]:
        """The modules and parameters of project, of the mix itself and of output."""

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may run the mix for packs of other documents than those it was recorded with."""

    def __call__(self, x: Tensor, rope: Rope, plan: AttentionPlan) -> Tensor: ...

    def project(self, hidden: Tensor, norm: Any, rope: Rope) -> tuple[Tensor, ...]:
        """Return what is sent to the heads' ranks, one tensor of local rows each, and `hidden`, the layer's input."""

    def mix(self, *heads: Tensor, plan: AttentionPlan) -> Tensor:
        """Do to_heads, mix_forward and to_tokens in one."""

    def output(self, mixed: Tensor, hidden: Tensor, norm: Any) -> Tensor:
        """Return what the layer adds to its input [S, D], of the mix's local rows and of that input."""

    def to_heads(self, heads: Sequence[Tensor], plan: AttentionPlan) -> Sequence[Tensor]:
        """Turn local rows of all heads into whole documents of some heads, the shards."""

    def to_heads_backward(
        self, grads: Sequence[Tensor], plan: AttentionPlan
    ) -> Sequence[Tensor]:
        """Return the gradients of local rows from those of the shards."""

    def mix_forward(self, shards: Sequence[Tensor], plan: AttentionPlan) -> Sequence[Tensor]:
        """Return the output, and what backward needs besides the shards; "keep_attention" keeps both."""

    def mix_backward(
        self,
        grad: Tensor,
        shards: Sequence[Tensor],
        results: Sequence[Tensor],
        plan: AttentionPlan,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the gradients of the shards, and of the trained parameters of the mix itself."""

    def to_tokens(self, out: Tensor, plan: AttentionPlan) -> Tensor:
        """Bring the output to its tokens' ranks."""

    def to_tokens_backward(self, grad: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the gradients of local rows where the output came from."""


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
    offloader: Any = None
    offloaded_layers: int | None = None
    graphs: bool = False


def kept_bytes(level: str, layer: LayerSize, element_size: int) -> float:
    """Return the bytes that a layer's graph keeps for each local row at a level, weights aside."""
    D, mixer, feed_forward = layer.width, layer.mixer, layer.feed_forward
    kept, exact = D / 2 if level == "pair" else D, 0.0
    if level in ("none", "keep_attention"):
        kept, exact = kept + mixer.results, mixer.exact
    if level == "none":  # and between the halves
        kept += D * (1 + layer.norms_after) + mixer.kept + feed_forward.kept
        exact += feed_forward.exact
    return element_size * kept + 4 * exact


def computed_again(level: str, layer: LayerSize, is_full: bool) -> tuple[float, float]:
    """Return what backward repeats at a level: parameters that each row meets once more, and passes of the mix."""
    if level == "none":
        return 0.0, 0.0
    # the last product of the feed-forward is repeated for adapters only
    products = layer.mixer.parameters + layer.feed_forward.met * (2 / 3 if is_full else 1)
    if level == "pair":  # and the whole forward pass of every second layer
        return products + layer.met / 2, 1.5
    return products, float(level == "block")
