"""The modules that layers are made of; their weights are uninitialised memory until somebody fills them.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.ops.linear import LinearNode
from models.ops.norm import NormNode, NormRule
from models.ops.plain import is_plain


class Exact(nn.Parameter):
    """A parameter that stays in float32 in models of half precision, and in their exports."""

    in_float32 = True


class Unfilled(nn.Module):
    """Leave a module of torch without its random start: a file or `init_parameter` fills the weights."""

    def reset_parameters(self) -> None:
        pass


class Linear(Unfilled, nn.Linear):
    """Multiply rows [S, D] by a matrix; unlike torch's, the graph keeps no view of it."""

    plain = True

    def forward(self, x: Tensor) -> Tensor:
        return LinearNode.apply(x, self.weight, self.bias, None)


def some_columns(module: Any, x: Tensor, columns: Tensor) -> Tensor:
    """Return some columns of what a linear module makes of rows x, and compute no others if it is a plain one."""
    if is_plain(module) and module.bias is None:
        return LinearNode.apply(x, module.weight, None, columns)
    return module(x)[:, columns]


MakeLinear = Callable[..., Linear]


class Embedding(Unfilled, nn.Embedding):
    """Look up the rows of token ids [S]."""

    weight: nn.Parameter


class RMSNorm(Unfilled, nn.RMSNorm):
    """Scale every row of [..., D] to unit mean square, times what the rule makes of `weight`."""

    plain = True

    def __init__(self, width: int, rule: NormRule) -> None:
        super().__init__(width, rule.eps)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        if self.rule.centred:
            return NormNode.apply(x, self.weight, self.rule)
        return super().forward(x)


class NoNorm(nn.Identity):
    """Stand where a family has no norm."""

    plain, weight = True, None


NO_NORM = NoNorm()
Norm = RMSNorm | NoNorm
