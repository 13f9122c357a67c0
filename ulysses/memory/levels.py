"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

 hidden -project-> q k v -exchange-> q' k' v' -attend-> out' lse -exchange-> out -output-> middle -feed_forward-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, out', lse        all but attend (and feed_forward's last product)
    block            the layer's input                   the same and attend
    pair             one input for two layers            the same and the first layer's whole forward pass

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's
parameters once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile. At
"keep_attention" that happens before q, k and v exist again.

A layer offers its three parts, `project(hidden, rope)`, which returns hidden too, so that one gradient comes back for
both of its uses, `output(hidden, attended)` and `feed_forward`, the last as `feed_forward_tiles(rows)` and
`feed_forward_gradients(rows, grad)`; `stage_parameters()`, the trainable parameters of the three; and the kernel,
`self_attn.attention`. Random numbers (dropout in an adapter) are drawn again as they were.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import Group, Offloader
from ulysses.memory.tiling import TILE_ROWS, pulled_back
from ulysses.parallel.exchange import (
    exchange_out_backward,
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)

LEVELS = ("none", "keep_attention", "block", "pair")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]
Random = tuple[Tensor, Tensor | None]


class LayerMemory(NamedTuple):
    """Say what the model keeps for backward and how it is cut.

    recompute: one level for all layers or one per layer, the same on all ranks. mlp_tile: rows of an MLP that run at a
    time if there are more than twice as many, except where level "none" keeps its whole graph. offloaded_layers: so
    many of the first layers, or all, keep their saved tensors in host memory if there is an offloader; level "none"
    ignores it. graphs: small steps run as CUDA graphs (memory/graphs.py), which need level "none" and weights that
    stay.
    """

    recompute: str | Sequence[str] = "none"
    mlp_tile: int = TILE_ROWS
    offloader: Offloader | None = None
    offloaded_layers: int | None = None
    graphs: bool = False


class Pair:
    """Two neighbouring layers of level "pair"; the second one's input is computed again from the first one's.

    That halves what the level "block" keeps, for half a forward pass more. The first layer is called as a module once
    more, without a graph, so that ZeRO-3 gathers and releases its parameters as in any forward pass.
    """

    def __init__(self, first: nn.Module) -> None:
        self.first = first
        # the first layer's group, and the state of the generators
        self.kept: Any = None

    def second_input(self, rope: Rope, plan: Any) -> Tensor:
        """Return the first layer's output, computed again."""
        group, random = self.kept
        # ZeRO-3 counts inputs that need a gradient, and there is no graph here
        with torch.no_grad(), replay(random):
            return self.first(group.tensors()[0].detach(), rope, plan)


class LayerNode(torch.autograd.Function):
    """Run a layer, hidden [S, D] -> [S, D], at the level `layer.recompute`, which is not "none".

    What the level keeps goes to host memory if there is a `layer.offloader`. The gradients are those of ordinary
    autograd. `pair` is what the two layers of a pair share; `parameters` are those of `layer.stage_parameters()`. All
    ranks use the same level for a layer.
    """

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
        group = Group(None if is_second else layer.offloader)
        if not is_second:
            group.keep(hidden)
        attention = layer.self_attn.attention
        random = [random_state()]
        query, key, value, _ = layer.project(hidden, rope)
        shards = exchange_qkv_forward(query, key, value, plan)
        del query, key, value
        out, lse = attention.attend_forward(*shards, plan)
        del shards
        if layer.recompute == "keep_attention":
            group.keep(out)
            group.keep(lse)
        attended = exchange_out_forward(out, plan)
        del out, lse
        random.append(random_state())
        middle = layer.output(hidden, attended)
        del attended
        random.append(random_state())
        result = layer.feed_forward_tiles(middle)
        group.close()
        if pair is not None and not is_second:
            pair.kept = group, random[0]
        ctx.call = layer, rope, plan, pair
        ctx.kept = group, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, rope, plan, pair = ctx.call
        group, random = ctx.kept
        ctx.kept = None
        hidden, *kept = group.tensors() or [pair.second_input(rope, plan)]
        if pair is not None:
            pair.kept = None
        del group
        attention = layer.self_attn.attention
        in_project, in_output, _ = layer.stage_parameters()

        def exchanged() -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
            (query, key, value, _), gradients = _again(
                layer.project, in_project, random[0], [hidden], rope
            )
            return exchange_qkv_forward(query, key, value, plan), gradients

        attention_was_kept = bool(kept)
        if attention_was_kept:
            out, lse = kept
            del kept
        else:
            shards, through_project = exchanged()
            out, lse = attention.attend_forward(*shards, plan)
        inputs = [hidden, exchange_out_forward(out, plan)]
        (middle,), through_output = _again(layer.output, in_output, random[1], inputs)
        del inputs
        with replay(random[2]):
            grad, grads_feed_forward = layer.feed_forward_gradients(middle, grad)
        del middle
        (grad_hidden, grad_attended), grads_output = through_output(grad)
        del grad
        grad_out = exchange_out_backward(grad_attended, plan)
        del grad_attended
        if attention_was_kept:
            shards, through_project = exchanged()
        query, key, value = attention.attend_backward(grad_out, *shards, out, lse, plan)
        del shards, grad_out, out, lse
        grads = exchange_qkv_backward(
            query, key, value, plan, attention.num_heads, attention.num_kv_heads
        )
        del query, key, value
        (grad_hidden,), grads_project = through_project(*grads, grad_hidden)
        grads_of_parameters = *grads_project, *grads_output, *grads_feed_forward
        return None, None, None, None, grad_hidden, *grads_of_parameters


def _again(
    function: Any,
    parameters: Sequence[nn.Parameter],
    random: Random,
    inputs: list[Tensor],
    *others: Any,
) -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
    """Call function(*inputs, *others), one part of a layer, with a graph of its own.

    Return its outputs without the graph, and a function that takes their gradients once and gives those of inputs and
    of parameters, zeros where unused.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad(), replay(random):
        outputs = function(*leaves, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    edges = [get_gradient_edge(x) for x in outputs]  # the graph's ends without the tensors

    def gradients(*grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        wanted, count = (*leaves, *parameters), len(leaves)
        found = pulled_back(edges, wanted, grads)
        edges.clear()
        leaves.clear()
        return found[:count], found[count:]

    return tuple(x.detach() for x in outputs), gradients


def random_state() -> Random:
    """Return the state of the CPU generator and of the current GPU's, for `replay`."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


@contextmanager
def replay(state: Random) -> Iterator[None]:
    """Run the block with the generators in that state; afterwards they continue as if it had not run."""
    cpu, cuda = state
    with torch.random.fork_rng([] if cuda is None else [torch.cuda.current_device()]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield
