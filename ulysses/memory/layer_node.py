"""Run a layer at a level that keeps less than ordinary autograd, and compute the rest again in backward.

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's
parameters once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile. At
"keep_attention" that happens before q, k and v exist again.

Random numbers (dropout in an adapter) are drawn again as they were.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from losses.precision import at_least_float32
from ulysses.memory.levels import Rope
from ulysses.memory.tiling import tiles
from ulysses.parallel.layout import AttentionPlan, Context, Tensors

if TYPE_CHECKING:
    from ulysses.memory.offload import Group, Offloader

Random = tuple[Tensor, Tensor | None]


class Mixer(Protocol):
    """Mix tokens, in steps that a layer's node runs, and runs again, one by one.

    A step and its `_backward` communicate alike on all ranks of the sequence-parallel group, and record no graph;
    `project`, `mix` and `output` record one.

    has_gate: whether `output` makes a gate of the layer's input.
    """

    has_gate: bool

    @property
    def stages(self) -> tuple[Sequence[nn.Module | nn.Parameter], ...]:
        """The modules and parameters of project, of the mix itself and of output."""

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may run the mix for packs of other documents than those it was recorded with."""

    def project(
        self, hidden: Tensor, norm: Callable[[Tensor], Tensor], rope: Rope
    ) -> tuple[Tensor, ...]:
        """Return what is sent to the heads' ranks, one tensor of local rows each, and `hidden`, the layer's input."""

    def mix(self, *heads: Tensor, plan: AttentionPlan) -> Tensor:
        """Do to_heads, mix_forward and to_tokens in one."""

    def output(self, mixed: Tensor, hidden: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what the layer adds to its input [S, D], of the mix's rows and of that input; nobody else holds it."""

    def to_heads(self, heads: Tensors, plan: AttentionPlan) -> Tensors:
        """Turn local rows of all heads into whole documents of some heads, the shards."""

    def to_heads_backward(self, grads: Tensors, plan: AttentionPlan) -> Tensors:
        """Return the gradients of local rows from those of the shards."""

    def mix_forward(self, shards: Tensors, plan: AttentionPlan) -> Tensors:
        """Return the output, and what backward needs besides the shards; "keep_attention" keeps both."""

    def mix_backward(
        self,
        grad: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of the shards, and of the trained parameters of the mix itself."""

    def to_tokens(self, out: Tensor, plan: AttentionPlan) -> Tensor:
        """Bring the output to its tokens' ranks."""

    def to_tokens_backward(self, grad: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the gradients of local rows where the output came from."""


class Layer(Protocol):
    """What the node asks of its layer.

    recompute: its level. offloader: where what is kept waits, if not on the GPU.
    """

    recompute: str
    offloader: "Offloader | None"

    @property
    def mixer(self) -> Mixer: ...

    def project(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return what the mixer sends, and hidden too, so that one gradient comes back for both of its uses."""

    def output(self, hidden: Tensor, mixed: Tensor) -> Tensor: ...

    def feed_forward_tiles(self, rows: Tensor) -> Tensor: ...

    def feed_forward_gradients(self, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensors]: ...

    def stage_parameters(self) -> tuple[list[nn.Parameter], ...]:
        """Return the trained parameters of project, mix, output and feed_forward."""


class Kept:
    """One layer's tensors from its forward to its backward; an Offloader's Group moves them to the host meanwhile."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def keep(self, tensor: Tensor) -> None:
        """Add a tensor."""
        self._tensors.append(tensor)

    def close(self) -> None:
        """End the layer's forward."""

    def tensors(self) -> list[Tensor]:
        """Return what was kept."""
        return self._tensors


LayerContext = Context[tuple[Layer, Rope, AttentionPlan, "Kept | Group", list[Random]]]


class LayerNode(torch.autograd.Function):
    """Run a layer, hidden [S, D] -> [S, D], at the level `layer.recompute`, which is not "none".

    What the level keeps goes to host memory if there is a `layer.offloader`. The gradients are those of ordinary
    autograd. `parameters` are those of `layer.stage_parameters()`. All ranks use the same level for a layer.
    """

    @staticmethod
    def forward(
        ctx: LayerContext,
        layer: Layer,
        rope: Rope,
        plan: AttentionPlan,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        group = layer.offloader.group() if layer.offloader else Kept()
        group.keep(hidden)
        mixer = layer.mixer
        random = [random_state()]
        *heads, _ = layer.project(hidden, rope)
        shards = mixer.to_heads(heads, plan)
        del heads, _
        results = mixer.mix_forward(shards, plan)
        del shards
        if layer.recompute == "keep_attention":
            for result in results:
                group.keep(result)
        mixed = mixer.to_tokens(results[0], plan)
        del results
        random.append(random_state())
        middle = layer.output(hidden, mixed)
        del mixed
        random.append(random_state())
        result = layer.feed_forward_tiles(middle)
        group.close()
        ctx.rest = layer, rope, plan, group, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, rope, plan, group, random = ctx.rest
        del ctx.rest
        hidden, *results = group.tensors()
        del group
        mixer = layer.mixer
        in_project, _, in_output, _ = layer.stage_parameters()

        def exchanged() -> tuple[Tensors, Callable[..., Any]]:
            (*heads, _), gradients = _again(
                layer.project, in_project, random[0], [hidden], rope
            )
            return mixer.to_heads(heads, plan), gradients

        mix_was_kept = bool(results)
        if not mix_was_kept:
            shards, through_project = exchanged()
            results = [*mixer.mix_forward(shards, plan)]
        inputs = [hidden, mixer.to_tokens(results[0], plan)]
        (middle,), through_output = _again(layer.output, in_output, random[1], inputs)
        del inputs
        with replay(random[2]):
            grad, grads_feed_forward = layer.feed_forward_gradients(middle, grad)
        del middle
        (grad_hidden, grad_mixed), grads_output = through_output(grad)
        del grad
        grad_out = mixer.to_tokens_backward(grad_mixed, plan)
        del grad_mixed
        if mix_was_kept:
            shards, through_project = exchanged()
        grads, grads_mix = mixer.mix_backward(grad_out, shards, results, plan)
        del shards, grad_out, results
        grads = mixer.to_heads_backward(grads, plan)
        (grad_hidden,), grads_project = through_project(*grads, grad_hidden)
        of_parameters = *grads_project, *grads_mix, *grads_output, *grads_feed_forward
        return None, None, None, grad_hidden, *of_parameters


def _again(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    parameters: Sequence[nn.Parameter],
    random: Random,
    inputs: list[Tensor],
    *others: object,
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
        found = torch.autograd.grad(
            edges, wanted, grads, allow_unused=True, materialize_grads=True
        )
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


# ---------------------------------------------------------------- gradients tile by tile


def tile_gradients(
    function: Callable[[Tensor], Tensor],
    rows: Tensor,
    grad: Tensor,
    parameters: Tensors,
    tile: int,
) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward of each tile; return the gradients of `rows` and of `parameters`.

    Parameters that are not used get zeros; sums as in `sum_tiles`.
    """

    def of_tile(part: slice) -> Tensors:
        leaf = rows[part].detach().requires_grad_()
        with torch.enable_grad():
            out = function(leaf)
        return torch.autograd.grad(
            out, (leaf, *parameters), grad[part], allow_unused=True, materialize_grads=True
        )

    return sum_tiles(of_tile, rows, parameters, tile)


def sum_tiles(
    gradients: Callable[[slice], Tensors],
    rows: Tensor,
    parameters: Tensors,
    tile: int,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `rows` and of `parameters`; `gradients` returns a tile's, first those of its rows.

    Parameter gradients of several tiles are summed in float32 or better.
    """
    sums: list[Tensor] = []
    for part in tiles(len(rows), tile):
        of_part, *found = gradients(part)
        if tile >= len(rows):
            grad_rows, sums = of_part, found
            break
        if part.start == 0:
            grad_rows, sums = torch.empty_like(rows), [at_least_float32(g) for g in found]
        else:
            for total, g in zip(sums, found):
                total.add_(g)
        del found
        grad_rows[part] = of_part
    return grad_rows, [total.to(p.dtype) for total, p in zip(sums, parameters)]
