"""The gated activation of an MLP, act(gate) * up, and a layer's second half as one node, with an MLP in it.

    hidden + factor * after(down(act(gate(norm(hidden))) * up(norm(hidden))))

Shapes: S local tokens, D width, F feed-forward width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.linear import GradientSums, Products
from models.ops.norm import NormRule, rms_norm, rms_norm_backward, triton_kernels
from ulysses.memory.tiling import add_by_tiles, tiles
from ulysses.parallel.layout import Context

# transformers' names
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    """Return act(gate) * up of rows [S, F], without a graph; both have the same strides."""
    if kernels := triton_kernels(gate):
        return kernels.gated(gate, up, gelu=kind != "silu")[0]
    return (ACTIVATIONS[kind](at_least_float32(gate)) * up).to(gate.dtype)


def activate_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Return the activation, which the weight gradient needs, and the gradients of gate and up side by side [S, 2F]."""
    if kernels := triton_kernels(gate):
        return kernels.gated(gate, up, grad.contiguous(), gelu=kind != "silu")
    wide = at_least_float32(grad)
    value, slope = value_and_slope(at_least_float32(gate), kind)
    grads = torch.cat((wide * up * slope, wide * value), -1)
    return (value * up).to(gate.dtype), grads.to(gate.dtype)


def value_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return act(x) and its derivative."""
    if kind == "silu":
        s = torch.sigmoid(x)
        value = x * s
        return value, s + value * (1 - s)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = ACTIVATIONS[kind](x)
    (slope,) = torch.autograd.grad(value, x, torch.ones_like(value))
    return value.detach(), slope


class ActivateNode(torch.autograd.Function):
    """Return act(gate) * up; backward keeps the two inputs only."""

    @staticmethod
    def forward(ctx: Context[str], gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if gate.stride() != up.stride():
            gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.rest = kind
        return activate(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[str], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *activate_backward(grad, gate, up, ctx.rest)[1].chunk(2, 1), None


# What a forward saves, so that backward does not compute it again.
Saved = Sequence[Any]


class SecondHalf:
    """A layer's second half, which adds to each of its rows: to all at once with a graph, or in tiles without one."""

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained, as modules list them."""
        raise NotImplementedError

    def forward(self, rows: Tensor, part: slice) -> tuple[Tensor, Saved]:
        """Return what is added to these rows, which are a part of all rows, and what it saves; without a graph.

        What is added lies in new memory.
        """
        raise NotImplementedError

    def backward(
        self, rows: Tensor, grad: Tensor, part: slice, saved: Saved, sums: GradientSums
    ) -> Tensor:
        """Return the gradient of these rows, and add those of what is trained to `sums`; `saved` may be empty."""
        raise NotImplementedError

    def add_tiles(self, rows: Tensor, tile: int) -> Tensor:
        """Return the rows with what is added to them, in tiles and without a graph."""
        return add_by_tiles(lambda part: self.forward(rows[part], part)[0], rows, tile)

    def add(self, rows: Tensor) -> Tensor:
        """Return the rows with what is added to them, with a graph, which keeps the rows and what `forward` saves."""
        return _SecondHalfNode.apply(rows, self, *self.trained)

    @torch.no_grad()
    def gradients(
        self, rows: Tensor, grad: Tensor, tile: int, saved: Saved = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile of `add`; return the gradients of rows and of what is trained.

        `saved` is what `forward` has saved, if it ran and all rows are one tile.
        """
        sums, grad = GradientSums(tile >= len(rows)), grad.contiguous()
        if sums.whole:
            to_rows = self.backward(rows, grad, slice(0, len(rows)), saved, sums)
        else:
            to_rows = torch.empty_like(rows)
            for part in tiles(len(rows), tile):
                to_rows[part] = self.backward(rows[part], grad[part], part, (), sums)
        return to_rows, sums.of(self.trained)


class _SecondHalfNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[SecondHalf], rows: Tensor, half: SecondHalf, *trained: Tensor
    ) -> Tensor:
        out, saved = half.forward(rows, slice(0, len(rows)))
        ctx.save_for_backward(rows, *saved)
        ctx.rest = half
        return out.add_(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[SecondHalf], grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        to_rows, of_trained = ctx.rest.gradients(rows, grad, len(rows), saved)
        return to_rows, None, *of_trained


@dataclass
class GatedMLP(SecondHalf):
    """The matrices of an MLP and the norms before and after it, which may be None, and what these compute."""

    norm: Tensor | None
    gate_up: Products
    down: Products
    after: Tensor | None
    rule: NormRule
    activation: str = "silu"
    factor: float = 1.0

    @property
    def trained(self) -> list[Tensor]:
        tensors = self.norm, *self.gate_up.trained, *self.down.trained, self.after
        return [t for t in tensors if t is not None and t.requires_grad]

    def forward(self, rows: Tensor, part: slice) -> tuple[Tensor, Saved]:
        gate, up = self.gate_up.forward(rms_norm(rows, self.norm, self.rule))
        (product,) = self.down.forward(activate(gate, up, self.activation))
        out = rms_norm(product, self.after, self.rule)
        if self.factor != 1:
            out = out * self.factor
        input_of_after = None if self.after is None else product
        return out, (gate, up, input_of_after, *self.gate_up.saved, *self.down.saved)

    def backward(
        self, rows: Tensor, grad: Tensor, part: slice, saved: Saved, sums: GradientSums
    ) -> Tensor:
        x = rms_norm(rows, self.norm, self.rule)
        if saved:
            gate, up, product = saved[:3]
        else:
            (gate, up), product = self.gate_up.forward(x), None
            if self.after is None:
                self.down.start(gate)
            else:
                (product,) = self.down.forward(activate(gate, up, self.activation))
        to_product = grad if self.factor == 1 else grad * self.factor
        if self.after is not None:
            to_product, of_after = rms_norm_backward(
                to_product.clone(), product, self.after, self.rule
            )
            sums.add(self.after, of_after)
        to_active = self.down.back(to_product)
        active, to_gate_up = activate_backward(to_active, gate, up, self.activation)
        del gate, up, product, to_active, saved
        self.down.gradients(to_product, active, sums)
        del active, to_product
        to_x = self.gate_up.back(to_gate_up)
        self.gate_up.gradients(to_gate_up, x, sums)
        del to_gate_up, x
        to_rows, of_norm = rms_norm_backward(to_x, rows, self.norm, self.rule, grad)
        sums.add(self.norm, of_norm)
        return to_rows
