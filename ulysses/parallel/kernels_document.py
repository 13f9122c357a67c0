"""Attention kernels that work document by document: plain matrix products, and torch's fused kernels without packing.

    packed q, k, v        [ doc 0 | doc 1 | doc 2 ... ]      one call for each, on slices; only GQA heads are copied

`nq` queries meet `nk` keys bottom-right: the last query sees the last key. For kernels whose causal mask is aligned
top-left such a document becomes two calls, which are joined by their log-sum-exps:

              prefix       own keys
           +-----------+-----------+
    nq     |   full    |  \\ causal |        out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)
           +-----------+-----------+
               nk - nq      nq

The backward of each part uses the joint out and lse, which makes it the exact gradient of the whole.

Letters: T packed tokens, H query heads, K kv heads, G = H / K, E head dim, n rows of one document.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Segments

TILE_SCORES = 1 << 24  # attention scores that the plain kernel holds at once


class DocumentKernel(NamedTuple):
    """A kernel for one document: q, dout, out [1, H, nq, E], k and v [1, K, nk, E], lse [1, H, nq].

    forward(q, k, v, causal, scale) -> out, lse; backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv.
    `bottom_right` says how its causal mask is aligned where there are fewer queries than keys. Plain products compute
    what has fewer queries or keys than `shortest`.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    bottom_right: bool = False
    shortest: int = 0


def run_forward(
    kernel: DocumentKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a kernel on every document of q [Tq, H, E], k and v [Tk, K, E]; returns out [Tq, H, E], lse [H, Tq]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
    for rows, calls in _documents(kernel, segments, causal):
        parts = [
            called.forward(*_heads_first(q[rows], k[keys], v[keys]), masked, scale)
            for called, keys, masked in calls
        ]
        joint, lse[None, :, rows] = functools.reduce(_join, parts)
        out[rows] = joint[0].transpose(0, 1)
    return out, lse


def _join(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join (out, lse) of the same queries on two sets of keys."""
    (out1, lse1), (out2, lse2) = one, two
    lse, share1, share2 = join_lse(lse1, lse2)
    return out1 * share1[..., None] + out2 * share2[..., None], lse


def join_lse(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp of two sets of keys together, and the share of each set's output in the joint one."""
    lse = torch.logaddexp(lse1, lse2)
    return lse, (lse1 - lse).exp(), (lse2 - lse).exp()


def run_backward(
    kernel: DocumentKernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel's backward on every document; returns dq [Tq, H, E], dk and dv [Tk, K, E]."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, calls in _documents(kernel, segments, causal):
        upstream, query, output = _heads_first(dout[rows], q[rows], out[rows])
        total = lse[None, :, rows].contiguous()
        parts = []
        for called, keys, masked in calls:
            key, value = _heads_first(k[keys], v[keys])
            found = called.backward(upstream, query, key, value, output, total, masked, scale)
            part, dk[keys], dv[keys] = (x[0].transpose(0, 1) for x in found)
            parts.append(part)
        dq[rows] = functools.reduce(torch.add, parts)
    return dq, dk, dv


def _documents(
    kernel: DocumentKernel, segments: Segments, causal: bool
) -> Iterator[tuple[slice, list[tuple[DocumentKernel, slice, bool]]]]:
    """Yield every document's query rows, and each call's kernel, keys and whether it has a causal mask.

    It waits for the device if the bounds are not on the host.
    """
    q, k = segments.bounds or (segments.cu_q.tolist(), segments.cu_k.tolist())
    for (row, row_end), (first, end) in zip(pairwise(q), pairwise(k)):
        if row == row_end:
            continue
        own = end - (row_end - row)  # the first row's own key, if the mask is causal
        pieces = [(slice(first, end), causal)]
        if causal and own > first and not kernel.bottom_right:
            pieces = [(slice(first, own), False), (slice(own, end), True)]
        calls = []
        for keys, masked in pieces:
            is_short = min(row_end - row, keys.stop - keys.start) < kernel.shortest
            calls.append((REFERENCE if is_short else kernel, keys, masked))
        yield slice(row, row_end), calls


def _heads_first(*values: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1)[None] for x in values]


# --- plain matrix products ---------------------------------------------------------------------------------------


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    key, value = k.to(wide), v.to(wide)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for rows, seen, scores in _score_tiles(q, key, causal, scale):
        total = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(total).exp_()
        out[:, :, rows] = (weights @ value[:, :, None, :seen]).flatten(1, 2).to(q.dtype)
        lse[:, :, rows] = total.flatten(1, 2).squeeze(-1)
    return out, lse


def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = k.to(lse.dtype), v.to(lse.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen, scores in _score_tiles(q, key, causal, scale):
        upstream, output, query = (_to_groups(x[:, :, rows], key) for x in (dout, out, q))
        weights = scores.sub_(_to_groups(lse[:, :, rows, None], key)).exp_()
        delta = (upstream * output).sum(-1, keepdim=True)
        dscores = weights * (upstream @ value[:, :, None, :seen].mT - delta) * scale
        dq[:, :, rows] = (dscores @ key[:, :, None, :seen]).flatten(1, 2).to(q.dtype)
        dk[:, :, :seen] += dscores.flatten(2, 3).mT @ query.flatten(2, 3)
        dv[:, :, :seen] += weights.flatten(2, 3).mT @ upstream.flatten(2, 3)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _score_tiles(
    q: Tensor, key: Tensor, causal: bool, scale: float
) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield query rows, the number of keys that they see, and their scores [1, K, G, rows, keys]."""
    nq, nk = q.shape[2], key.shape[2]
    step = max(1, TILE_SCORES // (nk * q.shape[1]))
    for start in range(0, nq, step):
        rows = slice(start, min(start + step, nq))
        seen = nk - nq + rows.stop if causal else nk
        scores = _to_groups(q[:, :, rows], key) @ key[:, :, None, :seen].mT * scale
        if causal:
            after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(after.triu(seen - scores.shape[-2] + 1), -torch.inf)
        yield rows, seen, scores


def _to_groups(values: Tensor, key: Tensor) -> Tensor:
    """[1, H, n, E] -> [1, K, G, n, E], in the keys' dtype."""
    return values.unflatten(1, (key.shape[1], -1)).to(key.dtype)


# --- torch's fused kernels, causal from the top left -------------------------------------------------------------


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run torch's blocked CPU kernel; it knows no groups, so kv heads are repeated."""
    key, value = _repeat(k, q), _repeat(v, q)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, key, value, 0.0, causal, scale=scale
    )


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, _repeat(k, q), _repeat(v, q), out, lse, 0.0, causal, scale=scale
    )
    dk, dv = (grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in (dk, dv))
    return dq, dk, dv


def _repeat(values: Tensor, q: Tensor) -> Tensor:
    return values.repeat_interleave(q.shape[1] // values.shape[1], 1)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's fused attention: GPU, float16 or bfloat16."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # the state of a dropout generator, which is not used without dropout
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse[..., None],
        unused,
        unused,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


REFERENCE = DocumentKernel(_plain_forward, _plain_backward, bottom_right=True)
CPU = DocumentKernel(_cpu_forward, _cpu_backward)
# cuDNN refuses some tiny shapes and builds a plan for each; the tail of a pack is one
CUDNN = DocumentKernel(_cudnn_forward, _cudnn_backward, shortest=64)
