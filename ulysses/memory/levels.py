"""What a layer keeps between forward and backward, and what it computes again.

 hidden -project-> q k v -exchange-> q' k' v' -attend-> out' lse -exchange-> out -output-> middle -feed_forward-> hidden

    level            kept beside the layer's input          repeated in backward
    pair             nothing; two layers share one input    as block, and the first layer's forward pass (pairs.py)
    block            nothing                                all but feed_forward's first run
    keep_attention   out', lse                              project, both exchanges, output
    keep_exchange    q', k', v', out', lse, out             output (and project, unless it is plain)
    mlp              all of these and middle                feed_forward alone
    none             everything: ordinary autograd          nothing

One autograd.Function covers the layer, so that ZeRO-3 gathers its parameters once per direction and reduces each
gradient once. feed_forward runs forward and backward tile by tile in backward: two forwards a step at every level but
"none". Where attention was kept, its tiles run before q, k and v exist again. The last two are ordinary autograd around
attention: nothing of theirs leaves for the host, and all heads are exchanged at once.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim; q', k', v', out' are head shards.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import Group, Offloader
from ulysses.memory.parts import Attention, HeadGroups, Layer, OutputGroups
from ulysses.memory.replay import RandomState, replay
from ulysses.parallel.exchange import (
    exchange_out_backward,
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)

RecomputeLevel = Literal["pair", "block", "keep_attention", "keep_exchange", "mlp", "none"]
LEVELS: tuple[str, ...] = get_args(RecomputeLevel)
AUTOGRAD = (
    "mlp",
    "none",
)  # levels whose attention is ordinary autograd: not offloaded, not cut into groups of heads


def check_level(level: str) -> None:
    """Refuse an unknown level by name."""
    if level not in LEVELS:
        raise ValueError(
            f"recompute is {level!r} but must be one of {', '.join(LEVELS)}; give one, or one per layer"
        )


def run_layer(
    layer: Layer,
    attention: Attention,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    plan: Any,
    *,
    level: str,
    tile_rows: int,
    head_chunks: int = 1,
    offloader: Offloader | None = None,
    put_off: bool = False,
) -> Tensor:
    """Run a layer so that its graph keeps what `level` (none of AUTOGRAD) says, on the host if an offloader is given.

    hidden [S, D] -> [S, D]. Gradients are those of ordinary autograd. `head_chunks` > 1 exchanges and attends that many
    groups of heads one after the other, in a fraction of the memory. All ranks use the same settings for a layer.
    Where nothing but the input is kept, `put_off` leaves everything to backward: what is returned has a graph but no values.
    """
    level = "block" if level == "pair" else level
    assert not put_off or level == "block"
    settings = _Settings(level, tile_rows, head_chunks, None if put_off else offloader, put_off)
    first, second, third = layer.stage_parameters()
    return _Layer.apply(layer, attention, plan, settings, rope, hidden, *first, *second, *third)


class _Settings(NamedTuple):
    level: str
    tile_rows: int
    head_chunks: int
    offloader: Offloader | None
    put_off: bool


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        attention: Attention,
        plan: Any,
        settings: _Settings,
        rope: tuple[Tensor, Tensor],
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        group = Group(settings.offloader)
        ctx.layer, ctx.attention, ctx.plan, ctx.settings, ctx.rope = (
            layer,
            attention,
            plan,
            settings,
            rope,
        )
        if settings.put_off:
            ctx.kept, ctx.group, ctx.random = [group.keep(hidden)], group, [None] * 3
            return hidden.new_empty(()).expand_as(hidden)
        dropout = layer.draws()
        random = [RandomState() if dropout else None]
        count = settings.head_chunks
        groups = layer.head_groups(hidden, rope, count) or _AllHeads(
            lambda: layer.project(hidden, rope), count
        )
        attended, chunks = _attend(
            attention, groups, plan, count, settings.level == "keep_exchange"
        )
        del groups
        kept: list[Any] = [group.keep(hidden)]
        if settings.level != "block":
            kept.append(
                [
                    _Chunk(
                        c.heads,
                        group.keep(c.out),
                        group.keep(c.lse),
                        tuple(map(group.keep, c.shards)),
                    )
                    for c in chunks
                ]
            )
        if settings.level == "keep_exchange":
            kept.append(group.keep(attended))
        del chunks
        random.append(RandomState() if dropout else None)
        middle = layer.output(hidden, attended)
        del attended
        random.append(RandomState() if dropout else None)
        result = layer.feed_forward_tiles(middle, settings.tile_rows)
        group.close()
        ctx.kept, ctx.group, ctx.random = kept, group, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, attention, plan, settings = ctx.layer, ctx.attention, ctx.plan, ctx.settings
        hidden, chunks, attended = _take(ctx)
        stages = layer.stage_parameters()
        project, count = _Stage(ctx.random[0], stages[0]), settings.head_chunks
        outputs = layer.output_groups(count) or _AllOutputs(
            _Stage(ctx.random[1], stages[1]), layer.output, count
        )
        groups = layer.head_groups(hidden, ctx.rope, count)
        if groups is None:
            groups = _AllHeads(
                lambda: project.run(layer.project, (hidden,), ctx.rope), count, project
            )
        if settings.level == "block":
            attended, chunks = _attend(attention, groups, plan, count, keep_shards=count == 1)
        elif attended is None:
            attended = _outputs(chunks, plan)
        assert attended is not None
        middle = outputs.run(hidden, attended)
        del attended
        with replay(ctx.random[2]):
            grad, grads_ff = layer.feed_forward_gradients(middle, grad, settings.tile_rows)
        del middle
        grad_hidden, grads_output = outputs.gradients(grad)
        del grad
        _attend_gradients(attention, outputs, groups, chunks, plan)
        grad_project, by_id = groups.gradients()
        grads_project = [by_id[id(p)] for p in stages[0]]
        grad_input = grad_hidden.add_(grad_project) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, grad_input, *grads_project, *grads_output, *grads_ff


class _Chunk(NamedTuple):
    """Hold one group of (query, kv) heads after attention: out', log-sum-exp, and q', k', v' if they are kept."""

    heads: tuple[int, int]
    out: Any
    lse: Any
    shards: tuple[Any, ...]


def _attend(
    attention: Attention, groups: HeadGroups, plan: Any, head_chunks: int, keep_shards: bool
) -> tuple[Tensor, list[_Chunk]]:
    """Exchange, attend and exchange back, one group of heads after the other; returns out [S, H, E] and the chunks."""
    attended, chunks = None, []
    for i in range(head_chunks):
        query, key, value = groups.project(i)
        heads, shards = (
            (query.shape[1], key.shape[1]),
            exchange_qkv_forward(query, key, value, plan),
        )
        del query, key, value
        out, lse = attention.attend_forward(*shards, plan)
        attended = _place(attended, exchange_out_forward(out, plan), i, head_chunks)
        chunks.append(_Chunk(heads, out, lse, shards if keep_shards else ()))
        del shards, out, lse
    assert attended is not None
    return attended, chunks


def _outputs(chunks: Sequence[_Chunk], plan: Any) -> Tensor | None:
    """Exchange the chunks' outputs back to their tokens, [S, H, E]."""
    attended = None
    for i, chunk in enumerate(chunks):
        attended = _place(attended, exchange_out_forward(chunk.out, plan), i, len(chunks))
    return attended


def _attend_gradients(
    attention: Attention, outputs: OutputGroups, groups: HeadGroups, chunks: list[_Chunk], plan: Any
) -> None:
    """Give `groups` the gradients of q, k and v from those of each chunk's output.

    Chunks without shards project and exchange theirs again. Empties `chunks`: nothing outlives its use.
    """
    for i in range(len(chunks)):
        heads, out, lse, shards = chunks.pop(0)
        query, key, value = shards or exchange_qkv_forward(*groups.project(i), plan)
        grad_out = exchange_out_backward(outputs.part(i), plan)
        query, key, value = attention.attend_backward(grad_out, query, key, value, out, lse, plan)
        del shards, grad_out, out, lse
        grad_parts = exchange_qkv_backward(query, key, value, plan, *heads)
        del query, key, value
        groups.add(i, grad_parts)
        del grad_parts


def _place(whole: Tensor | None, part: Tensor, index: int, count: int) -> Tensor:
    """Put the index-th of `count` equal groups of heads into [S, heads, E], which the first one makes; one alone is whole."""
    if count == 1:
        return part
    heads = part.shape[1]
    if whole is None:
        whole = part.new_empty(part.shape[0], count * heads, part.shape[2])
    whole[:, index * heads : (index + 1) * heads] = part
    return whole


def _take(ctx: Any) -> tuple[Tensor, list[_Chunk], Tensor | None]:
    """Get what the layer kept (input, chunks, out), and let the graph forget it."""
    kept, group = ctx.kept, ctx.group
    if kept is None:
        raise RuntimeError(
            "a layer's backward ran twice on one forward; what it kept is gone, so run forward again"
        )
    ctx.kept = ctx.group = None
    hidden = group.get(kept[0])
    chunks = (
        [
            _Chunk(c.heads, group.get(c.out), group.get(c.lse), tuple(map(group.get, c.shards)))
            for c in kept[1]
        ]
        if kept[1:]
        else []
    )
    return hidden, chunks, group.get(kept[2]) if kept[2:] else None


class _AllHeads:
    """Be HeadGroups where project runs as it is: all heads at once, then cut. `run` is what `stage` runs in backward."""

    def __init__(
        self, run: Callable[[], Sequence[Tensor]], count: int, stage: "_Stage | None" = None
    ) -> None:
        self._run, self._count, self._stage = run, count, stage
        self._qkv: Sequence[Tensor] = ()
        self._grads: list[Tensor | None] = [None] * 3

    def project(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self._qkv or self._run()
        self._qkv = qkv if self._count > 1 else ()  # a single group is asked for once
        query, key, value = (x.chunk(self._count, 1)[index] for x in qkv)
        return query, key, value

    def add(self, index: int, grads: Sequence[Tensor]) -> None:
        self._grads = [
            _place(whole, part, index, self._count) for whole, part in zip(self._grads, grads)
        ]

    def gradients(self) -> tuple[Tensor, dict[int, Tensor]]:
        assert self._stage is not None
        if not self._stage.has_run:
            self._run()
        self._qkv = ()
        (grad,), found = self._stage.gradients(*(g for g in self._grads if g is not None))
        return grad, {id(p): g for p, g in zip(self._stage.parameters, found)}


class _AllOutputs:
    """Be OutputGroups where output runs as it is: the gradient of all heads at once, then cut."""

    def __init__(
        self, stage: "_Stage", run: Callable[[Tensor, Tensor], Tensor], count: int
    ) -> None:
        self._stage, self._run, self._count = stage, run, count
        self._pieces: list[Tensor] = []

    def run(self, hidden: Tensor, attended: Tensor) -> Tensor:
        (middle,) = self._stage.run(self._run, (hidden, attended))
        return middle

    def gradients(self, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        (grad_hidden, grad_attended), found = self._stage.gradients(grad)
        self._pieces = list(grad_attended.chunk(self._count, 1))
        return grad_hidden, found

    def part(self, index: int) -> Tensor:
        return self._pieces.pop(0)


class _Stage:
    """Repeat one stage of a layer with a graph of its own, then take its gradients."""

    def __init__(self, random: Any, parameters: Sequence[nn.Parameter]) -> None:
        self.random, self.parameters = random, parameters
        self.has_run = False

    def run(self, function: Any, inputs: Sequence[Tensor], *others: Any) -> tuple[Tensor, ...]:
        """Call function(*inputs, *others); returns its outputs without their graph."""
        self.has_run = True
        self._inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), replay(self.random):
            outputs = function(*self._inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._edges = [
            get_gradient_edge(x) for x in outputs
        ]  # the graph's ends without the tensors
        return tuple(x.detach() for x in outputs)

    def gradients(self, *grads: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of inputs and of parameters, zeros where unused, and drop the graph."""
        wanted = (*self._inputs, *self.parameters)
        found = torch.autograd.grad(
            self._edges, wanted, grads, allow_unused=True, materialize_grads=True
        )
        count = len(self._inputs)
        self._inputs, self._edges = [], []
        return list(found[:count]), list(found[count:])


def kept_bytes(
    level: str,
    *,
    width: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_size: int = 2,
    exchanged: bool = True,
) -> int:
    """Count the bytes per local token that one layer's graph keeps, weights aside; the log-sum-exp is float32.

    `exchanged` says whether there is more than one sequence-parallel rank: out then exists beside out'. kv heads that
    are sent to several ranks count once; add their copies where kv heads are fewer than ranks. For "none" it is the
    fused halves' count; wrapped projections keep more.
    """
    check_level(level)
    out, shards = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    kept = width
    if level == "pair":
        return width * element_size // 2
    if level != "block":
        kept += out
    if level in ("keep_exchange", *AUTOGRAD):
        kept += shards + out * exchanged
    if level in AUTOGRAD:
        kept += width + (2 * intermediate if level == "none" else 0)
    return kept * element_size + 4 * heads * (level != "block")


def kept_tensors(level: str, head_chunks: int = 1) -> int:
    """Count the tensors that one layer keeps at a level that may leave for the host: `_Layer`'s, with q, k and v as three."""
    each_chunk = {"pair": 0, "block": 0, "keep_attention": 2, "keep_exchange": 5}[level]
    return 1 + each_chunk * head_chunks + (level == "keep_exchange")
