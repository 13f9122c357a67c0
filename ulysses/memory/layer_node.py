"""Run a layer at a level that keeps less than ordinary autograd, and compute the rest again in backward.

All levels but "none" are one autograd.Function that covers the whole layer, so that ZeRO-3 gathers the layer's
parameters once per direction and reduces each gradient once. Its backward runs feed_forward tile by tile; at
"keep_attention" it does so before it computes q, k and v again.

The second forward draws the same random numbers (dropout in an adapter) as the first.

Shapes: S local tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ulysses.memory.levels import Rope
from ulysses.memory.offload import OffloadedTensors
from ulysses.parallel.layout import AttentionPlan, Context, Tensors

RandomState = tuple[Tensor, Tensor | None]  # of the CPU generator, and of the current GPU's


class Mixer(Protocol):
    """Mix tokens, in steps that a layer's node runs, and runs again, one by one.

    All ranks of the sequence-parallel group call a step and its `_backward` together, and neither records a graph;
    `project` and `output` record one.
    """

    @property
    def mix_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the mix itself, which project and output do not use."""

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may run the mix for packs of other documents than those it was recorded with."""

    def project(
        self, hidden: Tensor, norm: Callable[[Tensor], Tensor], rope: Rope
    ) -> tuple[Tensor, ...]:
        """Return three tensors of local rows that are sent to the heads' ranks, and `hidden`, the layer's input."""

    def output(self, mixed: Tensor, hidden: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a new tensor that the layer adds to its input [S, D], from the rows of the mix and from that input."""

    def to_heads(self, heads: Tensors, plan: AttentionPlan) -> Tensors:
        """Turn local rows of all heads into whole documents of some heads, the shards."""

    def to_heads_backward(self, grads: Tensors, plan: AttentionPlan) -> Tensors:
        """Return the gradients of local rows from those of the shards."""

    def mix_forward(self, shards: Tensors, plan: AttentionPlan) -> Tensors:
        """Return the output, and what backward needs besides it and the shards; "keep_attention" keeps all of it.

        If backward needs nothing but the shards, the output stands alone.
        """

    def mix_backward(
        self,
        grad: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of the shards, and of `mix_parameters`."""

    def to_tokens(self, out: Tensor, plan: AttentionPlan) -> Tensor:
        """Bring the output to its tokens' ranks."""

    def to_tokens_backward(self, grad: Tensor, plan: AttentionPlan) -> Tensor:
        """Send the gradients of local rows to where the output came from."""


class SavedTensors:
    """One layer's tensors from its forward to its backward; OffloadedTensors do the same in host memory."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def save(self, tensor: Tensor) -> None:
        """Add a tensor."""
        self._tensors.append(tensor)

    def close(self) -> None:
        """End the layer's forward."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return self._tensors


LayerContext = Context[
    tuple[Any, Rope, AttentionPlan, SavedTensors | OffloadedTensors, list[RandomState]]
]


class LayerNode(torch.autograd.Function):
    """Run a DecoderLayer of models/layers.py, hidden [S, D] -> [S, D], at its level `recompute`, which is not "none".

    What the level keeps goes to host memory if there is a `layer.offloader`. The gradients are those of ordinary
    autograd. `parameters` are `layer.trained`. All ranks use the same level for a layer.
    """

    @staticmethod
    def forward(
        ctx: LayerContext,
        layer: Any,
        rope: Rope,
        plan: AttentionPlan,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        saved = layer.offloader.saved_tensors() if layer.offloader else SavedTensors()
        saved.save(hidden)
        mixer = layer.mixer
        random_states = [random_state()]
        *heads, _ = layer.project(hidden, rope)
        shards = mixer.to_heads(heads, plan)
        del heads, _
        results = mixer.mix_forward(shards, plan)
        del shards
        if layer.recompute == "keep_attention":
            for result in results:
                saved.save(result)
        mixed = mixer.to_tokens(results[0], plan)
        del results
        random_states.append(random_state())
        middle = layer.output(hidden, mixed)
        del mixed
        random_states.append(random_state())
        result = layer.second_half.add_tiles(middle)
        saved.close()
        ctx.rest = layer, rope, plan, saved, random_states
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, rope, plan, saved, random_states = ctx.rest
        del ctx.rest
        hidden, *results = saved.tensors()
        del saved
        mixer = layer.mixer
        parameters = layer.trained

        def recompute_shards() -> tuple[Tensors, Callable[..., Any]]:
            (*heads, _), project_backward = _recompute(
                layer.project, parameters, random_states[0], [hidden], rope
            )
            return mixer.to_heads(heads, plan), project_backward

        mix_was_kept = bool(results)
        if not mix_was_kept:
            shards, project_backward = recompute_shards()
            results = [*mixer.mix_forward(shards, plan)]
        inputs = [hidden, mixer.to_tokens(results[0], plan)]
        (middle,), output_backward = _recompute(
            layer.output, parameters, random_states[1], inputs
        )
        del inputs
        with replay(random_states[2]):
            second_half = layer.second_half
            grad, of_feed_forward = second_half.gradients(middle, grad)
        del middle
        (grad_hidden, grad_mixed), of_output = output_backward(grad)
        del grad
        grad_out = mixer.to_tokens_backward(grad_mixed, plan)
        del grad_mixed
        if mix_was_kept:
            shards, project_backward = recompute_shards()
        grads, of_mix = mixer.mix_backward(grad_out, shards, results, plan)
        del shards, grad_out, results
        grads = mixer.to_heads_backward(grads, plan)
        (grad_hidden,), of_project = project_backward(*grads, grad_hidden)
        sums: dict[Tensor, Tensor] = {}
        for parameter, of_parameter in (
            *zip(second_half.tensors, of_feed_forward),
            *zip(parameters, of_output),
            *zip(mixer.mix_parameters, of_mix),
            *zip(parameters, of_project),
        ):
            if of_parameter is not None:
                total = sums.get(parameter)
                sums[parameter] = of_parameter if total is None else total + of_parameter
        return None, None, None, grad_hidden, *(sums[p] for p in parameters)


def _recompute(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    parameters: Sequence[nn.Parameter],
    random: RandomState,
    inputs: list[Tensor],
    *others: object,
) -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
    """Call function(*inputs, *others), one part of a layer, with a graph of its own.

    Return its outputs without the graph, and its backward: a function that is called once with the outputs' gradients
    and returns those of inputs and of parameters, None where they are not used.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad(), replay(random):
        outputs = function(*leaves, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # edges keep the graph alive, but not the outputs
    edges = [get_gradient_edge(x) for x in outputs]

    def backward(*grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        count = len(leaves)
        results = torch.autograd.grad(edges, (*leaves, *parameters), grads, allow_unused=True)
        edges.clear()
        leaves.clear()
        return results[:count], results[count:]

    return tuple(x.detach() for x in outputs), backward


def random_state() -> RandomState:
    """Return the state of the CPU generator and of the current GPU's, for `replay`."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


@contextmanager
def replay(state: RandomState) -> Iterator[None]:
    """Run the block with the generators in that state; afterwards they continue as if it had not run."""
    cpu, cuda = state
    with torch.random.fork_rng([] if cuda is None else [torch.cuda.current_device()]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield
