"""What a layer keeps between forward and backward, and what it computes again.

 hidden -project-> q k v -exchange-> q' k' v' -attend-> out' lse -exchange-> out -output-> middle -feed_forward-> hidden

    level            kept                                   computed again in backward
    none             everything, by ordinary autograd       nothing
    keep_attention   the layer's input, out', lse           project, both exchanges, output, feed_forward without its last product
    block            the layer's input                      the same and attend
    pair             one input for two layers               the same, and the first layer's whole forward pass

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's parameters
once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile. At "keep_attention" that
happens before q, k and v exist again.

A layer offers its three parts, `project(hidden, rope)`, `output(hidden, attended)` and `feed_forward`, the last as
`feed_forward_tiles(rows, tile)` and `feed_forward_gradients(rows, grad, tile)`; `stage_parameters()`, the trainable
parameters of the three; and `draws()`, which tells whether it draws random numbers (dropout in an adapter).

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import Group, Offloader
from ulysses.parallel.exchange import (
    exchange_out_backward,
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)

RecomputeLevel = Literal["none", "keep_attention", "block", "pair"]
LEVELS: tuple[str, ...] = get_args(RecomputeLevel)  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]
Random = tuple[Tensor, Tensor | None] | None


def check_level(level: str) -> None:
    """Raise ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(
            f"recompute is {level!r} but must be one of {', '.join(LEVELS)}; give one, or one per layer"
        )


class Pair:
    """Two neighbouring layers of level "pair"; the second one's input is computed again from the first one's.

    That halves what the level "block" keeps, for half a forward pass more. The first layer is called as a module once
    more, without a graph, so that ZeRO-3 gathers and releases its parameters as in any forward pass.
    """

    def __init__(self, first: nn.Module) -> None:
        self.first = first
        self.kept: Any = None  # the first layer's group, its input and the state of the generators

    def second_input(self, rope: Rope, plan: Any) -> Tensor:
        """Return the first layer's output, computed again."""
        group, hidden, random = self.kept
        # ZeRO-3 counts inputs that need a gradient, and there is no graph here
        with torch.no_grad(), replay(random):
            return self.first(group.get(hidden).detach(), rope, plan)


def run_layer(
    layer: Any,
    attention: Any,
    hidden: Tensor,
    rope: Rope,
    plan: Any,
    *,
    level: str,
    tile: int,
    offloader: Offloader | None = None,
    pair: Pair | None = None,
) -> Tensor:
    """Run a layer so that its graph keeps what `level`, which is not "none", says; with an offloader it does so on the host.

    hidden [S, D] -> [S, D]. The gradients are those of ordinary autograd. `tile` is the rows of one tile of feed_forward;
    `pair` is what the two layers of a pair share. All ranks use the same level for a layer.
    """
    settings = _Settings(level, tile, offloader, pair)
    parameters = [p for stage in layer.stage_parameters() for p in stage]
    return _Layer.apply(layer, attention, rope, plan, settings, hidden, *parameters)


class _Settings(NamedTuple):
    level: str
    tile: int
    offloader: Offloader | None
    pair: Pair | None


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        attention: Any,
        rope: Rope,
        plan: Any,
        settings: _Settings,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        pair = settings.pair
        is_second = pair is not None and pair.kept is not None
        group, kept, random = Group(None if is_second else settings.offloader), [], []
        dropout = layer.draws()
        if not is_second:
            kept.append(group.keep(hidden))
        random.append(random_state() if dropout else None)
        query, key, value = layer.project(hidden, rope)
        shards = exchange_qkv_forward(query, key, value, plan)
        del query, key, value
        out, lse = attention.attend_forward(*shards, plan)
        del shards
        if settings.level == "keep_attention":
            kept += [group.keep(out), group.keep(lse)]
        attended = exchange_out_forward(out, plan)
        del out, lse
        random.append(random_state() if dropout else None)
        middle = layer.output(hidden, attended)
        del attended
        random.append(random_state() if dropout else None)
        result = layer.feed_forward_tiles(middle, settings.tile)
        group.close()
        if pair is not None and not is_second:
            pair.kept = group, kept[0], random[0]
        ctx.layer, ctx.attention, ctx.rope, ctx.plan, ctx.settings = (
            layer,
            attention,
            rope,
            plan,
            settings,
        )
        ctx.kept = group, kept, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, attention, rope, plan = ctx.layer, ctx.attention, ctx.rope, ctx.plan
        if ctx.kept is None:
            raise RuntimeError(
                "a layer's backward ran twice on one forward; what it kept is gone, so run forward again"
            )
        group, kept, random = ctx.kept
        pair, ctx.kept = ctx.settings.pair, None
        hidden, *kept = map(group.get, kept) if kept else [pair.second_input(rope, plan)]
        if pair is not None:
            pair.kept = None
        del group, pair
        in_project, in_output, in_feed_forward = layer.stage_parameters()
        project = _Stage(layer.project, in_project, random[0])
        output = _Stage(layer.output, in_output, random[1])
        shards: tuple[Tensor, ...] = ()
        if kept:
            out, lse = kept
            del kept
        else:
            shards = exchange_qkv_forward(*project.run((hidden,), rope), plan)
            out, lse = attention.attend_forward(*shards, plan)
        (middle,) = output.run((hidden, exchange_out_forward(out, plan)))
        with replay(random[2]):
            grad, grads_feed_forward = layer.feed_forward_gradients(middle, grad, ctx.settings.tile)
        del middle
        (grad_hidden, grad_attended), grads_output = output.gradients(grad)
        del grad
        grad_out = exchange_out_backward(grad_attended, plan)
        del grad_attended
        if not shards:
            shards = exchange_qkv_forward(*project.run((hidden,), rope), plan)
        query, key, value = attention.attend_backward(grad_out, *shards, out, lse, plan)
        del shards, grad_out, out, lse
        heads = attention.num_heads, attention.num_kv_heads
        grads = exchange_qkv_backward(query, key, value, plan, *heads)
        del query, key, value
        (grad_input,), grads_project = project.gradients(*grads)
        grad_input = grad_hidden.add_(grad_input) if ctx.needs_input_grad[5] else None
        return (
            None,
            None,
            None,
            None,
            None,
            grad_input,
            *grads_project,
            *grads_output,
            *grads_feed_forward,
        )


class _Stage:
    """One part of a layer that runs again with a graph of its own and then gives its gradients."""

    def __init__(self, function: Any, parameters: Sequence[nn.Parameter], random: Random) -> None:
        self._function, self._parameters, self._random = function, parameters, random

    def run(self, inputs: Sequence[Tensor], *others: Any) -> tuple[Tensor, ...]:
        """Call function(*inputs, *others); return its outputs without their graph."""
        self._inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), replay(self._random):
            outputs = self._function(*self._inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._edges = [
            get_gradient_edge(x) for x in outputs
        ]  # the graph's ends without the tensors
        return tuple(x.detach() for x in outputs)

    def gradients(self, *grads: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of inputs and of parameters, zeros where unused, and drop the graph."""
        wanted, count = (*self._inputs, *self._parameters), len(self._inputs)
        found = torch.autograd.grad(
            self._edges, wanted, grads, allow_unused=True, materialize_grads=True
        )
        self._inputs, self._edges = [], []
        return list(found[:count]), list(found[count:])


def random_state() -> tuple[Tensor, Tensor | None]:
    """Return the state of the CPU generator and of the current GPU's, from which `replay` draws the same numbers again."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


@contextmanager
def replay(state: Random) -> Iterator[None]:
    """Run the block with the generators in that state; afterwards they continue as if it had not run. None changes nothing."""
    if state is None:
        yield
        return
    now = random_state()
    _set_random(state)
    try:
        yield
    finally:
        _set_random(now)


def _set_random(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
