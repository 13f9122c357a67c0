"""Attention over the sequence-parallel group: exact, for any number of heads, ranks and tokens.

    q, k, v [S, heads, E]  --exchange-->  [T, heads/U, E]  --kernel-->  out', lse  --exchange-->  out [S, H, E]
       my tokens                             my heads                                                my tokens

The kernel's forward and backward are separate methods, so that recomputation can keep (out', lse) and run neither the
kernel's forward nor an all-to-all again.

Letters: T packed tokens, S tokens on this rank, B sequences of a dense batch, P sequence-parallel ranks, H query heads,
K kv heads, E head dim, U head-parallel and R row-parallel size.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .exchange import (
    exchange_out_backward,
    exchange_out_forward,
    exchange_qkv_backward,
    exchange_qkv_forward,
)
from .kernels import ONE_DOCUMENT, resolve_kernel, varlen_backward, varlen_forward
from .kernels_document import join_lse
from .layout import AttentionPlan, VarlenCall, dense_plan, device_plan, head_layout
from .mesh import ParallelMesh

JOINED_ROWS = 8192  # whose float32 sums _join holds at once
# Lengths of prove_kernel's documents: several tiles, none of them full, and a single token
PROOF = (300, 1, 129)
PROOF_ERROR = 2e-2  # of a tensor's norm; half-precision kernels reach 2e-3 to 4e-3


class UlyssesAttention(nn.Module):
    """Attend to whole documents while every rank holds only its tokens. The module has no parameters.

    `kernel` is "auto", a name from kernels.py, or a callable on head shards that autograd can differentiate (sparse or
    windowed attention, for example): `kernel(q, k, v, cu_seqlens_q=, cu_seqlens_k=, max_seqlen_q=, max_seqlen_k=,
    causal=, softmax_scale=) -> out`. `mesh=None` is plain attention in this process.
    Raises ValueError if the heads do not fit the mesh.
    """

    def __init__(
        self,
        mesh: ParallelMesh | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kernel: str | Callable[..., Tensor] = "auto",
    ):
        super().__init__()
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
        max_seqlen: int | None = None,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attend; returns the shape of `query`. All ranks of the sequence-parallel group call it together.

        Packed: query [S, H, E], key and value [S, K, E], with `plan` (`ShardedBatch.attention_plan`) or with the global
        `cu_seqlens` [N + 1] over all T tokens. A plan never makes the host wait for the device; cu_seqlens on a
        GPU does, unless max_seqlen is given and R is 1.
        Dense: [B, S/P, heads, E] in contiguous shards, without plan and cu_seqlens.
        """
        self._check_shapes(query, key, value)
        dense = query.dim() == 4
        if dense == (plan is not None or cu_seqlens is not None):
            raise ValueError(
                "packed query [S, H, E] needs plan or cu_seqlens, dense query [B, S, H, E] must have neither; "
                f"the query has shape {tuple(query.shape)}"
            )
        if dense:
            plan = dense_plan(query.shape[0], query.shape[1], self.mesh, query.device)
        elif plan is None:
            assert cu_seqlens is not None
            plan = device_plan(cu_seqlens, max_seqlen, query.shape[0], self.mesh)
        elif query.shape[0] != plan.local_tokens:
            raise ValueError(
                f"the query has {query.shape[0]} tokens but the plan gives this rank {plan.local_tokens}"
            )
        lead = query.shape[:-2]
        query, key, value = (x.flatten(0, -3) for x in (query, key, value))
        output = _Attend.apply(query, key, value, self, plan, causal, softmax_scale)
        return output.unflatten(0, lead)

    def attend_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        causal: bool = True,
        softmax_scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel on every arc of this rank's rows, without communicating.

        query [T/R, H/U, E], key and value [T, kv, E] -> out like query, lse [H/U, T/R] (empty for a callable kernel).
        Only a callable kernel's results may be differentiated by autograd.
        """
        kernel, scale = self._resolve(query, plan, softmax_scale)
        calls, prefix_calls = plan.calls[causal], plan.prefix_calls
        if plan.unshared and not causal:
            raise ValueError(
                "sequences that share a prompt need a causal mask; pack them whole"
            )
        if plan.unshared and not isinstance(kernel, str):
            warnings.warn(
                "a callable attention kernel returns no log-sum-exp, so shared prompts are attended to as if every "
                "sequence had its own",
                stacklevel=2,
            )
            calls, prefix_calls = plan.unshared_calls(), ()

        def run(call: VarlenCall, causal: bool) -> tuple[Tensor, Tensor]:
            rows, keys, segments = call
            return varlen_forward(
                kernel, query[rows], key[keys], value[keys], segments, causal, scale
            )

        outs, lses = zip(*(run(call, causal) for call in calls))
        out, lse = (
            (outs[0], lses[0]) if len(calls) == 1 else (torch.cat(outs), torch.cat(lses, 1))
        )
        for call in prefix_calls:
            _join(out, lse, call.rows, *run(call, False))
        return out, lse

    def attend_backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: AttentionPlan,
        causal: bool = True,
        softmax_scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq, dk, dv from what `attend_forward` returned; the kernel's forward does not run again.

        A callable kernel has no backward of its own: it runs again, unless `out` has a graph, and is differentiated.
        """
        kernel, scale = self._resolve(query, plan, softmax_scale)
        if not isinstance(kernel, str):
            if not out.requires_grad:
                query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
                with torch.enable_grad():
                    out, _ = self.attend_forward(query, key, value, plan, causal, softmax_scale)
            dq, dk, dv = torch.autograd.grad(
                out, (query, key, value), dout, allow_unused=True, materialize_grads=True
            )
            return dq, dk, dv

        def gradients(call: VarlenCall, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            """Return one call's share of the gradients, which the joint out and lse make exact."""
            rows, keys, segments = call
            inputs = dout[rows], query[rows], key[keys], value[keys], out[rows]
            return varlen_backward(
                kernel, *inputs, lse[:, rows].contiguous(), segments, causal, scale
            )

        calls = plan.calls[causal]
        if len(calls) == 1 and calls[0].keys == slice(0, key.shape[0]):
            dquery, dkey, dvalue = gradients(calls[0], causal)
        else:
            dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
            # Arcs of one row set may share keys; their gradients are summed in float32 or better.
            wide = torch.promote_types(key.dtype, torch.float32)
            dkey, dvalue = torch.zeros((2, *key.shape), dtype=wide, device=key.device)
            for call in calls:
                dquery[call.rows], dk, dv = gradients(call, causal)
                dkey[call.keys] += dk
                dvalue[call.keys] += dv
        # No call has a row or a key twice, and no two prefix calls have the same key.
        for call in plan.prefix_calls:
            dq, dk, dv = gradients(call, False)
            dquery[call.rows] += dq
            dkey[call.keys] += dk
            dvalue[call.keys] += dv
        return dquery, dkey.to(key.dtype), dvalue.to(key.dtype)

    def _resolve(
        self, query: Tensor, plan: AttentionPlan, softmax_scale: float | None
    ) -> tuple[str | Callable[..., Tensor], float]:
        """Choose the kernel and the scale of this call."""
        scale = 1 / math.sqrt(self.head_dim) if softmax_scale is None else softmax_scale
        if callable(self.kernel):
            return self.kernel, scale
        case = query.device, query.dtype, self.head_dim
        return resolve_kernel(self.kernel, *case, documents=plan.documents).name, scale

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        given = query, key, value
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        shapes = [(*query.shape[:-2], heads, self.head_dim) for heads in counts]
        alike = [x.shape for x in given] == shapes and query.dtype == key.dtype == value.dtype
        if query.dim() not in (3, 4) or not alike:
            raise ValueError(
                f"query, key and value are {', '.join(f'{x.dtype} {list(x.shape)}' for x in given)}; they must have "
                f"one dtype and {counts} heads of {self.head_dim}: [S, heads, {self.head_dim}] or [B, S, heads, ...]"
            )


def _join(
    out: Tensor, lse: Tensor, rows: slice | Tensor, more: Tensor, more_lse: Tensor
) -> None:
    """Let these rows of out [T, H, E] and lse [H, T] attend to further keys, whose results are `more`, `more_lse`."""
    total, *shares = join_lse(lse[:, rows], more_lse)
    share, more_share = (part.T[..., None] for part in shares)
    for i in range(0, len(more), JOINED_ROWS):
        part = slice(i, min(i + JOINED_ROWS, len(more)))
        at = (
            rows[part]
            if isinstance(rows, Tensor)
            else slice(rows.start + i, rows.start + part.stop)
        )
        out[at] = (out[at] * share[part] + more[part] * more_share[part]).to(out.dtype)
    lse[:, rows] = total


class _Attend(torch.autograd.Function):
    """Exchange, attend and exchange; keeps q', k', v', out' and lse, or the graph of a callable kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: UlyssesAttention,
        *arguments: Any,
    ) -> Tensor:
        plan = arguments[0]
        shards: Any = exchange_qkv_forward(query, key, value, plan)
        needs_graph = callable(attention.kernel) and any(ctx.needs_input_grad)
        if needs_graph:
            shards = [x.detach().requires_grad_() for x in shards]
        with torch.set_grad_enabled(needs_graph):
            out, lse = attention.attend_forward(*shards, *arguments)
        ctx.save_for_backward(*shards, out, lse)
        ctx.attention, ctx.arguments = attention, arguments
        return exchange_out_forward(out.detach(), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attention, plan = ctx.attention, ctx.arguments[0]
        dq, dk, dv = attention.attend_backward(
            exchange_out_backward(grad, plan), *ctx.saved_tensors, *ctx.arguments
        )
        heads = attention.num_heads, attention.num_kv_heads
        return *exchange_qkv_backward(dq, dk, dv, plan, *heads), None, None, None, None


def prove_kernel(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    longest: int = ONE_DOCUMENT,
) -> None:
    """Compare the values and gradients of a requested kernel on small packs with plain attention in float64.

    Kernels are other projects' code, compiled for this GPU by this driver, and a wrong gradient gives no error message.
    What runs for a single document may be another kernel and is compared too, the one for documents of ONE_DOCUMENT
    tokens only if there are as long ones: compiling takes seconds. Raises
    FloatingPointError, which names the wrong tensor and the size of its error.
    """
    draw, widths = torch.Generator().manual_seed(0), (heads, kv_heads, kv_heads)
    what = ("output", "query gradient", "key gradient", "value gradient")
    proofs = {
        resolve_kernel(requested, device, dtype, head_dim, documents=len(lengths)).name: lengths
        for lengths in (PROOF[:1], PROOF)
    }
    cases = list(proofs.items())
    if "flash4" in proofs and longest >= ONE_DOCUMENT:
        cases.append(("flash4", (ONE_DOCUMENT,)))
    for name, lengths in cases:
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
        # q, k and v are strided views of one buffer, as the exchange leaves them
        packed, upstream = (
            torch.randn(sum(lengths), width, head_dim, generator=draw).to(device, dtype)
            for width in (sum(widths), heads)
        )
        results = []
        for kernel, precision in ((name, dtype), ("reference", torch.float64)):
            inputs = packed.to(precision).requires_grad_()
            attention = UlyssesAttention(None, heads, kv_heads, head_dim, kernel)
            out = attention(*inputs.split(widths, 1), cu_seqlens)
            (grad,) = torch.autograd.grad(out, inputs, upstream.to(precision))
            results.append((out, *grad.split(widths, 1)))
        for tensor, got, wanted in zip(what, *results):
            error = float((got.double() - wanted).norm() / wanted.norm())
            if not error < PROOF_ERROR:
                raise FloatingPointError(
                    f"attention kernel {name} gives a wrong {tensor} on {device}: off by {error:.1%} of its norm; "
                    "set model.attention to another kernel, or install another version of this one"
                )
