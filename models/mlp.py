"""The dense MLP as the feed-forward of a layer.

Shapes: S rows, D width, F feed-forward width.
"""

from torch import Tensor, nn

from models.arch import ModelConfig
from models.modules import MakeLinear, RMSNorm
from models.ops.activation import ActivateNode
from models.ops.gated_mlp import GatedMLP
from models.ops.norm import NormRule
from models.ops.plain import is_plain, is_watched


class MLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)) for rows [S, D]."""

    tile_factor, is_capturable = 1, True

    def __init__(self, config: ModelConfig, linear: MakeLinear) -> None:
        super().__init__()
        D = config.hidden_size
        F = config.intermediate_size
        self.gate_proj = linear(D, F, bias=False)
        self.up_proj = linear(D, F, bias=False)
        self.down_proj = linear(F, D, bias=False)
        self.activation = config.family.activation
        self.rule = NormRule(config.rms_norm_eps, config.family.centred_norms)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            ActivateNode.apply(self.gate_proj(x), self.up_proj(x), self.activation)
        )

    def fused(self, norm: RMSNorm | None) -> GatedMLP | None:
        """Return the operation that may stand in for the norm and this module, if one may."""
        first = [] if norm is None else [norm]
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if is_watched(self) or not is_plain(*first, gate, up, down):
            return None
        scale = None if norm is None else norm.weight
        return GatedMLP(scale, gate.weight, up.weight, down.weight, self.rule, self.activation)
