"""The modules that layers are made of; a file or `init_parameter` fills their weights, which are uninitialised before.

Shapes: S local tokens, D width, F feed-forward width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.ops.gated_mlp import Activation, GatedMLP
from models.ops.linear import GradientSums, Matrix, Products, Saved, recorded
from models.ops.norm import NormRule, rms_norm, rms_norm_backward
from ulysses.parallel.layout import Tensors


class Float32Parameter(nn.Parameter):
    """A parameter that stays in float32 in models of half precision, and in their exports."""

    in_float32 = True


class Uninitialised(nn.Module):
    """Leave the weights of a module of torch without the random values that it would draw."""

    def reset_parameters(self) -> None:
        pass


class Linear(Uninitialised, nn.Linear):
    """Multiply rows [S, D] by a matrix.

    packed: what the bytes of a quantised matrix stand for; None for other matrices.
    """

    packed: Any = None

    @staticmethod
    def empty(shape: tuple[int, ...]) -> tuple[nn.Parameter, Any]:
        """Return uninitialised matrices [..., F, D] in the form that modules of this class hold, and their `packed`."""
        return nn.Parameter(torch.empty(shape)), None

    def operands(self) -> Matrix:
        """Return what the operations of models/ops need of the module."""
        return Matrix(self.weight, self.bias, packed=self.packed)

    def forward(self, x: Tensor) -> Tensor:
        return recorded(Products(self.operands()), x)[0]


class Embedding(Uninitialised, nn.Embedding):
    """Look up the rows of token ids [S]."""

    weight: nn.Parameter


class RMSNorm(Uninitialised, nn.RMSNorm):
    """Scale every row of [..., D] to unit mean square, and multiply it by what the rule makes of `weight`.

    An Operation, which keeps its input.
    """

    def __init__(self, width: int, rule: NormRule) -> None:
        super().__init__(width, rule.eps)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return recorded(self, x)[0]

    @property
    def tensors(self) -> Tensors:
        return [self.weight]

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        return [rms_norm(inputs[0], self.weight, self.rule)], inputs

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        # cloned, because autograd may give the same gradient to another node, and this one writes into it
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        to_x, of_weight = rms_norm_backward(grad, saved[0], self.weight, self.rule)
        sums.add(self.weight, of_weight)
        return [to_x]


class NoNorm(nn.Identity):
    """Stand where a family has no norm."""

    weight = None


NO_NORM = NoNorm()
Norm = RMSNorm | NoNorm


class MLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)) for rows [S, D].

    tile_factor: multiplies the rows of a tile. is_capturable: CUDA graphs may run it in sampling. fits_graphs: CUDA
    graphs may run it in training.
    """

    tile_factor = 1
    is_capturable = True
    fits_graphs = True

    def __init__(
        self, config: ModelConfig, linear: type[Linear], width: int | None = None
    ) -> None:
        super().__init__()
        D, F = config.hidden_size, width or config.intermediate_size
        self.gate_proj = linear(D, F, bias=False)
        self.up_proj = linear(D, F, bias=False)
        self.down_proj = linear(F, D, bias=False)
        self.activation = config.family.activation

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.fused()
        (active,) = recorded(Activation(mlp.activation), *recorded(mlp.gate_up, x))
        return recorded(mlp.down, active)[0]

    def fused(self) -> GatedMLP:
        """Return what computes this module in a layer's second half."""
        gate_up = Products(self.gate_proj.operands(), self.up_proj.operands())
        return GatedMLP(gate_up, Products(self.down_proj.operands()), self.activation)
