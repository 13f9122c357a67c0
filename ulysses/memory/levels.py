"""What a layer keeps between forward and backward, and what it computes again.

 hidden -project-> q k v -exchange-> q' k' v' -attend-> out' lse -exchange-> out -output-> middle -feed_forward-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, out', lse        all but attend (and feed_forward's last product)
    block            the layer's input                   the same and attend
    pair             one input for two layers            the same and the first layer's whole forward pass

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's
parameters once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile. At
"keep_attention" that happens before q, k and v exist again.

A layer offers its three parts, `project(hidden, rope)`, `output(hidden, attended)` and `feed_forward`, the last as
`feed_forward_tiles(rows)` and `feed_forward_gradients(rows, grad)`; `stage_parameters()`, the trainable parameters of
the three; `draws()`, whether it draws random numbers (dropout in an adapter); and the kernel, `self_attn.attention`.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import Group
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


def run_layer(layer: Any, hidden: Tensor, rope: Rope, plan: Any, pair: Pair | None) -> Tensor:
    """Run a layer, hidden [S, D] -> [S, D], so that its graph keeps what `layer.recompute` says, which is not "none".

    With `layer.offloader` that is kept on the host. The gradients are those of ordinary autograd. `pair` is what the
    two layers of a pair share. All ranks use the same level for a layer.
    """
    parameters = [p for stage in layer.stage_parameters() for p in stage]
    return _Layer.apply(layer, rope, plan, pair, hidden, *parameters)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        rope: Rope,
        plan: Any,
        pair: Pair | None,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        is_second = pair is not None and pair.kept is not None
        group, kept, random = Group(None if is_second else layer.offloader), [], []
        dropout, attention = layer.draws(), layer.self_attn.attention
        if not is_second:
            kept.append(group.keep(hidden))
        random.append(random_state() if dropout else None)
        query, key, value = layer.project(hidden, rope)
        shards = exchange_qkv_forward(query, key, value, plan)
        del query, key, value
        out, lse = attention.attend_forward(*shards, plan)
        del shards
        if layer.recompute == "keep_attention":
            kept += [group.keep(out), group.keep(lse)]
        attended = exchange_out_forward(out, plan)
        del out, lse
        random.append(random_state() if dropout else None)
        middle = layer.output(hidden, attended)
        del attended
        random.append(random_state() if dropout else None)
        result = layer.feed_forward_tiles(middle)
        group.close()
        if pair is not None and not is_second:
            pair.kept = group, kept[0], random[0]
        ctx.layer, ctx.rope, ctx.plan, ctx.pair = layer, rope, plan, pair
        ctx.kept = group, kept, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, rope, plan, pair = ctx.layer, ctx.rope, ctx.plan, ctx.pair
        if ctx.kept is None:
            raise RuntimeError(
                "a layer's backward ran twice on one forward; what it kept is gone, so run forward again"
            )
        group, kept, random = ctx.kept
        ctx.kept = None
        hidden, *kept = map(group.get, kept) if kept else [pair.second_input(rope, plan)]
        if pair is not None:
            pair.kept = None
        del group
        attention = layer.self_attn.attention
        in_project, in_output, _ = layer.stage_parameters()
        project = _Stage(layer.project, in_project, random[0])
        output = _Stage(layer.output, in_output, random[1])

        def exchanged() -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = project.run((hidden,), rope)
            return exchange_qkv_forward(query, key, value, plan)

        attention_was_kept = bool(kept)
        if attention_was_kept:
            out, lse = kept
            del kept
        else:
            shards = exchanged()
            out, lse = attention.attend_forward(*shards, plan)
        (middle,) = output.run((hidden, exchange_out_forward(out, plan)))
        with replay(random[2]):
            grad, grads_feed_forward = layer.feed_forward_gradients(middle, grad)
        del middle
        (grad_hidden, grad_attended), grads_output = output.gradients(grad)
        del grad
        grad_out = exchange_out_backward(grad_attended, plan)
        del grad_attended
        if attention_was_kept:
            shards = exchanged()
        query, key, value = attention.attend_backward(grad_out, *shards, out, lse, plan)
        del shards, grad_out, out, lse
        heads = attention.num_heads, attention.num_kv_heads
        grads = exchange_qkv_backward(query, key, value, plan, *heads)
        del query, key, value
        (through_project,), grads_project = project.gradients(*grads)
        grad_input = grad_hidden.add_(through_project) if ctx.needs_input_grad[4] else None
        no_tensors = (None,) * 4  # layer, rope, plan, pair
        return *no_tensors, grad_input, *grads_project, *grads_output, *grads_feed_forward


class _Stage:
    """One part of a layer that runs again with a graph of its own and then gives its gradients."""

    def __init__(self, function: Any, parameters: Sequence[nn.Parameter], random: Random) -> None:
        self._function, self._parameters, self._random = function, parameters, random

    def run(self, inputs: Sequence[Tensor], *others: Any) -> Any:
        """Call function(*inputs, *others); return its outputs without their graph."""
        self._inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), replay(self._random):
            outputs = self._function(*self._inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # the graph's ends without the tensors
        self._edges = [get_gradient_edge(x) for x in outputs]
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
    """Return the state of the CPU generator and of the current GPU's, for `replay`."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


@contextmanager
def replay(state: Random) -> Iterator[None]:
    """Run the block with the generators in that state, if any; afterwards they continue as if it had not run."""
    cpu, cuda = state or (None, None)
    devices = [] if cuda is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices, enabled=cpu is not None):
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield
