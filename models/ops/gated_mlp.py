"""A layer's second half with an MLP, hidden + down(act(gate(norm(hidden))) * up(norm(hidden))), as one node.

Shapes: S local tokens, D width, F feed-forward width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops.activation import activate, activate_backward
from models.ops.linear import add_product, products, products_backward
from models.ops.norm import NormRule, rms_norm, rms_norm_backward
from ulysses.memory.tiling import add_by_tiles, tiles


class GatedMLP(NamedTuple):
    """The weights of a norm, which may be None, and of a plain MLP, and what these compute."""

    norm: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    rule: NormRule
    activation: str = "silu"

    def normalised(self, rows: Tensor) -> Tensor:
        """Return the MLP's input."""
        return rows if self.norm is None else rms_norm(rows, self.norm, self.rule)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate and up of the normalised rows [S, F], and the MLP's product [S, D], without a graph."""
        gate, up = products(self.normalised(rows), (self.gate, self.up))
        return gate, up, F.linear(activate(gate, up, self.activation), self.down)

    def add_tiles(self, rows: Tensor, tile: int) -> Tensor:
        """Return rows + the MLP's product of the normalised rows, in tiles and without a graph."""
        return add_by_tiles(lambda part: self.parts(part)[-1], rows, tile)

    def add(self, rows: Tensor) -> Tensor:
        """Return the same with a graph that keeps rows, gate and up."""
        return _GatedMLPNode.apply(rows, *self)

    def gradients(self, rows: Tensor, grad: Tensor, tile: int) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile of `add`; return the gradients of rows and of the trained weights."""
        grad_rows, *found = gradients(self, rows, grad, tile)
        return grad_rows, [g for g in found if g is not None]


class _GatedMLPNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Any) -> Tensor:
        *matrices, rule, activation = weights
        ctx.rules = rule, activation
        gate, up, out = GatedMLP(*weights).parts(rows)
        ctx.save_for_backward(rows, gate, up, *matrices)
        return out.add_(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, *matrices = ctx.saved_tensors
        mlp = GatedMLP(*matrices, *ctx.rules)
        return *gradients(mlp, rows, grad, len(rows), (gate, up)), None, None


@torch.no_grad()
def gradients(
    mlp: GatedMLP,
    hidden: Tensor,
    grad: Tensor,
    tile: int,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of hidden, norm, gate, up and down, None for a frozen one.

    Several tiles' sums are float32 or better. `kept` holds gate and up if all rows are one tile.
    """
    norm, *pair, of_down = mlp[:4]
    whole = tile >= len(hidden)
    grad = grad.contiguous()
    grad_hidden = None if whole else torch.empty_like(hidden)
    grad_norm = grad_pair = grad_down = None
    for part in tiles(len(hidden), tile):
        rows, grad_rows = hidden[part], grad[part]
        x = mlp.normalised(rows)
        gate, up = kept or products(x, pair)
        active, to_pair = activate_backward(grad_rows @ of_down, gate, up, mlp.activation)
        del gate, up
        if of_down.requires_grad:
            grad_down = add_product(grad_down, grad_rows, active, whole)
        del active
        if any(p.requires_grad for p in pair):
            grad_pair = add_product(grad_pair, to_pair, x, whole)
        del x
        done = products_backward(to_pair, pair)
        del to_pair
        if norm is None:
            done += grad_rows
        else:
            done, part_norm = rms_norm_backward(done, rows, norm, mlp.rule, grad_rows)
            if norm.requires_grad:
                grad_norm = part_norm if grad_norm is None else grad_norm.add_(part_norm)
        if grad_hidden is None:
            grad_hidden = done
        else:
            grad_hidden[part] = done
    halves = (None, None) if grad_pair is None else grad_pair.chunk(2)
    weights: Any = mlp[:4]
    sums = zip((grad_norm, *halves, grad_down), weights)
    found = [None if s is None or not p.requires_grad else s.to(p.dtype) for s, p in sums]
    return grad_hidden, *found
