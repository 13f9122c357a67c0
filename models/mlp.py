"""The dense MLP as the feed-forward of a layer.

Shapes: S rows, D width, F feed-forward width.
"""

from torch import Tensor, nn

from models.arch import ModelConfig
from models.modules import MakeLinear, Norm
from models.ops.activation import ActivateNode
from models.ops.gated_mlp import GatedMLP
from models.ops.norm import NormRule
from models.ops.plain import is_plain, is_watched
from ulysses.memory.size import FeedForwardSize, Setting


class MLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)) for rows [S, D]."""

    tile_factor, is_capturable = 1, True

    def __init__(
        self, config: ModelConfig, linear: MakeLinear, width: int | None = None
    ) -> None:
        super().__init__()
        D, F = config.hidden_size, width or config.intermediate_size
        self.gate_proj = linear(D, F, bias=False)
        self.up_proj = linear(D, F, bias=False)
        self.down_proj = linear(F, D, bias=False)
        self.activation = config.family.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            ActivateNode.apply(self.gate_proj(x), self.up_proj(x), self.activation)
        )

    def fused(self, norm: Norm, after: Norm, rule: NormRule, factor: float) -> GatedMLP | None:
        """Return the operation that may stand in for this module, the norms around it and the factor, if one may."""
        modules = norm, self.gate_proj, self.up_proj, self.down_proj, after
        if is_watched(self) or not is_plain(*modules):
            return None
        weights = (module.weight for module in modules)
        return GatedMLP._make((*weights, rule, self.activation, factor))

    @staticmethod
    def size(config: ModelConfig, setting: Setting) -> FeedForwardSize:
        """Return what an MLP takes; adapters keep the inputs of its products as well."""
        D, F = config.hidden_size, config.intermediate_size
        kept = 2 * F + (D + F) * (not setting.is_full)
        return FeedForwardSize(3 * D * F, 3 * D * F, F, 0, kept, 0, work=4 * F)
