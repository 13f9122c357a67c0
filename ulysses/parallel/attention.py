"""Attention over the sequence-parallel group: exact, for any number of heads, ranks and tokens.

    q, k, v [S, heads, E]  --exchange_qkv-->  [T, heads/U, E]  --attend-->  out', lse  --exchange_out-->  out [S, H, E]
       my tokens                                 my heads       kernel                                    my tokens

The three stages are separate, and `attend` has a forward and a backward of its own, so that recomputation may keep
(out', lse), or the exchanged q', k', v', and repeat neither the kernel's forward nor an all-to-all.

Letters: T packed tokens, S tokens on this rank, B sequences of a dense batch, P sequence-parallel ranks, H query heads,
K kv heads, E head dim, U head-parallel and R row-parallel size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .exchange import exchange_out, exchange_qkv
from .kernels import KernelChoice, Options, resolve_kernel, varlen_backward, varlen_forward
from .kernels_document import Window, visible
from .layout import Segments, head_layout
from .mesh import ParallelMesh
from .plan import AttentionPlan, dense_plan, device_plan


class UlyssesAttention(nn.Module):
    """Attend to whole documents while every rank holds only its tokens. Has no parameters.

    `kernel` is "auto", a name from kernels.py, or a callable on head shards, differentiable by autograd (sparse
    attention, a mask of one's own): `kernel(q, k, v, cu_seqlens_q=, cu_seqlens_k=, max_seqlen_q=, max_seqlen_k=,
    causal=, softmax_scale=, window=) -> out`. `mesh=None` is plain attention in this process.
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
        head_layout(
            num_heads, num_kv_heads, mesh.head_parallel_size if mesh else 1
        )  # refuses what does not fit
        self.mesh = mesh
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kernel = kernel

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
        window: Window | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attend; returns the shape of `query`. All ranks of the sequence-parallel group call it together.

        Packed: query [S, H, E], key and value [S, K, E], with `plan` (`ShardedBatch.attention_plan`) or the global
        `cu_seqlens` [N + 1] int32 over all T tokens. Without max_seqlen, and with row-parallel ranks, cu_seqlens costs
        a wait for the device; a plan never does. Dense: [B, S/P, heads, E] without either; contiguous shards.
        `window` (left, right) limits the keys seen before and after a query, -1 = no limit.
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
        if not dense and query.shape[0] != plan.local_tokens:
            raise ValueError(
                f"the query has {query.shape[0]} tokens but the plan gives this rank {plan.local_tokens}"
            )
        lead = query.shape[:-2]
        if dense:
            query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        query, key, value = exchange_qkv(query, key, value, plan)
        output, _ = self.attend(
            query, key, value, plan, causal=causal, softmax_scale=softmax_scale, window=window
        )
        return exchange_out(output, plan).unflatten(0, lead)

    def exchange_qkv(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Trade token shards for head shards (all_to_all.py); differentiable, collective."""
        return exchange_qkv(query, key, value, plan)

    def exchange_out(self, output: Tensor, plan: AttentionPlan) -> Tensor:
        """Trade the output's head shards back for token shards; differentiable, collective."""
        return exchange_out(output, plan)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, *,
        causal: bool = True, softmax_scale: float | None = None, window: Window | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the kernel on head shards; differentiable, no communication.

        query [T/R, H/U, E], key and value [T, kv, E] -> out like query, lse [H/U, T/R] (no gradient flows through it;
        empty for a callable kernel).
        """
        options = self.options(causal, softmax_scale, window)
        if callable(self.kernel):
            return self._call_kernel(query, key, value, plan, options), query.new_empty(0)
        return _Attend.apply(query, key, value, self, plan, options)

    def attend_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do `attend` without recording a graph. `options` defaults to plain causal attention."""
        options = options or self.options()
        if callable(self.kernel):
            with torch.no_grad():
                return self._call_kernel(query, key, value, plan, options), query.new_empty(0)
        name = self.resolve(query.device, query.dtype, options, plan.documents).name
        calls = self._calls(plan, options)
        parts = [
            varlen_forward(
                name, query[slice(*rows)], key[slice(*keys)], value[slice(*keys)], segments, options
            )
            for rows, keys, segments in calls
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def attend_backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, plan: AttentionPlan,
        options: Options | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Compute dq, dk, dv from the kept (out, lse); the forward kernel does not run again.

        (A callable kernel has no backward of its own and is differentiated anew.)
        """
        options = options or self.options()
        if callable(self.kernel):
            with torch.enable_grad():
                query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
                output = self._call_kernel(query, key, value, plan, options)
                dq, dk, dv = torch.autograd.grad(
                    output, (query, key, value), dout, allow_unused=True, materialize_grads=True
                )
                return dq, dk, dv
        name = self.resolve(query.device, query.dtype, options, plan.documents).name
        calls = self._calls(plan, options)
        if len(calls) == 1 and key.shape[0] == calls[0][1][1] - calls[0][1][0]:
            return varlen_backward(name, dout, query, key, value, out, lse, calls[0][2], options)
        dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
        dkeys = key.new_zeros(2, *key.shape)  # arcs of one row set may share keys
        for rows, keys, segments in calls:
            at_q, at_k = slice(*rows), slice(*keys)
            saved = (
                dout[at_q],
                query[at_q],
                key[at_k],
                value[at_k],
                out[at_q],
                lse[:, at_q].contiguous(),
            )
            dq, dk, dv = varlen_backward(name, *saved, segments, options)
            dquery[at_q] = dq
            dkeys[0, at_k] += dk
            dkeys[1, at_k] += dv
        return dquery, dkeys[0], dkeys[1]

    def options(
        self, causal: bool = True, softmax_scale: float | None = None, window: Window | None = None
    ) -> Options:
        """Fill in the defaults of an attention call; deterministic follows torch.use_deterministic_algorithms."""
        scale = 1 / math.sqrt(self.head_dim) if softmax_scale is None else softmax_scale
        if window is not None and visible(False, window) == (None, None):
            window = None
        return Options(causal, scale, window, torch.are_deterministic_algorithms_enabled())

    def resolve(
        self,
        device: torch.device,
        dtype: torch.dtype,
        options: Options | None = None,
        documents: int | None = None,
    ) -> KernelChoice:
        """Say which kernel such a call takes and why; raises ValueError if the requested one cannot."""
        if callable(self.kernel):
            return KernelChoice(
                getattr(self.kernel, "__name__", "callable"), "attention kernel given by the caller"
            )
        window = options.window if options else None
        deterministic = (
            options.deterministic if options else torch.are_deterministic_algorithms_enabled()
        )
        return resolve_kernel(
            self.kernel, device, dtype, self.head_dim,
            window=window, deterministic=deterministic, documents=documents,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, head_dim={self.head_dim}, mesh={self.mesh}"

    def _calls(
        self, plan: AttentionPlan, options: Options
    ) -> list[tuple[tuple[int, int], tuple[int, int], Segments]]:
        """The varlen calls of this rank: its rows, their keys, and the documents."""
        if plan.row_parallel_size > 1 and options.window is not None and not options.causal:
            raise ValueError(
                f"window {options.window} without causal needs row_parallel_size 1, not {plan.row_parallel_size}; "
                "set causal=True or a degree that divides the heads"
            )
        if options.causal:
            return [(call.rows, call.causal_keys, call.causal) for call in plan.calls]
        return [(call.rows, call.keys, call.full) for call in plan.calls]

    def _call_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, options: Options
    ) -> Tensor:
        assert callable(self.kernel)
        outputs = []
        for rows, keys, segments in self._calls(plan, options):
            outputs.append(
                self.kernel(
                    query[slice(*rows)],
                    key[slice(*keys)],
                    value[slice(*keys)],
                    cu_seqlens_q=segments.cu_q,
                    cu_seqlens_k=segments.cu_k,
                    max_seqlen_q=segments.max_q,
                    max_seqlen_k=segments.max_k,
                    causal=options.causal,
                    softmax_scale=options.scale,
                    window=options.window,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        lead = query.shape[:-2]
        wanted = (*lead, self.num_kv_heads, self.head_dim)
        if query.dim() not in (3, 4) or query.shape[-2:] != (self.num_heads, self.head_dim):
            raise ValueError(
                f"query has shape {tuple(query.shape)}; it must be [S, {self.num_heads}, {self.head_dim}] "
                f"or [B, S, {self.num_heads}, {self.head_dim}]"
            )
        if key.shape != wanted or value.shape != wanted:
            raise ValueError(
                f"key is {tuple(key.shape)} and value {tuple(value.shape)}; they must be {tuple(wanted)}"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}; give them one dtype"
            )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor,
        attention: UlyssesAttention, plan: AttentionPlan, options: Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = attention.attend_forward(query, key, value, plan, options)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.arguments = attention, plan, options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        attention, plan, options = ctx.arguments
        return *attention.attend_backward(dout, *ctx.saved_tensors, plan, options), None, None, None
