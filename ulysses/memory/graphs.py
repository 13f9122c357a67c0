"""Run all layers as two CUDA graphs, in steps so small that the host could not launch their kernels fast enough.

    forward     hidden, ropes, documents -copy--> | graph: every layer's forward  | --> hidden
    backward    gradient ---------------copy--> | graph: every layer's backward | --> gradient, every parameter's .grad

Graphs are recorded for each size. Rows and documents are padded to a few sizes: the additional rows form a document of
their own whose gradient is zero, and the additional documents are empty. The first step of a size runs without a graph,
the second records one. A graph reads the weights where they were when it was recorded, so they must stay in place
(zero/resident.py). It keeps for backward what ordinary autograd keeps.

Shapes: S rows, D width, E head dim.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from losses.precision import refuse_second_derivative
from ulysses.memory.levels import Rope
from ulysses.parallel.layout import AttentionPlan, DocumentBounds, VarlenCall

MOST_SIZES = 24  # each recorded size keeps the memory of its inputs and results
SMALLEST = 128  # rows, and the length of the longest document
# the hooks of a layer, which a graph would not run
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
Ropes = Mapping[str, Rope]  # by the rotary kind of a layer


def padded(count: int, smallest: int, parts: int) -> int:
    """Round up to a multiple of the power of two that is at most `count`, divided by `parts`."""
    power = 1 << (count.bit_length() - 1)
    unit = max(smallest, power // parts)
    return -(-count // unit) * unit


class LayerGraphs:
    """The graphs of a decoder's layers, which keep everything for backward (level "none")."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers: Any = layers
        self._hooks: list[dict] = []
        self._parameters: list[nn.Parameter] = []
        self._layers_fit = False
        self._addresses: list[int] = []  # of the parameters
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._seen: set[tuple[int, ...]] = set()
        # The graphs of all sizes write the gradients to the same memory, and share one pool for what else they need.
        self.grads: dict[nn.Parameter, Tensor] = {}
        self.pool = torch.cuda.graph_pool_handle()
        # The pool holds what one forward pass keeps until its backward: no other graph may run while that pass lives.
        self._pending_pass: Any = lambda: None

    def __call__(self, hidden: Tensor, ropes: Ropes, plan: AttentionPlan) -> Tensor | None:
        """Return the layers' output [S, D], or None if they must run one by one this time."""
        if not self._hooks:
            self._hooks = [getattr(m, kind) for m in self.layers for kind in HOOKS]
            self._parameters = list(self.layers.parameters())
            # Whether a graph may run every layer for other documents than those it was recorded with: asked once,
            # because the answer stays the same and in small models every bit of the host's work counts.
            self._layers_fit = hidden.is_cuda and all(
                x.mlp.fits_graphs and x.mixer.fits_graphs(hidden.device, hidden.dtype)
                for x in self.layers
            )
        alone = plan.mesh.sequence_parallel_size == 1 and not plan.prefix_calls
        if not alone or self._pending_pass() or any(self._hooks) or not self._layers_fit:
            return None
        addresses = [p.data_ptr() for p in self._parameters]
        if addresses != self._addresses:
            self._recorded.clear()
            # the allocator forgets a pool with its last graph
            self.pool = torch.cuda.graph_pool_handle()
            self._addresses = addresses
        documents, rows = plan.calls[0].documents, len(hidden)
        total = padded(rows, SMALLEST, 8)
        bounds = len(documents.cu_q)
        if total > rows:
            bounds += 1  # of the document of the additional rows
        longest = max(documents.max_q, total - rows)
        size = total, padded(bounds, 8, 1), padded(longest, SMALLEST, 1)
        if size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._recorded:
            if len(self._recorded) == MOST_SIZES:
                return None
            if not self._recorded:
                self.grads = {
                    p: torch.empty_like(p) for p in self._parameters if p.requires_grad
                }
            self._recorded[size] = _Recorded(self, hidden, ropes, plan, size)
        this_pass = _ForwardPass()
        self._pending_pass = weakref.ref(this_pass)
        return _Replay.apply(hidden, ropes, documents.cu_q, self._recorded[size], this_pass)


@contextmanager
def other_leaves(layers: nn.Module, grads: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let other parameters with the same memory stand in for those of the layers, and for the keys of `grads`.

    While the loss of an ordinary pass is still referred to, its autograd graph holds the nodes that accumulate the
    parameters' gradients. They belong to the stream of that pass, which a recording must not touch. They are exchanged
    in the modules' tables, as torch.func.functional_call does it, because the backward needs the same ones as the
    forward: functional_call puts the old ones back after each call, and would run hooks.
    """
    tables = [m._parameters for m in layers.modules()]
    old_tables, old_grads = [dict(table) for table in tables], dict(grads)
    try:
        for table in tables:
            for name, p in table.items():
                if p is not None:
                    table[name] = alias = nn.Parameter(p.detach(), p.requires_grad)
                    if p.requires_grad:
                        grads[alias] = grads.pop(p)
        yield
    finally:
        for table, old in zip(tables, old_tables):
            table.update(old)
        grads.clear()
        grads.update(old_grads)


class _ForwardPass:
    """Lives as long as the autograd graph of a forward pass."""


class _Recorded:
    """Two graphs of one size, with the memory of their inputs and results."""

    def __init__(
        self,
        graphs: LayerGraphs,
        hidden: Tensor,
        ropes: Ropes,
        plan: AttentionPlan,
        size: tuple[int, ...],
    ) -> None:
        rows, bounds, longest = size
        self.hidden = hidden.new_zeros(rows, *hidden.shape[1:])
        self.ropes = {
            kind: tuple(x.new_zeros(rows, *x.shape[1:]) for x in rope)
            for kind, rope in ropes.items()
        }
        cu = plan.calls[0].documents.cu_q
        self.bounds = cu.new_full((bounds,), rows)
        documents = DocumentBounds(self.bounds, self.bounds, longest, longest)
        all_rows = slice(0, rows)
        self.plan = replace(
            plan,
            cu_seqlens=[0, rows],
            calls=[VarlenCall(all_rows, all_rows, documents, causal=True)],
            row_sets=[[(0, rows)]],
        )
        self.grads, self.grad = graphs.grads, torch.zeros_like(self.hidden)
        self.set(hidden.detach(), ropes, cu)
        self.save_untaken_grads()
        # kernels are compiled before anything is recorded
        self._backward(self._forward(graphs.layers[:1]))
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with other_leaves(graphs.layers, graphs.grads):
            with torch.cuda.graph(self.forward, graphs.pool, capture_error_mode="thread_local"):
                kept = self._forward(graphs.layers)
            self.out = kept[-1][2].detach()  # of the last layer
            with torch.cuda.graph(
                self.backward, graphs.pool, capture_error_mode="thread_local"
            ):
                self.grad_hidden = self._backward(kept)

    def _forward(self, layers: Any) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Run layers, and return each with its input and its output, which has a graph of its own."""
        kept, hidden = [], self.hidden
        for layer in layers:
            leaf = hidden.detach().requires_grad_()
            # not the module's call, whose hooks belong to passes that gather and reduce layer by layer
            hidden = layer.forward(leaf, self.ropes[layer.kind.rotary], self.plan)
            kept.append((layer, leaf, hidden))
        return kept

    def _backward(self, kept: list[tuple[nn.Module, Tensor, Tensor]]) -> Tensor:
        """Write the gradients of all parameters, and return that of the first layer's input."""
        grad = self.grad
        while kept:  # popped, so that a layer's tensors are free when the next layer works
            layer, leaf, out = kept.pop()
            trained = [p for p in layer.parameters() if p.requires_grad]
            grad, *parameter_grads = torch.autograd.grad(out, (leaf, *trained), grad)
            if trained:
                torch._foreach_copy_([self.grads[p] for p in trained], parameter_grads)
        return grad

    def save_untaken_grads(self) -> None:
        """Copy gradients that nobody took since an earlier pass, before they are overwritten."""
        for parameter, grad in self.grads.items():
            if parameter.grad is grad:
                parameter.grad = grad.clone()

    @torch.no_grad()
    def set(self, hidden: Tensor, ropes: Ropes, cu: Tensor) -> None:
        """Copy the inputs of a pass to where the graphs read them."""
        self.hidden[: len(hidden)] = hidden
        for kind, rope in ropes.items():
            for target, value in zip(self.ropes[kind], rope):
                target[: len(value)] = value
        self.bounds.fill_(len(self.hidden))
        self.bounds[: len(cu)] = cu


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        ropes: Ropes,
        cu: Tensor,
        recorded: _Recorded,
        this_pass: _ForwardPass,
    ) -> Tensor:
        recorded.set(hidden, ropes, cu)
        recorded.forward.replay()
        ctx.rest = recorded, this_pass, len(hidden)
        return recorded.out[: len(hidden)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        recorded, this_pass, rows = ctx.rest
        del ctx.rest, this_pass  # from here on another pass may run
        recorded.grad[:rows] = grad
        recorded.grad[rows:] = 0
        recorded.save_untaken_grads()
        recorded.backward.replay()
        for parameter, new in recorded.grads.items():
            old = parameter.grad
            parameter.grad = new if old is None else old + new
        return recorded.grad_hidden[:rows], None, None, None, None
