"""The modules that layers are made of; their weights are uninitialised memory until somebody fills them.

Shapes: S local tokens, D width, F feed-forward width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.arch import ModelConfig
from models.ops.gated_mlp import ActivateNode, GatedMLP
from models.ops.linear import LinearNode
from models.ops.norm import NormNode, NormRule
from ulysses.memory.levels import HOOKS


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has a hook of any kind, which only a call of the module itself would run."""
    return any(getattr(module, kind) for kind in HOOKS)


def is_plain(*modules: Any) -> bool:
    """Return whether the modules' weights may be read directly: no hooks, whole, and of a class that says so.

    A class says so by `plain = True` of its own; one that is derived from it may compute something else.
    """
    return all(
        vars(type(m)).get("plain", False)
        and not is_watched(m)
        and (m.weight is None or m.weight.numel() > 0)
        for m in modules
    )


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


def some_columns(module: nn.Linear, x: Tensor, columns: Tensor) -> Tensor:
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
