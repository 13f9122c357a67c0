"""The gated activation of an MLP, act(gate) * up, and a layer's second half as one node, with an MLP in it.

    hidden + factor * after(down(act(gate(norm(hidden))) * up(norm(hidden))))

Shapes: S local tokens, D width, F feed-forward width.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops.linear import GradientSums, Products, Saved
from models.ops.norm import (
    NormRule,
    in_plain_torch,
    rms_norm,
    rms_norm_backward,
    triton_kernels,
)
from ulysses.memory.levels import TILE_ROWS, tile_rows, tiles
from ulysses.parallel.layout import Tensors

# transformers' names
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(
    gate: Tensor, up: Tensor, kind: str = "silu", grad: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Return act(gate) * up of rows [S, F], without a graph, and for its `grad` those of gate and up [S, 2F].

    The gradients lie side by side. gate and up have the same strides.
    """
    if kernels := triton_kernels(gate):
        return kernels.gated(gate, up, kind, grad)
    active, grads = in_plain_torch(lambda g, u: ACTIVATIONS[kind](g) * u, grad, gate, up)
    active = active.to(gate.dtype)
    if grad is None:
        return active, None
    return active, torch.cat([*grads], -1).to(gate.dtype)


class Activation(NamedTuple):
    """Return act(gate) * up; backward keeps the two inputs only."""

    kind: str = "silu"
    tensors: Tensors = ()

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        gate, up = inputs
        if gate.stride() != up.stride():
            gate, up = gate.contiguous(), up.contiguous()
        return [activate(gate, up, self.kind)[0]], (gate, up)

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        gate, up = saved
        _, to_gate_up = activate(gate, up, self.kind, grads[0])
        return to_gate_up.chunk(2, 1)


class FeedForward(Protocol):
    """What a layer's second half computes of normalised rows x [S, D], with its backward; neither records a graph."""

    def forward(self, x: Tensor, part: slice) -> tuple[Tensor, Saved]:
        """Return the output of these rows, which are a part of all rows, in new memory, and what backward needs."""

    def backward(
        self, x: Tensor, grad: Tensor, part: slice, saved: list[Tensor], sums: GradientSums
    ) -> Tensor:
        """Return the gradient of x, and add the gradients of what is trained to `sums`.

        `saved` is what `forward` returned, or empty. Its tensors are taken out of the list, so that their memory is
        free as soon as they have been used.
        """


class SecondHalf(NamedTuple):
    """A layer's second half: a feed-forward with the weights of the norms before and after it, which may be None.

    As an Operation it runs all rows at once; `add_tiles` and `gradients` run them in tiles, without a graph. The result
    is the rows with what is added to them. tensors: all that are trained. tile: the rows of a tile; up to twice as many
    run as one.
    """

    norm: Tensor | None
    feed_forward: FeedForward
    after: Tensor | None
    tensors: Tensors
    rule: NormRule
    factor: float = 1.0
    tile: int = TILE_ROWS

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        (rows,) = inputs
        out, saved = self._forward(rows, slice(len(rows)))
        return [out.add_(rows)], (rows, *saved)

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        rows, *kept = saved
        return [self._backward(rows, grads[0].contiguous(), slice(len(rows)), kept, sums)]

    @torch.no_grad()
    def add_tiles(self, rows: Tensor) -> Tensor:
        """Return the rows with what is added to them, in tiles and without a graph."""
        tile = tile_rows(len(rows), self.tile)
        if tile >= len(rows):
            return self.run([rows])[0][0]
        out = torch.empty_like(rows)
        for part in tiles(len(rows), tile):
            torch.add(rows[part], self._forward(rows[part], part)[0], out=out[part])
        return out

    @torch.no_grad()
    def gradients(self, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensors]:
        """Run forward and backward of each tile; return the gradients of rows and of `tensors`."""
        tile, grad = tile_rows(len(rows), self.tile), grad.contiguous()
        sums = GradientSums(tile >= len(rows))
        if sums.whole:
            to_rows = self._backward(rows, grad, slice(len(rows)), (), sums)
        else:
            to_rows = torch.empty_like(rows)
            for part in tiles(len(rows), tile):
                to_rows[part] = self._backward(rows[part], grad[part], part, (), sums)
        return to_rows, sums.of(self.tensors)

    def _forward(self, rows: Tensor, part: slice) -> tuple[Tensor, Saved]:
        """Return what is added to these rows, in new memory, and what backward needs."""
        # no variable here keeps the normalised rows alive
        out, saved = self.feed_forward.forward(rms_norm(rows, self.norm, self.rule), part)
        input_of_after = None if self.after is None else out
        out = rms_norm(out, self.after, self.rule)
        if self.factor != 1:
            out = out * self.factor
        return out, (input_of_after, *saved)

    def _backward(
        self, rows: Tensor, grad: Tensor, part: slice, saved: Saved, sums: GradientSums
    ) -> Tensor:
        """Return the gradient of these rows. `saved` is what `_forward` kept; if it is empty, it is computed again."""
        x = rms_norm(rows, self.norm, self.rule)
        to_out = grad if self.factor == 1 else grad * self.factor
        input_of_after, of_feed_forward = None, list[Any]()
        if saved:
            input_of_after, *of_feed_forward = saved
        if self.after is not None:
            if input_of_after is None:
                input_of_after, saved = self.feed_forward.forward(x, part)
                # the list alone holds these tensors, so that the feed-forward can free each after its use
                of_feed_forward = [*saved]
                del saved
            to_out, of_after = rms_norm_backward(
                to_out.clone(), input_of_after, self.after, self.rule
            )
            sums.add(self.after, of_after)
            del input_of_after
        to_x = self.feed_forward.backward(x, to_out, part, of_feed_forward, sums)
        del x, to_out
        to_rows, of_norm = rms_norm_backward(to_x, rows, self.norm, self.rule, grad)
        sums.add(self.norm, of_norm)
        return to_rows


class GatedMLP(NamedTuple):
    """The matrices of an MLP, and its activation."""

    gate_up: Products
    down: Products
    activation: str = "silu"

    def forward(self, x: Tensor, part: slice) -> tuple[Tensor, Saved]:
        gate, up = self.gate_up.forward(x)
        del x
        (out,) = self.down.forward(activate(gate, up, self.activation)[0])
        return out, (gate, up)

    def backward(
        self, x: Tensor, grad: Tensor, part: slice, saved: list[Tensor], sums: GradientSums
    ) -> Tensor:
        if saved:
            gate, up = saved
            saved.clear()
        else:
            gate, up = self.gate_up.forward(x)
            if self.down.adapters:
                # draws what they drop, as the product would that is not computed again
                self.down.adapters.start(gate)
        to_active = self.down.back(grad)
        active, to_gate_up = activate(gate, up, self.activation, to_active)
        del gate, up, to_active
        self.down.gradients(grad, active, sums)
        del active
        to_x = self.gate_up.back(to_gate_up)
        self.gate_up.gradients(to_gate_up, x, sums)
        return to_x
