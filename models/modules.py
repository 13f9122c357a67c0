"""The modules that layers are made of; their weights are uninitialised memory until somebody fills them.

Shapes: S local tokens, D width, F feed-forward width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.arch import ModelConfig
from models.ops.gated_mlp import ActivateNode, GatedMLP
from models.ops.linear import Matrix, Products, linear
from models.ops.norm import NormNode, NormRule


class Exact(nn.Parameter):
    """A parameter that stays in float32 in models of half precision, and in their exports."""

    in_float32 = True


class Unfilled(nn.Module):
    """Leave a module of torch without its random start: a file or `init_parameter` fills the weights."""

    def reset_parameters(self) -> None:
        pass


class Linear(Unfilled, nn.Linear):
    """Multiply rows [S, D] by a matrix.

    packed: what the bytes of a quantised one stand for.
    """

    packed: Any = None

    def operands(self) -> Matrix:
        """Return what the operations of models/ops need of it."""
        return Matrix(self.weight, self.bias, packed=self.packed)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.operands())[0]


MakeLinear = Callable[..., Linear]


class Embedding(Unfilled, nn.Embedding):
    """Look up the rows of token ids [S]."""

    weight: nn.Parameter


class RMSNorm(Unfilled, nn.RMSNorm):
    """Scale every row of [..., D] to unit mean square, times what the rule makes of `weight`."""

    def __init__(self, width: int, rule: NormRule) -> None:
        super().__init__(width, rule.eps)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        if self.rule.centred:
            return NormNode.apply(x, self.weight, self.rule)
        return super().forward(x)


class NoNorm(nn.Identity):
    """Stand where a family has no norm."""

    weight = None


NO_NORM = NoNorm()
Norm = RMSNorm | NoNorm


class MLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)) for rows [S, D].

    tile_factor: a tile has so many times as many rows as usual. is_capturable, fits_graphs: CUDA graphs may run it in
    sampling, and in training.
    """

    tile_factor, is_capturable, fits_graphs = 1, True, True

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
        gate, up = linear(x, self.gate_proj.operands(), self.up_proj.operands())
        return self.down_proj(ActivateNode.apply(gate, up, self.activation))

    def fused(self, norm: Norm, after: Norm, rule: NormRule, factor: float) -> GatedMLP:
        """Return the operation that does this module, the norms around it and the factor."""
        pair = Products(self.gate_proj.operands(), self.up_proj.operands())
        down = Products(self.down_proj.operands())
        return GatedMLP(norm.weight, pair, down, after.weight, rule, self.activation, factor)
