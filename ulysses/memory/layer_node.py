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
from torch.autograd.graph import get_gradient_edge

from losses.precision import refuse_second_derivative
from ulysses.memory.levels import Rope
from ulysses.memory.offload import OffloadedTensors
from ulysses.parallel.attention import Attention
from ulysses.parallel.layout import AttentionPlan, Tensors

RandomState = tuple[Tensor, Tensor | None]  # of the CPU generator, and of the current GPU's


class Mixer(Protocol):
    """Mix tokens: what is projected before the attention, softmax or linear, and after it, with a graph."""

    attention: Attention

    @property
    def attention_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the attention itself."""

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may run the mix for packs of other documents than those it was recorded with."""

    def project(
        self, hidden: Tensor, norm: Callable[[Tensor], Tensor], rope: Rope
    ) -> tuple[Tensor, ...]:
        """Return three tensors of local rows that are sent to the heads' ranks, and `hidden`, the layer's input."""

    def output(self, mixed: Tensor, hidden: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a new tensor that the layer adds to its input [S, D], from the rows of the mix and from that input."""


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


class LayerNode(torch.autograd.Function):
    """Run a DecoderLayer of models/layers.py, hidden [S, D] -> [S, D], at its level `recompute`, which is not "none".

    What the level keeps goes to host memory if there is a `layer.offloader`. The gradients are those of ordinary
    autograd. `parameters` are `layer.trained_parameters`. All ranks use the same level for a layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        rope: Rope,
        plan: AttentionPlan,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        saved = OffloadedTensors(layer.offloader) if layer.offloader else SavedTensors()
        saved.save(hidden)
        mixer, exchange = layer.mixer, layer.mixer.attention.exchange(plan)
        before_project = random_state()
        *heads, _ = layer.project(hidden, rope)
        shards = exchange.to_heads(heads)
        del heads
        results = mixer.attention.attend_forward(shards, plan, *mixer.attention_parameters)
        del shards
        if layer.recompute == "keep_attention":
            for result in results:
                saved.save(result)
        mixed = exchange.to_tokens(results[0])
        del results
        before_output = random_state()
        middle = layer.output(hidden, mixed)
        del mixed
        before_second_half = random_state()
        result = layer.second_half.add_tiles(middle)
        saved.close()
        ctx.rest = layer, rope, plan, saved
        ctx.random_states = before_project, before_output, before_second_half
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        layer, rope, plan, saved = ctx.rest
        del ctx.rest
        before_project, before_output, before_second_half = ctx.random_states
        hidden, *results = saved.tensors()
        del saved
        mixer, exchange = layer.mixer, layer.mixer.attention.exchange(plan)
        parameters = layer.trained_parameters
        mix_parameters = mixer.attention_parameters
        sums: dict[Tensor, Tensor] = {}

        def add(tensors: Tensors, grads: Sequence[Tensor | None]) -> None:
            """Add the gradients of one part of the layer; several parts may use a parameter."""
            for tensor, of_tensor in zip(tensors, grads):
                if of_tensor is not None:
                    earlier = sums.get(tensor)
                    sums[tensor] = of_tensor if earlier is None else earlier + of_tensor

        def recompute_shards() -> tuple[Tensors, Callable[..., Any]]:
            (*heads, _), project_backward = _recompute(
                layer.project, parameters, before_project, [hidden], rope
            )
            return exchange.to_heads(heads), project_backward

        mix_was_kept = bool(results)
        if not mix_was_kept:
            shards, project_backward = recompute_shards()
            results = [*mixer.attention.attend_forward(shards, plan, *mix_parameters)]
        inputs = [hidden, exchange.to_tokens(results[0])]
        (middle,), output_backward = _recompute(layer.output, parameters, before_output, inputs)
        del inputs
        with replay(before_second_half):
            second_half = layer.second_half
            grad, of_parameters = second_half.gradients(middle, grad)
        add(second_half.tensors, of_parameters)
        del middle, second_half  # which holds the masks of dropout
        (grad_hidden, grad_mixed), of_parameters = output_backward(grad)
        add(parameters, of_parameters)
        del grad
        grad_out = exchange.to_tokens_backward(grad_mixed)
        del grad_mixed
        if mix_was_kept:
            shards, project_backward = recompute_shards()
        grads, of_parameters = mixer.attention.attend_backward(
            grad_out, shards, results, plan, *mix_parameters
        )
        add([p for p in mix_parameters if p.requires_grad], of_parameters)
        del shards, grad_out, results
        grads = exchange.to_heads_backward(grads)
        (grad_hidden,), of_parameters = project_backward(*grads, grad_hidden)
        add(parameters, of_parameters)
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
