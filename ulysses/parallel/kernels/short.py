# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""Causal attention for packs of short documents, as Triton kernels: one program for each tile of a document and head.

    packed rows      [ doc 0 | doc 1 | doc 2 ... ]        a document of n rows has ceil(n / 64) tiles
    _forward         a tile of queries  meets  its document's keys up to itself          out, lse
    _queries         the same                                                            dq, delta
    _keys            a tile of keys     meets  the queries from itself on, of all G      dk, dv
                                               query heads that share the kv head

Kernels for long documents keep many rows on a multiprocessor at once. Documents of a few hundred tokens leave most of
that room empty; small tiles and many programs fill it. Sums are float32. Without atomics every run gives the same
bits. Documents may be empty.

Milliseconds forward / backward (H200, head dim 64): 256 documents of 256 tokens, 9 query and 3 kv heads, take
0.133 / 0.363 here and 0.247 / 0.671 with flash4; 16 of 512, 14 and 2 heads, 0.047 / 0.168 and 0.146 / 0.225.
From 1,024 tokens on, and for head dim 128, flash4 is as fast or faster.

Shapes: q, out, dout, dq [T, H, E], k, v, dk, dv [T, K, E], lse (natural logarithm) and delta [H, T], G = H / K.
"""

from typing import Any

import torch
from torch import Tensor

from ..layout import DocumentBounds
from .document import SHORT, InputGradients, Inputs, Results, empty_gradients

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_MOST_DOCUMENTS = 65535  # a launch's third axis can be no longer
_BLOCK = 64  # rows of a tile

if triton is not None:
    _LOG2_E = tl.constexpr(1.4426950408889634)
    _LN_2 = tl.constexpr(0.6931471805599453)

    @triton.jit
    def _tile(
        tensor, first, start, count, row_stride, head, E: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Point at a head's rows from `start` on, of a document that begins at row `first`."""
        row = start + tl.arange(0, BLOCK)
        offset = (first + row).to(tl.int64)[:, None] * row_stride
        return tensor + offset + head * E + tl.arange(0, E)[None, :], (row < count)[:, None]

    @triton.jit
    def _load(
        tensor, first, start, count, row_stride, head, E: tl.constexpr, BLOCK: tl.constexpr
    ):
        at, mask = _tile(tensor, first, start, count, row_stride, head, E, BLOCK)
        return tl.load(at, mask=mask, other=0.0)

    @triton.jit
    def _store(
        tensor, x, first, start, count, heads, head, E: tl.constexpr, BLOCK: tl.constexpr
    ):
        at, mask = _tile(tensor, first, start, count, heads * E, head, E, BLOCK)
        tl.store(at, x.to(tensor.dtype.element_ty), mask=mask)

    @triton.jit
    def _weights(left, right, lse, is_seen, scale):
        """Return softmax weights, of queries and keys or of keys and queries."""
        scores = tl.dot(left, tl.trans(right)) * (scale * _LOG2_E)
        return tl.where(is_seen, tl.exp2(scores - lse * _LOG2_E), 0.0)

    @triton.jit
    def _forward(
        q, k, v, out, lse, cu, q_row, k_row, v_row, total, scale,
        H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(0)
        start = tl.program_id(1) * BLOCK
        first = tl.load(cu + tl.program_id(2))
        count = tl.load(cu + tl.program_id(2) + 1) - first
        if start < count:
            query = _load(q, first, start, count, q_row, head, E, BLOCK)
            row = start + tl.arange(0, BLOCK)
            top = tl.full((BLOCK,), -float("inf"), tl.float32)
            weight = tl.zeros((BLOCK,), tl.float32)
            total_value = tl.zeros((BLOCK, E), tl.float32)
            for begin in range(0, start + BLOCK, BLOCK):
                key = _load(k, first, begin, count, k_row, head // G, E, BLOCK)
                value = _load(v, first, begin, count, v_row, head // G, E, BLOCK)
                column = begin + tl.arange(0, BLOCK)
                scores = tl.dot(query, tl.trans(key)) * (scale * _LOG2_E)
                # This also hides the rows behind the document's end, except from rows that are never stored.
                scores = tl.where(column[None, :] <= row[:, None], scores, -float("inf"))
                # Every row sees key 0, so that the maximum is finite from the first tile on.
                higher = tl.maximum(top, tl.max(scores, 1))
                p = tl.exp2(scores - higher[:, None])
                shrink = tl.exp2(top - higher)
                weight = weight * shrink + tl.sum(p, 1)
                total_value = total_value * shrink[:, None] + tl.dot(p.to(value.dtype), value)
                top = higher
            _store(out, total_value / weight[:, None], first, start, count, H, head, E, BLOCK)
            log = (top + tl.log2(weight)) * _LN_2
            tl.store(lse + head * total + first + row, log, mask=row < count)

    @triton.jit
    def _queries(
        q, k, v, out, dout, lse, delta, dq, cu, q_row, k_row, v_row, total, scale,
        H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(0)
        start = tl.program_id(1) * BLOCK
        first = tl.load(cu + tl.program_id(2))
        count = tl.load(cu + tl.program_id(2) + 1) - first
        if start < count:
            query = _load(q, first, start, count, q_row, head, E, BLOCK)
            upstream = _load(dout, first, start, count, H * E, head, E, BLOCK)
            result = _load(out, first, start, count, H * E, head, E, BLOCK)
            row = start + tl.arange(0, BLOCK)
            at = head * total + first + row
            log = tl.load(lse + at, mask=row < count, other=float("inf"))
            mean = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
            tl.store(delta + at, mean, mask=row < count)
            grad = tl.zeros((BLOCK, E), tl.float32)
            for begin in range(0, start + BLOCK, BLOCK):
                key = _load(k, first, begin, count, k_row, head // G, E, BLOCK)
                value = _load(v, first, begin, count, v_row, head // G, E, BLOCK)
                column = begin + tl.arange(0, BLOCK)
                is_seen = column[None, :] <= row[:, None]
                p = _weights(query, key, log[:, None], is_seen, scale)
                ds = p * (tl.dot(upstream, tl.trans(value)) - mean[:, None])
                grad += tl.dot(ds.to(key.dtype), key)
            _store(dq, grad * scale, first, start, count, H, head, E, BLOCK)

    @triton.jit
    def _keys(
        q, k, v, dout, lse, delta, dk, dv, cu, q_row, k_row, v_row, total, scale,
        H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        kv = tl.program_id(0)
        start = tl.program_id(1) * BLOCK
        first = tl.load(cu + tl.program_id(2))
        count = tl.load(cu + tl.program_id(2) + 1) - first
        if start < count:
            key = _load(k, first, start, count, k_row, kv, E, BLOCK)
            value = _load(v, first, start, count, v_row, kv, E, BLOCK)
            column = start + tl.arange(0, BLOCK)
            grad_key = tl.zeros((BLOCK, E), tl.float32)
            grad_value = tl.zeros((BLOCK, E), tl.float32)
            # All query heads in one loop, which is pipelined across them.
            steps = tl.cdiv(count - start, BLOCK)
            for i in range(0, G * steps):
                head = kv * G + i // steps
                begin = start + i % steps * BLOCK
                query = _load(q, first, begin, count, q_row, head, E, BLOCK)
                upstream = _load(dout, first, begin, count, H * E, head, E, BLOCK)
                row = begin + tl.arange(0, BLOCK)
                at = head * total + first + row
                # With an infinite lse, rows behind the document's end have no weight.
                log = tl.load(lse + at, mask=row < count, other=float("inf"))
                mean = tl.load(delta + at, mask=row < count, other=0.0)
                is_seen = column[:, None] <= row[None, :]
                p = _weights(key, query, log[None, :], is_seen, scale)
                grad_value += tl.dot(p.to(upstream.dtype), upstream)
                ds = p * (tl.dot(value, tl.trans(upstream)) - mean[None, :])
                grad_key += tl.dot(ds.to(query.dtype), query)
            _store(dk, grad_key * scale, first, start, count, H // G, kv, E, BLOCK)
            _store(dv, grad_value, first, start, count, H // G, kv, E, BLOCK)


def usable(inputs: Inputs, documents: DocumentBounds) -> bool:
    """Tell whether the kernels compute this case on a GPU and are the fastest for it; never waits for the device."""
    q = inputs.q
    head_dim = q.shape[-1]
    return (
        triton is not None
        and q.dtype in (torch.float16, torch.bfloat16)
        and head_dim in (32, 64)
        and inputs.causal
        and inputs.window is None
        # every row sees the rows of its document, and no prefix
        and documents.cu_q is documents.cu_k
        and documents.max_q <= SHORT
        and len(documents.cu_q) - 1 <= _MOST_DOCUMENTS
        and all(x.stride()[1:] == (head_dim, 1) for x in inputs[:3])
    )


def forward(inputs: Inputs, documents: DocumentBounds) -> Results:
    """Attend within the documents of a case that is `usable`."""
    q, k, v = inputs[:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    _launch(_forward, q.shape[1], documents, inputs, q, k, v, out, lse)
    return out, lse


def backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, documents: DocumentBounds
) -> InputGradients:
    """Compute dq, dk, dv from what `forward` returned; out and lse may be joint ones of further keys."""
    q, k, v = inputs[:3]
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    dq, dk, dv = empty_gradients(inputs)
    # the sum of dout * out over a head, which is the mean of dp under p; the first kernel writes it for the second
    delta = torch.empty_like(lse)
    _launch(_queries, q.shape[1], documents, inputs, q, k, v, out, dout, lse, delta, dq)
    _launch(_keys, k.shape[1], documents, inputs, q, k, v, dout, lse, delta, dk, dv)
    return dq, dk, dv


def _launch(
    kernel: Any, heads: int, documents: DocumentBounds, inputs: Inputs, *tensors: Tensor
) -> None:
    """Run a program for each of `heads`, each tile and each document."""
    q, k, v = inputs[:3]
    total, query_heads, head_dim = q.shape
    grid = heads, triton.cdiv(documents.max_q, _BLOCK), len(documents.cu_q) - 1
    sizes = {"H": query_heads, "G": query_heads // k.shape[1], "E": head_dim, "BLOCK": _BLOCK}
    numbers = q.stride(0), k.stride(0), v.stride(0), total, inputs.scale
    with torch.cuda.device(q.device):
        kernel[grid](*tensors, documents.cu_q, *numbers, **sizes, num_warps=4, num_stages=3)
