"""The decoder layer: a mixer and a feed-forward, in the steps that the memory levels tell apart.

    hidden -norm-> mixer: project -> to heads -> mix -> to tokens -> output -norm-> + -> middle
    middle -norm-> feed-forward -norm-> + -> hidden

Parameter names are those of transformers. The modules inside a layer hold weights for the operations of models/ops,
which read them directly: hooks on a layer are called, hooks on the modules inside it are not.

Shapes: S local tokens, D width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.families import LayerKind
from models.modules import MLP, NO_NORM, Linear, Norm, RMSNorm
from models.ops.gated_mlp import SecondHalf
from models.ops.linear import recorded, trained
from models.ops.norm import NormRule
from models.self_attention import SelfAttention
from ulysses.memory.layer_node import LayerNode, Mixer
from ulysses.memory.levels import Rope
from ulysses.memory.offload import Offloader
from ulysses.parallel.attention import AttendNode, UlyssesAttention
from ulysses.parallel.layout import AttentionPlan, Tensors


class LayerNorms(NamedTuple):
    """The norms of a layer; a family may have no norm in some of these places."""

    before_mixer: Norm
    after_mixer: Norm
    before_feed_forward: Norm
    after_feed_forward: Norm


class DecoderLayer(nn.Module):
    """One layer on this rank's tokens; ZeRO-3 gathers it as a whole.

    forward(hidden [S, D], the rotary tables (cos, sin) of its kind, plan) -> hidden [S, D]; `plan` is the batch's
    attention plan. `record` is the RouterRecord of a model with experts.

    recompute: the level. mlp_tile: the rows of a feed-forward's tile. offloader: what moves the saved tensors to the
    host, if anything does. The decoder's `set_memory` sets all three.
    """

    recompute: str
    mlp_tile: int
    offloader: Offloader | None

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        attention: UlyssesAttention,
        quantize: str,
        record: Any,
    ) -> None:
        super().__init__()
        family = config.family
        self.kind, self.multiplier = kind, config.multipliers.residual_multiplier
        self.rule = NormRule(config.rms_norm_eps, family.centred_norms)
        linear: type[Linear] = Linear
        if quantize != "none":
            from models.quantized import QuantizedLinear

            linear = QuantizedLinear
        if kind.mixer == "linear_attention":
            from models.delta import GatedDelta

            self.linear_attn = GatedDelta(config, attention, linear)
        else:
            self.self_attn = SelfAttention(config, attention, linear)
        self.mlp: Any
        if kind.feed_forward == "experts":
            from models.moe import MoE

            self.mlp = MoE(config, linear, record)
        else:
            self.mlp = MLP(config, linear)
        norms: list[Norm] = [
            RMSNorm(config.hidden_size, self.rule) if name else NO_NORM for name in family.norms
        ]
        for name, norm in zip(family.norms, norms):
            if name:
                self.register_module(name, norm)
        self.norms = LayerNorms(*norms)  # a tuple, so that the modules keep these names alone

    @property
    def trained_parameters(self) -> Tensors:
        """The trained parameters, adapters included."""
        return trained([*self.parameters()])

    @property
    def mixer(self) -> Mixer:
        """The part that mixes tokens, whose steps ulysses/memory/layer_node.py describes."""
        is_linear = self.kind.mixer == "linear_attention"
        return self.linear_attn if is_linear else self.self_attn  # type: ignore[return-value]

    def forward(self, hidden: Tensor, rope: Rope, plan: AttentionPlan) -> Tensor:
        learns = torch.is_grad_enabled()
        if learns and self.recompute != "none":
            return LayerNode.apply(self, rope, plan, hidden, *self.trained_parameters)
        *heads, hidden = self.project(hidden, rope)
        attention, parameters = self.mixer.attention, self.mixer.attention_parameters
        # no variable here keeps the output of the attention alive
        middle = self.output(hidden, AttendNode.apply(attention, plan, *heads, *parameters))
        del heads
        half = self.second_half
        return recorded(half, middle)[0] if learns else half.add_tiles(middle)

    def project(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return the tensors that the mixer sends to the heads' ranks, and the layer's input, for `output`."""
        return self.mixer.project(hidden, self.norms.before_mixer, rope)

    def output(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Add the mixer's output to the layer's input."""
        norms = self.norms
        out = norms.after_mixer(self.mixer.output(mixed, hidden, norms.before_mixer))
        if self.multiplier != 1:
            out = out * self.multiplier
        return out.add_(hidden)

    @property
    def second_half(self) -> SecondHalf:
        """What adds the feed-forward's output to the rows; each row is independent, so it can run in tiles."""
        norms = self.norms
        before, after = norms.before_feed_forward.weight, norms.after_feed_forward.weight
        return SecondHalf(
            norm=before,
            feed_forward=self.mlp.fused(),
            after=after,
            tensors=trained([before, *self.mlp.parameters(), after]),
            rule=self.rule,
            factor=self.multiplier,
            tile=self.mlp_tile * self.mlp.tile_factor,
        )
