"""The gated activation of an MLP, act(gate) * up, and a layer's second half with an MLP as one node.

    hidden + factor * after(down(act(gate(norm(hidden))) * up(norm(hidden))))

Shapes: S local tokens, D width, F feed-forward width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.ops.linear import Products, Sums
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


class GatedMLP(NamedTuple):
    """The matrices of an MLP and the norms before and after it, which may be None, and what these compute."""

    norm: Tensor | None
    pair: Products  # gate and up
    down: Products
    after: Tensor | None
    rule: NormRule
    activation: str = "silu"
    factor: float = 1.0

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained, as modules list them."""
        tensors = self.norm, *self.pair.trained, *self.down.trained, self.after
        return [t for t in tensors if t is not None and t.requires_grad]

    def parts(self, x: Tensor, with_product: bool = True) -> tuple[Tensor, Tensor, Any]:
        """Return gate and up of normalised rows [S, D], and their product with down."""
        gate, up = self.pair.forward(x)
        if not with_product:
            self.down.start(gate)
            return gate, up, None
        return gate, up, self.down.forward(activate(gate, up, self.activation))[0]

    def finished(self, product: Tensor) -> Tensor:
        """Return what is added to the rows."""
        product = rms_norm(product, self.after, self.rule)
        return product if self.factor == 1 else product * self.factor

    def add_tiles(self, rows: Tensor, tile: int) -> Tensor:
        """Return rows + the finished product of the normalised rows, in tiles and without a graph."""

        def finished(part: slice) -> Tensor:
            x = rms_norm(rows[part], self.norm, self.rule)
            return self.finished(self.parts(x)[2])

        return add_by_tiles(finished, rows, tile)

    def add(self, rows: Tensor) -> Tensor:
        """Return the same with a graph that keeps rows, gate and up, and the product if a norm comes after it."""
        return _GatedMLPNode.apply(rows, self, *self.trained)

    @torch.no_grad()
    def gradients(
        self, hidden: Tensor, grad: Tensor, tile: int, kept: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile of `add`; return the gradients of hidden and of what is trained.

        `kept` holds gate, up and the product if all rows are one tile.
        """
        sums, grad = Sums(tile >= len(hidden)), grad.contiguous()
        to_hidden = None if sums.whole else torch.empty_like(hidden)
        for part in tiles(len(hidden), tile):
            done = self._tile(hidden[part], grad[part], kept, sums)
            if to_hidden is None:
                to_hidden = done
            else:
                to_hidden[part] = done
        assert to_hidden is not None
        return to_hidden, sums.of(self.trained)

    def _tile(self, rows: Tensor, grad: Tensor, kept: Any, sums: Sums) -> Tensor:
        x = rms_norm(rows, self.norm, self.rule)
        gate, up, product = kept or self.parts(x, self.after is not None)
        to_product = grad if self.factor == 1 else grad * self.factor
        if self.after is not None:
            to_product, of_after = rms_norm_backward(
                to_product.clone(), product, self.after, self.rule
            )
            sums.add(self.after, of_after)
        to_active = self.down.back(to_product)
        active, to_pair = activate_backward(to_active, gate, up, self.activation)
        del gate, up, product, to_active, kept
        self.down.gradients(to_product, active, sums)
        del active, to_product
        done = self.pair.back(to_pair)
        self.pair.gradients(to_pair, x, sums)
        del to_pair, x
        done, of_norm = rms_norm_backward(done, rows, self.norm, self.rule, grad)
        sums.add(self.norm, of_norm)
        return done


class _GatedMLPNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[GatedMLP], rows: Tensor, mlp: GatedMLP, *trained: Tensor
    ) -> Tensor:
        gate, up, product = mlp.parts(rms_norm(rows, mlp.norm, mlp.rule))
        kept = None if mlp.after is None else product
        ctx.save_for_backward(rows, gate, up, kept, *mlp.pair.kept, *mlp.down.kept)
        ctx.rest = mlp
        return mlp.finished(product).add_(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[GatedMLP], grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *kept = ctx.saved_tensors[:4]
        to_rows, found = ctx.rest.gradients(rows, grad, len(rows), kept)
        return to_rows, None, *found
