"""Attention over the sequence-parallel group: exact, for any number of heads, ranks and tokens.

    q, k, v [S, heads, E]  --exchange-->  [T, heads/U, E]  --kernel-->  out', lse  --exchange-->  out [S, H, E]
       my tokens                             my heads                                                my tokens

The kernel's forward and backward are separate methods, so that recomputation can keep (out', lse) and run neither the
kernel's forward nor an all-to-all again. An attention sink is a key of every head without a value. No kernel knows it:
its logit is added to lse, the output is scaled by exp(lse without it - lse), and the kernel's backward with this output
and lse gives the exact gradients.

Letters: T packed tokens, S tokens on this rank, H query heads, K kv heads, E head dim, U head-parallel and R
row-parallel size.
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .dense import dense_plan
from .exchange import HeadExchange, Parts
from .kernels.choice import (
    RECURRING,
    VARLEN,
    check_name,
    kernel_backward,
    kernel_forward,
    resolve_kernel,
)
from .kernels.document import (
    ONE_DOCUMENT,
    SHORT,
    InputGradients,
    Inputs,
    Results,
    merge_attention,
)
from .layout import (
    AttentionPlan,
    Tensors,
    VarlenCall,
    head_layout,
    packed_plan,
    row_sets,
)
from .mesh import ParallelMesh

# Lengths of the documents of prove_kernel, and of its short ones: several tiles, none of them full, and a single token
PROOF_LENGTHS: tuple[int, ...] = (SHORT + 88, 1, 129)
SHORT_LENGTHS: tuple[int, ...] = (300, 1, 129)
# and of those that are one call of cuDNN, for which it makes plans in torch's place
PLANNED_LENGTHS: tuple[int, ...] = (RECURRING, RECURRING, 1)
# Kernels are compiled for a window, not for its size, so that one of so many tokens stands for all.
PROOF_WINDOW = 100
PROOF_ERROR = 2e-2  # relative to a tensor's norm; half-precision kernels reach 2e-3 to 4e-3


class NoExchange:
    """One process has all tokens and all heads: what HeadExchange sends stays as it is."""

    def unchanged(self, tensors: Any) -> Any:
        return tensors

    to_heads = to_heads_backward = to_tokens = to_tokens_backward = unchanged

    def my_columns(self, columns: Tensor, part: int) -> Tensor:
        return columns


Exchange = HeadExchange | NoExchange


def head_exchange(
    tensors: Sequence[Parts], plan: AttentionPlan, *, has_queries: bool = False
) -> Exchange:
    """Return the exchanges of a layer under a plan; the arguments are those of HeadExchange."""
    if plan.mesh.sequence_parallel_size == 1:
        return NoExchange()
    return HeadExchange(tensors, plan, has_queries=has_queries)


class Attention(Protocol):
    """Softmax or linear attention: what a rank computes for some heads of whole documents, its shards.

    `parameters` are those of the computation itself, such as a sink. Nothing here communicates or records a graph.
    reads_results: whether the backward reads the forward's results, and not only the shards.
    """

    reads_results: bool

    def exchange(self, plan: AttentionPlan) -> Exchange:
        """Return the exchanges around the computation, from `head_exchange`."""

    def attend_forward(
        self, shards: Tensors, plan: AttentionPlan, *parameters: Tensor
    ) -> Tensors:
        """Return the output, and then what backward needs besides the shards; "keep_attention" keeps all of it."""

    def attend_backward(
        self,
        grad: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
        *parameters: Tensor,
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of the shards, and of those parameters that are trained."""


HEADS = 3  # tensors of heads: q, k and v, or what linear attention has in their place


class AttendNode(torch.autograd.Function):
    """Exchange, attend and exchange, with a graph: AttendNode.apply(attention, plan, *heads, *parameters) -> [S, H, E].

    It keeps the shards, and the results if backward reads them.
    """

    @staticmethod
    def forward(
        ctx: Any, attention: Attention, plan: AttentionPlan, *tensors: Tensor
    ) -> Tensor:
        exchange, parameters = attention.exchange(plan), tensors[HEADS:]
        shards = exchange.to_heads(tensors[:HEADS])
        results = attention.attend_forward(shards, plan, *parameters)
        kept = results if attention.reads_results else ()
        ctx.save_for_backward(*parameters, *shards, *kept)
        ctx.attention, ctx.plan = attention, plan
        return exchange.to_tokens(results[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # it would be 0 without a word
        if torch.is_grad_enabled():
            raise RuntimeError(
                "UlyssesAttention has no second derivative; leave out create_graph=True"
            )
        attention, plan = ctx.attention, ctx.plan
        count = len(ctx.needs_input_grad) - 2 - HEADS
        saved = ctx.saved_tensors  # once: torch's checkpoint refuses a second reading
        parameters, saved = saved[:count], saved[count:]
        exchange = attention.exchange(plan)
        grads, of_trained = attention.attend_backward(
            exchange.to_tokens_backward(grad), saved[:HEADS], saved[HEADS:], plan, *parameters
        )
        more = iter(of_trained)
        of_parameters = [next(more) if p.requires_grad else None for p in parameters]
        return None, None, *exchange.to_heads_backward(grads), *of_parameters


class UlyssesAttention(nn.Module):
    """Attend to whole documents while every rank holds only its tokens. The module has no parameters.

    `kernel` is "auto" or a name from kernels/choice.py. `mesh=None` is plain attention in this process. Scores are
    multiplied by `softmax_scale`, head_dim^-0.5 by default; with a `window` a token attends to itself and the
    window - 1 tokens before it in its document. A call may say otherwise.
    Raises ValueError for an unknown kernel, and if the heads do not fit the mesh or the window has no token.
    """

    # for type checkers: nn.Module's returns Any
    __call__: Callable[..., Tensor]
    reads_results = True

    def __init__(
        self,
        mesh: ParallelMesh | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kernel: str = "auto",
        *,
        window: int | None = None,
        softmax_scale: float | None = None,
    ):
        super().__init__()
        check_name(kernel)
        self.window = _checked_window(window)
        self.softmax_scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.mesh = mesh or ParallelMesh()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kernel = kernel
        # Refuse heads that do not fit the mesh.
        head_layout(num_heads, num_kv_heads, self.mesh.head_parallel_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attend; returns the shape of `query`. All ranks of the sequence-parallel group call it together.

        Packed: query [S, H, E], key and value [S, K, E], with `plan` (`ShardedBatch.attention_plan`) or with the global
        `cu_seqlens` [N + 1] over all T tokens. A plan never makes the host wait for the device; cu_seqlens on a
        GPU does. Either way the ranks hold the tokens as `pack_shard` deals them: contiguous shards only where P
        divides the heads.
        Dense, for library users: [B, S/P, heads, E] in contiguous shards of P ranks, without plan and cu_seqlens, one
        sequence after the other (dense.py).
        `sink` [H] holds a logit of every query head, which takes its part of the softmax and adds nothing. Its gradient
        on a rank covers the rank's heads and rows, and is zero for other heads.
        """
        given = {
            "query": query,
            "key": key,
            "value": value,
            "cu_seqlens": cu_seqlens,
            "sink": sink,
        }
        for name, x in given.items():
            if not isinstance(x, Tensor | None):
                raise TypeError(
                    f"{name} is of type {type(x).__name__} but UlyssesAttention takes torch tensors; "
                    f"use torch.as_tensor({name})"
                )
        self._check_shapes(query, key, value)
        # before the ranks exchange anything, where an error on one of them would leave the others waiting
        if sink is not None and sink.shape != (self.num_heads,):
            raise ValueError(
                f"sink is {list(sink.shape)} but must be [{self.num_heads}], with all query heads on every rank"
            )
        window = _checked_window(self.window if window is None else window)
        if window and not causal:
            raise ValueError(
                f"window is {window} but causal is False; a window is for causal attention, leave one of them out"
            )
        is_dense = query.dim() == 4
        if is_dense == (plan is not None or cu_seqlens is not None):
            raise ValueError(
                "packed query [S, H, E] needs plan or cu_seqlens, dense query [B, S, H, E] must have neither; "
                f"the query has shape {tuple(query.shape)}"
            )
        attention = copy(self)  # with this call's window and scale
        attention.window = window
        if softmax_scale is not None:
            attention.softmax_scale = softmax_scale
        if not attention.softmax_scale > 0:
            raise ValueError(
                f"softmax_scale is {attention.softmax_scale} but must be above 0; None is head_dim^-0.5"
            )
        if is_dense:
            plan = dense_plan(self.mesh, query.shape[1], query.device)
        elif plan is None:
            plan = self._make_plan(cu_seqlens, query)
        elif query.shape[0] != plan.local_tokens:
            raise ValueError(
                f"the query has {query.shape[0]} tokens but the plan gives this rank {plan.local_tokens}"
            )
        if not causal:
            plan = plan.unmasked
        sinks = () if sink is None else (sink,)
        sequences = zip(query, key, value) if is_dense else [(query, key, value)]
        outputs = [AttendNode.apply(attention, plan, *heads, *sinks) for heads in sequences]
        return torch.stack(outputs) if is_dense else outputs[0]

    def _make_plan(self, cu_seqlens: Any, query: Tensor) -> AttentionPlan:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)} but must hold whole numbers [N + 1]"
            )
        mesh, ranks = self.mesh, self.mesh.sequence_parallel_size
        total, bounds = len(query) * ranks, cu_seqlens.cpu()
        listed = bounds.tolist() or [0]
        if (listed[0], listed[-1]) != (0, total) or listed != sorted(listed):
            raise ValueError(
                f"cu_seqlens ends at {listed[-1]} but the {ranks} ranks hold {total} tokens; it must describe the "
                f"whole pack, with an entry for padding, and rise from 0, here {listed[0]}"
            )
        sets = row_sets(bounds, mesh.row_parallel_size, windows=mesh.windows)
        return packed_plan(bounds, sets, mesh, query.device)

    def exchange(self, plan: AttentionPlan) -> Exchange:
        """Return the exchanges of q, k, v and the output."""
        query, key = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        return head_exchange([[query], [key], [key]], plan, has_queries=True)

    def attend_forward(
        self, shards: Tensors, plan: AttentionPlan, sink: Tensor | None = None
    ) -> Results:
        """Run the kernel on every arc of this rank's rows, without communicating and without recording a graph.

        shards: query [T/R, H/U, E], key and value [T, kv, E] -> out like query, lse [H/U, T/R].
        """
        plan, kernel, inputs_of = self._kernel_case(shards, plan)
        results = [
            kernel_forward(kernel, inputs_of(call), call.documents) for call in plan.calls
        ]
        out, lse = results[0]
        if len(results) > 1:
            query = shards[0]
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = lse.new_empty(query.shape[1], len(query))
            for call, (call_out, call_lse) in zip(plan.calls, results):
                out[call.rows], lse[:, call.rows] = call_out, call_lse
        for call in plan.prefix_calls:
            more = kernel_forward(kernel, inputs_of(call), call.documents)
            merge_attention(out, lse, call.rows, *more)
        if sink is not None:
            total = torch.logaddexp(lse, sink[self._my_heads, None].to(lse.dtype))
            out *= (lse - total).exp().T[..., None]
            lse = total
        return out, lse

    def attend_backward(
        self,
        dout: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
        sink: Tensor | None = None,
    ) -> tuple[InputGradients, Tensors]:
        """Compute dq, dk, dv, and the gradient of a trained sink [H], from what `attend_forward` returned."""
        (query, key, _), (out, lse) = shards, results
        plan, kernel, inputs_of = self._kernel_case(shards, plan)

        def gradients(call: VarlenCall) -> InputGradients:
            """Return one call's share of the gradients; out and lse of all calls together make it exact."""
            rows = call.rows
            row_lse = lse[:, rows].contiguous()
            return kernel_backward(
                kernel, dout[rows], inputs_of(call), out[rows], row_lse, call.documents
            )

        if len(plan.calls) == 1 and plan.calls[0].keys == slice(0, key.shape[0]):
            dquery, dkey, dvalue = gradients(plan.calls[0])
        else:
            dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
            # Arcs of one row set may share keys; their gradients are summed in float32 or better.
            wide = torch.promote_types(key.dtype, torch.float32)
            dkey, dvalue = torch.zeros((2, *key.shape), dtype=wide, device=key.device)
            for call in plan.calls:
                dquery[call.rows], dk, dv = gradients(call)
                for total, more in (dkey, dk), (dvalue, dv):
                    if isinstance(call.keys, slice):
                        total[call.keys] += more
                    else:  # suffixes see the same prefix through a window; unlike index_add_ this repeats bit for bit
                        total.index_put_((call.keys,), more.to(wide), accumulate=True)
        # No call has a row or a key twice, and no two prefix calls have the same key.
        for call in plan.prefix_calls:
            dq, dk, dv = gradients(call)
            dquery[call.rows] += dq
            dkey[call.keys] += dk
            dvalue[call.keys] += dv
        grads = dquery, dkey.to(key.dtype), dvalue.to(key.dtype)
        if sink is None or not sink.requires_grad:
            return grads, ()
        dsink, heads = lse.new_zeros(sink.shape), self._my_heads
        weights = (sink[heads, None].to(lse.dtype) - lse).exp()
        dsink[heads] = -((dout * out).sum(-1, dtype=lse.dtype).T * weights).sum(1)
        return grads, [dsink.to(sink.dtype)]

    @property
    def _my_heads(self) -> slice:
        """The query heads that this rank attends with."""
        mesh = self.mesh
        count = self.num_heads // mesh.head_parallel_size
        first = mesh.sp_rank % mesh.head_parallel_size * count
        return slice(first, first + count)

    def _kernel_case(
        self, shards: Tensors, plan: AttentionPlan
    ) -> tuple[AttentionPlan, str, Callable[[VarlenCall], Inputs]]:
        """Return the plan under the window, the kernel's name, and a function that returns the inputs of a call."""
        query, key, value = shards
        window = self.window
        if window and window < plan.longest:
            plan = plan.windowed(window)
        else:
            window = None  # it cuts no document
        name = resolve_kernel(
            self.kernel, query.device, query.dtype, self.head_dim, window=window
        ).name

        def inputs_of(call: VarlenCall) -> Inputs:
            q, k, v = query[call.rows], key[call.keys], value[call.keys]
            return Inputs(q, k, v, call.causal, self.softmax_scale, window)

        return plan, name, inputs_of

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        shapes = [(*query.shape[:-2], heads, self.head_dim) for heads in counts]
        tensors = query, key, value
        alike = [x.shape for x in tensors] == shapes and query.dtype == key.dtype == value.dtype
        alike = alike and query.is_floating_point() and query.numel() > 0
        if query.dim() not in (3, 4) or not alike:
            raise ValueError(
                f"query, key and value are {', '.join(f'{x.dtype} {list(x.shape)}' for x in tensors)}; they must have "
                f"one dtype and {counts} heads of {self.head_dim}: [S, heads, {self.head_dim}] or [B, S, heads, ...], "
                "and one length S, at least 1, of floats"
            )


def _checked_window(window: int | None) -> int | None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(
            f"window is {window} but a token sees at least itself; set it to 1 or more, or to None, in whole tokens"
        )
    return window


def prove_kernel(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    longest: int = ONE_DOCUMENT,
    windows: Collection[int | None] = (None,),
) -> None:
    """Compare the values and gradients of a requested kernel on small packs with plain attention in float64.

    Kernels are other projects' code, compiled for this GPU by this driver, and a wrong gradient gives no error message.
    Other kernels may run for a single document, for short ones and for those of one length; they are compared too, if
    `longest` says that there are such documents: compiling takes seconds. `windows` are those of the layers.
    Raises FloatingPointError, which names the wrong tensor and the size of its error.
    """
    draw, widths = torch.Generator().manual_seed(0), (heads, kv_heads, kv_heads)
    tensor_names = ("output", "query gradient", "key gradient", "value gradient")
    # with a window of one token the gradients of query and key are zero, so that no error can be relative to them
    sizes = {None if size is None else max(2, min(size, PROOF_WINDOW)) for size in windows}
    cases = []
    for window in sizes:
        name = resolve_kernel(requested, device, dtype, head_dim, window=window).name
        cases.append((name, PROOF_LENGTHS, window))
        if device.type == "cuda" and name in VARLEN:
            cases.append((name, SHORT_LENGTHS, window))
        has_plans = device.type == "cuda" and name == "torch" and longest >= RECURRING
        if has_plans or name == "cudnn":
            cases.append((name, PLANNED_LENGTHS, window))
        if name == "flash4" and longest >= ONE_DOCUMENT:
            cases.append((name, (ONE_DOCUMENT,), window))
    for name, lengths, window in cases:
        total = sum(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        plan = packed_plan(cu_seqlens, [[(0, total)]], ParallelMesh(), device)
        # q, k and v are strided views of one buffer, as the exchange leaves them
        packed, upstream = (
            torch.randn(total, width, head_dim, generator=draw).to(device, dtype)
            for width in (sum(widths), heads)
        )
        results = []
        for kernel, precision in ((name, dtype), ("reference", torch.float64)):
            inputs = packed.to(precision).requires_grad_()
            attention = UlyssesAttention(None, heads, kv_heads, head_dim, kernel, window=window)
            out = AttendNode.apply(attention, plan, *inputs.split(widths, 1))
            # the gradient of a scalar: for others torch imports sympy, which takes seconds
            (grad,) = torch.autograd.grad((out * upstream.to(precision)).sum(), inputs)
            results.append((out.detach(), *grad.split(widths, 1)))
        for tensor, got, wanted in zip(tensor_names, *results):
            error = float((got.double() - wanted).norm() / wanted.norm())
            if not error < PROOF_ERROR:
                raise FloatingPointError(
                    f"attention kernel {name} gives a wrong {tensor} on {device}: off by {error:.1%} of its norm; "
                    "set model.attention to another kernel, or install another version of this one"
                )
