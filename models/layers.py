"""The decoder layer: a mixer and a feed-forward, each of a kind, in the stages that the memory levels know.

    hidden -norm-> mixer: project -> to heads -> mix -> to tokens -> output -norm-> + -> middle
    middle -norm-> feed-forward -norm-> + -> hidden

Parameter names are those of transformers. The modules inside hold weights for the operations of models/ops: hooks see a
layer's calls, but not those of what is inside it.

Shapes: S local tokens, D width.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.arch import LayerKind, ModelConfig
from models.modules import MLP, NO_NORM, Linear, MakeLinear, Norm, RMSNorm
from models.ops.gated_mlp import GatedMLP
from models.ops.norm import NormRule
from models.self_attention import SelfAttention
from ulysses.memory.levels import Rope
from ulysses.memory.tiling import tile_rows
from ulysses.parallel.attention import UlyssesAttention
from ulysses.parallel.layout import AttentionPlan

if TYPE_CHECKING:
    from models.moe import MoE, RouterRecord
    from models.ops.experts import SparseMLP
    from ulysses.memory.layer_node import Mixer
    from ulysses.memory.offload import Offloader


class DecoderLayer(nn.Module):
    """One layer on this rank's tokens; ZeRO-3 gathers it as a whole.

    forward(hidden [S, D], the tables (cos, sin) of its kind, plan) -> hidden [S, D]; `plan` is the batch's attention
    plan. `set_memory` says what its graph keeps, before the first forward.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        attention: UlyssesAttention,
        quantize: str,
        record: "RouterRecord | None",
    ) -> None:
        super().__init__()
        family = config.family
        self.kind, self.norm_names = kind, family.norms
        self.multiplier = config.multipliers.residual_multiplier
        self.rule = NormRule(config.rms_norm_eps, family.centred_norms)
        linear: MakeLinear = Linear
        if quantize != "none":
            from models.quantized import QuantizedLinear

            linear = QuantizedLinear
        mixer, feed_forward = _classes(kind)
        self.mixer_name = "self_attn" if mixer is SelfAttention else "linear_attn"
        self.register_module(self.mixer_name, mixer(config, attention, linear))
        of_experts = () if feed_forward is MLP else (record, quantize != "none")
        self.mlp: MLP | MoE = feed_forward(config, linear, *of_experts)
        for name in filter(None, family.norms):
            self.register_module(name, RMSNorm(config.hidden_size, self.rule))

    def set_memory(self, recompute: str, mlp_tile: int, offloader: "Offloader | None") -> None:
        """Set the level, the rows of a feed-forward's tile, and where what is kept waits, if not on the GPU."""
        self.recompute, self.mlp_tile, self.offloader = recompute, mlp_tile, offloader

    @property
    def mixer(self) -> "Mixer":
        """The part that mixes tokens, whose steps ulysses/memory/layer_node.py describes."""
        return getattr(self, self.mixer_name)  # type: ignore[no-any-return]

    @property
    def norms(self) -> list[Norm]:
        """The norms before and after the mixer and before and after the feed-forward."""
        return [getattr(self, name) if name else NO_NORM for name in self.norm_names]

    def forward(self, hidden: Tensor, rope: Rope, plan: AttentionPlan) -> Tensor:
        learns = torch.is_grad_enabled()
        if learns and self.recompute != "none":
            from ulysses.memory.layer_node import LayerNode

            parameters = [p for stage in self.stage_parameters() for p in stage]
            return LayerNode.apply(self, rope, plan, hidden, *parameters)
        *heads, hidden = self.project(hidden, rope)
        middle = self.output(hidden, self.mixer.mix(*heads, plan=plan))
        return self.feed_forward(middle) if learns else self.feed_forward_tiles(middle)

    def project(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return what the mixer sends to the heads' ranks, and the layer's input, for `output`."""
        return self.mixer.project(hidden, self.norms[0], rope)

    def output(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Add what the mixer makes of its rows to the layer's input."""
        (before, after, *_), mixer = self.norms, self.mixer
        out = mixer.output(mixed, hidden, before)
        if after is NO_NORM and self.multiplier == 1:
            return out.add_(hidden)
        return self._add(hidden, out, after)

    def _add(self, hidden: Tensor, out: Tensor, after: Norm) -> Tensor:
        out = after(out)
        return hidden + out if self.multiplier == 1 else hidden + self.multiplier * out

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the feed-forward of the rows; each row is independent, so it can run in tiles."""
        if isinstance(fused := self._fused(), GatedMLP):
            return fused.add(hidden)
        return hidden + self.mlp(self.norms[2](hidden))

    def feed_forward_tiles(self, rows: Tensor) -> Tensor:
        """Run `feed_forward` in tiles, without a graph."""
        return self._fused().add_tiles(rows, self._tile(rows))

    def feed_forward_gradients(self, rows: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile; return the gradients of `rows` and of `stage_parameters()[3]`."""
        return self._fused().gradients(rows, grad, self._tile(rows))

    def _tile(self, rows: Tensor) -> int:
        return tile_rows(len(rows), self.mlp_tile * self.mlp.tile_factor)

    def _fused(self) -> "GatedMLP | SparseMLP":
        """Return the operation that does what the second half's modules do."""
        *_, before, after = self.norms
        return self.mlp.fused(before, after, self.rule, self.multiplier)

    def stage_parameters(self) -> tuple[list[nn.Parameter], ...]:
        """Return the trained parameters of project, mix, output and feed_forward, adapters included.

        What two of them use, because `output` makes a gate of the layer's input, is in both.
        """
        before, after, *around = self.norms
        project, mix, output = self.mixer.stages
        gated = before if self.mixer.has_gate else NO_NORM
        stages = (
            (before, *project),
            mix,
            (gated, *output, after),
            (around[0], self.mlp, around[1]),
        )
        return tuple(
            [p for part in stage for p in _parameters(part) if p.requires_grad]
            for stage in stages
        )


def _classes(kind: LayerKind) -> tuple[Any, Any]:
    """Return the classes of a layer's mixer and feed-forward; the rarer ones are imported when asked for."""
    mixer: type = SelfAttention
    feed_forward: type = MLP
    if kind.mixer == "linear_attention":
        from models.delta import GatedDelta

        mixer = GatedDelta
    if kind.feed_forward == "experts":
        from models.moe import MoE

        feed_forward = MoE
    return mixer, feed_forward


def _parameters(part: nn.Module | nn.Parameter) -> Iterable[nn.Parameter]:
    return part.parameters() if isinstance(part, nn.Module) else [part]
