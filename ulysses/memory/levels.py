"""The memory levels: what a layer keeps between forward and backward, and what it computes again.

    hidden -project-> heads -to_heads-> shards -mix-> results -to_tokens-> rows -output-> middle -feed_forward-> hidden

    level            kept                                computed again in backward
    none             everything, by ordinary autograd    nothing
    keep_attention   the layer's input, mix's results    all but mix (and feed_forward's last product)
    block            the layer's input                   the same and mix
    pair             one input for two layers            the same and the first layer's whole forward pass

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's
parameters once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile. At
"keep_attention" that happens before q, k and v exist again.

A layer offers its mixer; `project(hidden, rope)`, which returns hidden too, so that one gradient comes back for both of
its uses; `output(hidden, rows)`; and `feed_forward`, as `feed_forward_tiles(rows)` and
`feed_forward_gradients(rows, grad)`. `stage_parameters()` are the trained parameters of project, mix, output and
feed_forward. Random numbers (dropout in an adapter) are drawn again as they were.

A Mixer mixes tokens, in steps that a layer's node runs, and runs again, one by one. A step and its `_backward`
communicate alike on all ranks of the sequence-parallel group, and record no graph; `project`, `mix` and `output` record
one:

    project(hidden, norm, rope)      what is sent to the heads' ranks, one tensor of local rows each, and `hidden`, the
                                     layer's input
    mix(*heads, plan)                to_heads, mix_forward and to_tokens in one
    output(mixed, hidden, norm)      what the layer adds to its input [S, D], of the mix's local rows and of that input

    to_heads(heads, plan)            whole documents of some heads, the shards, of local rows of all heads
    to_heads_backward(grads, plan)   the gradients of local rows from those of the shards
    mix_forward(shards, plan)        the output, and what backward needs besides the shards; "keep_attention" keeps both
    mix_backward(grad, shards, results, plan)
                                     the gradients of the shards, and of the trained parameters of the mix itself
    to_tokens(out, plan)             the output on its tokens' ranks
    to_tokens_backward(grad, plan)   the gradients of local rows where the output came from

    has_gate                         whether `output` makes a gate of the layer's input
    is_watched                       whether only a call of the module, forward(normalised rows, rope, plan), runs
                                     somebody's hook
    output_is_fresh                  whether nobody else may hold what `output` returns
    stages                           the modules and parameters of project, of the mix itself and of output
    fits_graphs(device, dtype)       whether a CUDA graph may run the mix for packs of other documents than those it was
                                     recorded with

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.offload import CHUNK_BYTES, Group, Offloader
from ulysses.memory.size import LayerSize
from ulysses.memory.tiling import TILE_ROWS

LEVELS = ("none", "keep_attention", "block", "pair")  # the fastest first, which keeps most
Rope = tuple[Tensor, Tensor]
# of a module, which only a call of the module runs
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
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


def kept_bytes(level: str, layer: LayerSize, element_size: int) -> float:
    """Return the bytes that a layer's graph keeps for each local row at a level, weights aside."""
    D, mixer, feed_forward = layer.width, layer.mixer, layer.feed_forward
    kept, exact = D / 2 if level == "pair" else D, 0.0
    if level in ("none", "keep_attention"):
        kept, exact = kept + mixer.results, mixer.exact
    if level == "none":  # and between the halves
        kept += D * (1 + layer.norms_after) + mixer.kept + feed_forward.kept
        exact += feed_forward.exact
    return element_size * kept + 4 * exact


def pinned_bytes(level: str, layer: LayerSize, kept: float) -> float:
    """Return the most host bytes that what a layer keeps takes: any tensor's last chunk may stay partly empty."""
    return kept + CHUNK_BYTES * (1 + layer.mixer.tensors * (level == "keep_attention"))


def computed_again(level: str, layer: LayerSize, is_full: bool) -> tuple[float, float]:
    """Return what backward repeats at a level: parameters that each row meets once more, and passes of the mix."""
    if level == "none":
        return 0.0, 0.0
    # the last product of the feed-forward is repeated for adapters only
    products = layer.mixer.parameters + layer.feed_forward.met * (2 / 3 if is_full else 1)
    if level == "pair":  # and the whole forward pass of every second layer
        return products + layer.met / 2, 1.5
    return products, float(level == "block")


class Pair:
    """Two neighbouring layers of level "pair"; the second one's input is computed again from the first one's.

    That halves what the level "block" keeps, for half a forward pass more. The first layer is called as a module once
    more, without a graph, so that ZeRO-3 gathers and releases its parameters as in any forward pass.
    """

    def __init__(self, first: nn.Module) -> None:
        self.first = first
        # the first layer's group, the state of the generators, and its rotary table
        self.kept: Any = None

    def second_input(self, plan: Any) -> Tensor:
        """Return the first layer's output, computed again."""
        group, random, rope = self.kept
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
        if pair is not None and not is_second:
            pair.kept = group, random[0], rope
        ctx.call = layer, rope, plan, pair
        ctx.kept = group, random
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, rope, plan, pair = ctx.call
        group, random = ctx.kept
        ctx.kept = None
        hidden, *results = group.tensors() or [pair.second_input(plan)]
        if pair is not None:
            pair.kept = None
        del group
        mixer = layer.mixer
        in_project, _, in_output, _ = layer.stage_parameters()

        def exchanged() -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
            (*heads, _), gradients = _again(
                layer.project, in_project, random[0], [hidden], rope
            )
            return mixer.to_heads(heads, plan), gradients

        mix_was_kept = bool(results)
        if not mix_was_kept:
            shards, through_project = exchanged()
            results = mixer.mix_forward(shards, plan)
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
        return None, None, None, None, grad_hidden, *of_parameters


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
