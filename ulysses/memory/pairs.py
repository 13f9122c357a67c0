"""Layers in pairs that keep one input for both: half the memory of level "block" for half a forward pass more.

    forward    hidden -first-> middle -second-> out                kept: hidden
    backward   hidden -first-> middle                              the forward pass of the first, once more
               middle -second-> its backward as at level "block"   which computes all that it needs from its input
               hidden -first->  its backward as at level "block"

A layer's backward needs its input alone, so its own forward pass is put off: it would only be thrown away. The layers are
called as modules, without a graph and then each with one of its own, so that ZeRO-3 gathers, releases and reduces as ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses.memory.offload import Group
from ulysses.memory.replay import RandomState, replay


def in_pairs(layers: Sequence[nn.Module], levels: Sequence[str]) -> list[Sequence[nn.Module]]:
    """Return the layers in order, neighbours of level "pair" two by two; one that is left over stands alone, as at "block"."""
    found: list[Sequence[nn.Module]] = []
    at = 0
    while at < len(layers):
        size = 2 if list(levels[at : at + 2]) == ["pair", "pair"] else 1
        found.append(layers[at : at + size])
        at += size
    return found


def run_pair(
    layers: Sequence[Any], hidden: Tensor, rope: tuple[Tensor, Tensor], plan: Any
) -> Tensor:
    """Run layers one after the other, hidden [S, D] -> [S, D]; the graph keeps `hidden`, on the host if the first has an offloader."""
    return _Pair.apply(layers, rope, plan, hidden)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layers: Sequence[Any], rope: tuple[Tensor, Tensor], plan: Any, hidden: Tensor
    ) -> Tensor:
        group = Group(layers[0].offloader)
        kept, random = group.keep(hidden), []
        out = (
            hidden.detach()
        )  # ZeRO-3 counts inputs that need a gradient, and there is no graph here
        for layer in layers:
            random.append(RandomState() if layer.draws() else None)
            out = layer(out, rope, plan)
        group.close()
        ctx.layers, ctx.rope, ctx.plan, ctx.random, ctx.group, ctx.kept = (
            layers,
            rope,
            plan,
            random,
            group,
            kept,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError(
                "a pair's backward ran twice on one forward; what it kept is gone, so run forward again"
            )
        inputs = [ctx.group.get(ctx.kept).detach()]
        ctx.kept = ctx.group = None
        steps = list(zip(ctx.layers, ctx.random))
        for layer, random in steps[:-1]:
            with torch.no_grad(), replay(random):
                inputs.append(layer(inputs[-1], ctx.rope, ctx.plan))
        for layer, random in reversed(steps):
            leaf = inputs.pop().requires_grad_()
            layer.puts_off = random is None  # dropout must be drawn in the order of a forward pass
            try:
                with torch.enable_grad(), replay(random):
                    out = layer(leaf, ctx.rope, ctx.plan)
            finally:
                layer.puts_off = False
            torch.autograd.backward(out, grad)
            grad = leaf.grad
            del out, leaf
        return None, None, None, grad
