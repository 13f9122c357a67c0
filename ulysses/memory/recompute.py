"""What a layer keeps between forward and backward, and what it computes again.

    hidden -project-> q k v -exchange-> q' k' v' -attend-> out' lse -exchange-> out -output-> middle -feed_forward-> hidden

    level            kept beside the layer's input          repeated in backward
    block            nothing                                all but feed_forward's first run
    keep_attention   out', lse                              project, both exchanges, output
    keep_exchange    q', k', v', out', lse, out             project, output
    none             everything: ordinary autograd          nothing

One autograd.Function covers the layer, so that ZeRO-3 gathers its parameters once per direction and reduces each
gradient once. feed_forward runs forward and backward tile by tile in backward: two forwards a step at every level.
Where attention was kept, its tiles run before q, k and v exist again.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import Group, Offloader
from ulysses.memory.replay import RandomState, draws, replay
from ulysses.parallel.all_to_all import (
    exchange_out_backward,
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)

RecomputeLevel = Literal["block", "keep_attention", "keep_exchange", "none"]
LEVELS: tuple[str, ...] = get_args(RecomputeLevel)


class Attention(Protocol):
    """Name the two halves of the attention kernel on head shards, without a graph."""

    def attend_forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Return out' and the log-sum-exp."""
        ...

    def attend_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q', k' and v'."""
        ...


class Layer(Protocol):
    """Name the parts of a decoder layer that the levels keep or repeat; see the drawing."""

    def project(self, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]: ...

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor: ...

    def feed_forward_tiles(self, rows: Tensor, tile_rows: int) -> Tensor:
        """Run feed_forward tile by tile, without a graph."""
        ...

    def feed_forward_gradients(self, rows: Tensor, grad: Tensor, tile_rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the rows and of feed_forward's trainable parameters, tile by tile."""
        ...

    def stage_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Return the trainable parameters of project, of output and of feed_forward."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...


def check_level(level: str) -> None:
    """Refuse an unknown level by name."""
    if level not in LEVELS:
        raise ValueError(f"recompute is {level!r} but must be one of {', '.join(LEVELS)}; give one, or one per layer")


def run_layer(
    layer: Layer, attention: Attention, hidden: Tensor, rope: tuple[Tensor, Tensor], plan: Any, *, level: str,
    tile_rows: int, offloader: Offloader | None = None,
) -> Tensor:
    """Run a layer so that its graph keeps what `level` (any but "none") says, on the host if an offloader is given.

    hidden [S, D] -> [S, D]. Gradients are those of ordinary autograd. All ranks use the same level for a layer.
    """
    parameters = layer.stage_parameters()
    return _Layer.apply(layer, attention, plan, level, tile_rows, offloader, rope, hidden, *sum(parameters, []))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, attention: Attention, plan: Any, level: str, tile_rows: int, offloader: Offloader | None,
        rope: tuple[Tensor, Tensor], hidden: Tensor, *parameters: nn.Parameter,
    ) -> Tensor:
        group = Group(offloader)
        dropout = draws(layer)
        random = [RandomState() if dropout else None]
        query, key, value = layer.project(hidden, rope)
        shards = exchange_qkv_forward(query, key, value, plan)
        ctx.heads = query.shape[1], key.shape[1]
        del query, key, value
        out, lse = attention.attend_forward(*shards, plan)
        attended = exchange_out_forward(out, plan)
        kept: list[Tensor] = [hidden]
        if level != "block":
            kept += [out, lse]
        if level == "keep_exchange":
            kept += [*shards, attended]
        ctx.kept, ctx.group = [group.keep(x) for x in kept], group
        del shards, out, lse, kept
        random.append(RandomState() if dropout else None)
        middle = layer.output(hidden, attended)
        del attended
        random.append(RandomState() if dropout else None)
        result = layer.feed_forward_tiles(middle, tile_rows)
        group.close()
        ctx.layer, ctx.attention, ctx.plan, ctx.level, ctx.tile_rows = layer, attention, plan, level, tile_rows
        ctx.rope, ctx.random = rope, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, attention, plan, level = ctx.layer, ctx.attention, ctx.plan, ctx.level
        stages = layer.stage_parameters()
        tensors = _take(ctx)
        hidden, tensors = tensors[0], tensors[1:]
        project = _Stage(ctx.random[0], stages[0])
        output = _Stage(ctx.random[1], stages[1])
        shards = attended = None
        if level == "block":
            shards = exchange_qkv_forward(*project.run(layer.project, (hidden,), ctx.rope), plan)
            out, lse = attention.attend_forward(*shards, plan)
        elif level == "keep_attention":
            out, lse = tensors
        else:
            out, lse, *shards, attended = tensors
        if attended is None:
            attended = exchange_out_forward(out, plan)
        del tensors
        (middle,) = output.run(layer.output, (hidden, attended))
        del attended
        with replay(ctx.random[2]):
            grad, grads_ff = layer.feed_forward_gradients(middle, grad, ctx.tile_rows)
        del middle
        (grad_hidden, grad_attended), grads_output = output.gradients(grad)
        del grad
        grad_out = exchange_out_backward(grad_attended, plan)
        del grad_attended
        if shards is None:
            shards = exchange_qkv_forward(*project.run(layer.project, (hidden,), ctx.rope), plan)
        grads_shards = attention.attend_backward(grad_out, *shards, out, lse, plan)
        del grad_out, shards, out, lse
        grads_qkv = exchange_qkv_backward(*grads_shards, plan, *ctx.heads)
        del grads_shards
        if level == "keep_exchange":
            project.run(layer.project, (hidden,), ctx.rope)
        (grad_project,), grads_project = project.gradients(*grads_qkv)
        grad_hidden = grad_hidden.add_(grad_project) if ctx.needs_input_grad[7] else None
        return None, None, None, None, None, None, None, grad_hidden, *grads_project, *grads_output, *grads_ff


def _take(ctx: Any) -> list[Tensor]:
    """Get what the layer kept, and let the graph forget it."""
    kept, group = ctx.kept, ctx.group
    if kept is None:
        raise RuntimeError("a layer's backward ran twice on one forward; what it kept is gone, so run forward again")
    ctx.kept = ctx.group = None
    return [group.get(x) for x in kept]


class _Stage:
    """Repeat one stage of a layer with a graph of its own, then take its gradients."""

    def __init__(self, random: Any, parameters: Sequence[nn.Parameter]) -> None:
        self.random, self.parameters = random, parameters

    def run(self, function: Any, inputs: Sequence[Tensor], *others: Any) -> tuple[Tensor, ...]:
        """Call function(*inputs, *others); returns its outputs without their graph."""
        self._inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), replay(self.random):
            outputs = function(*self._inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._edges = [get_gradient_edge(x) for x in outputs]  # the graph's ends without the tensors
        return tuple(x.detach() for x in outputs)

    def gradients(self, *grads: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of inputs and of parameters, zeros where unused, and drop the graph."""
        wanted = (*self._inputs, *self.parameters)
        found = torch.autograd.grad(self._edges, wanted, grads, allow_unused=True, materialize_grads=True)
        count = len(self._inputs)
        self._inputs, self._edges = [], []
        return list(found[:count]), list(found[count:])
