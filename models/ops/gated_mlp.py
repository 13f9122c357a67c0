"""The gated activation of an MLP, act(gate) * up, and a layer's second half with an MLP as one node.

    hidden + factor * after(down(act(gate(norm(hidden))) * up(norm(hidden))))

Shapes: S local tokens, D width, F feed-forward width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.linear import add_product, products, products_backward
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
    d = at_least_float32(grad)
    value, slope = value_and_slope(at_least_float32(gate), kind)
    both = torch.cat((d * up * slope, d * value), -1)
    return (value * up).to(gate.dtype), both.to(gate.dtype)


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
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.rest = kind
        return activate(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[str], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *activate_backward(grad, gate, up, ctx.rest)[1].chunk(2, 1), None


class GatedMLP(NamedTuple):
    """The weights of a plain MLP and of the norms before and after it, which may be None, and what these compute."""

    norm: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    after: Tensor | None
    rule: NormRule
    activation: str = "silu"
    factor: float = 1.0

    def parts(self, rows: Tensor) -> Sequence[Tensor]:
        """Return gate and up of the normalised rows [S, F], and the MLP's product [S, D], without a graph."""
        gate, up = products(rms_norm(rows, self.norm, self.rule), (self.gate, self.up))
        return gate, up, F.linear(activate(gate, up, self.activation), self.down)

    def finished(self, product: Tensor) -> Tensor:
        """Return what is added to the rows."""
        product = rms_norm(product, self.after, self.rule)
        return product if self.factor == 1 else product * self.factor

    def add_tiles(self, rows: Tensor, tile: int) -> Tensor:
        """Return rows + the finished product of the normalised rows, in tiles and without a graph."""
        return add_by_tiles(lambda part: self.finished(self.parts(rows[part])[-1]), rows, tile)

    def add(self, rows: Tensor) -> Tensor:
        """Return the same with a graph that keeps rows, gate and up, and the product if a norm comes after it."""
        return _GatedMLPNode.apply(rows, *self)

    def gradients(self, rows: Tensor, grad: Tensor, tile: int) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile of `add`; return the gradients of rows and of the trained weights."""
        grad_rows, *found = gradients(self, rows, grad, tile)
        return grad_rows, [g for g in found if g is not None]


RulesContext = Context[tuple[NormRule, str, float]]  # the last fields


class _GatedMLPNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: RulesContext, rows: Tensor, *weights: object) -> Tensor:
        mlp = GatedMLP._make(weights)
        gate, up, product = mlp.parts(rows)
        kept = None if mlp.after is None else product
        ctx.save_for_backward(rows, gate, up, kept, *mlp[:5])
        ctx.rest = mlp[5:]
        return mlp.finished(product).add_(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: RulesContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *kept = ctx.saved_tensors
        mlp = GatedMLP._make((*kept[3:], *ctx.rest))
        return *gradients(mlp, rows, grad, len(rows), kept[:3]), None, None, None


@torch.no_grad()
def gradients(
    mlp: GatedMLP,
    hidden: Tensor,
    grad: Tensor,
    tile: int,
    kept: list[Any] | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of hidden, norm, gate, up, down and after, None for a frozen one.

    Several tiles' sums are float32 or better. `kept` holds gate, up and the product if all rows are one tile.
    """
    weights: Any = mlp[:5]
    norm, *pair, of_down, after = weights
    whole = tile >= len(hidden)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    grad_norm = grad_pair = grad_down = grad_after = None
    for part in tiles(len(hidden), tile):
        rows, grad_rows = hidden[part], grad[part]
        x = rms_norm(rows, norm, mlp.rule)
        gate, up, product = kept or [*products(x, pair), None]
        inner = grad_rows if mlp.factor == 1 else grad_rows * mlp.factor
        if after is not None:
            if product is None:
                product = F.linear(activate(gate, up, mlp.activation), of_down)
            inner, part_after = rms_norm_backward(inner.clone(), product, after, mlp.rule)
            grad_after = part_after if grad_after is None else grad_after.add_(part_after)
        active, to_pair = activate_backward(inner @ of_down, gate, up, mlp.activation)
        del gate, up, product
        if of_down.requires_grad:
            grad_down = add_product(grad_down, inner, active, whole)
        del active
        if any(p.requires_grad for p in pair):
            grad_pair = add_product(grad_pair, to_pair, x, whole)
        del x
        done = products_backward(to_pair, pair)
        del to_pair
        done, part_norm = rms_norm_backward(done, rows, norm, mlp.rule, grad_rows)
        grad_norm = part_norm if grad_norm is None else grad_norm.add_(part_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    halves = (None, None) if grad_pair is None else grad_pair.chunk(2)
    sums = zip((grad_norm, *halves, grad_down, grad_after), weights)
    found = [None if s is None or not p.requires_grad else s.to(p.dtype) for s, p in sums]
    return grad_hidden, *found
