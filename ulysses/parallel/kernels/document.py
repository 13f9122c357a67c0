"""Attention kernels that work document by document: plain matrix products, and torch's fused kernels without packing.

    packed q, k, v        [ doc 0 | doc 1 | doc 2 ... ]      one call for each run of documents of one length, on views

`nq` queries meet `nk` keys bottom-right: the last query sees the last key. For kernels whose causal mask is aligned
top-left such a document becomes two calls, which are merged by their log-sum-exps:

            earlier keys   own keys
           +-----------+-----------+
    nq     |   full    |  \\ causal |        out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)
           +-----------+-----------+
               nk - nq      nq

The backward of each part uses the joint out and lse, which makes it the exact gradient of the whole. Documents that a
sliding window cuts are left to the plain products, which compute the scores inside it.

Letters: T packed tokens, H query heads, K kv heads, G = H / K, E head dim, D documents of a run, n rows of each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import DocumentBounds

ONE_DOCUMENT = 8192  # from so many rows on a single document runs in other kernels of flash4
SHORT = 512  # up to so many rows a document the kernels of short.py are the fastest
TILE_SCORES = 1 << 24  # attention scores that the plain kernel holds at once
# of the queries in a call of cuDNN, whose gradients are wrong from so many elements on (9.19)
CUDNN_ELEMENTS = 1 << 31
LEAST_ROWS = 64  # of query rows in a tile under a window
MERGED_ROWS = 8192  # rows whose float32 sums `merge_attention` holds at once

Results = tuple[Tensor, Tensor]  # out, lse
InputGradients = tuple[Tensor, ...]  # dq, dk, dv


class PackKernel(NamedTuple):
    """A kernel for a whole pack: q, out, dout [Tq, H, E], k and v [Tk, K, E], lse [H, Tq].

    forward(inputs, documents) -> out, lse; backward(dout, inputs, out, lse, documents) -> dq, dk, dv, where out and lse
    may be joint ones of further keys.
    """

    forward: Callable[..., Results]
    backward: Callable[..., InputGradients]


class Inputs(NamedTuple):
    """What a kernel computes: q [Tq, H, E] attends to k and v [Tk, K, E], whose scores are multiplied by `scale`.

    With a `window`, which is for causal calls, a row sees its own key and the window - 1 keys before it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    window: int | None = None


class DocumentKernel(NamedTuple):
    """A kernel for documents of one length: q, dout, out [D, H, nq, E], k and v [D, K, nk, E], lse [D, H, nq].

    forward(inputs) -> out, lse; backward(dout, inputs, out, lse) -> dq, dk, dv.
    `bottom_right` says how its causal mask is aligned where there are fewer queries than keys. A document with fewer
    queries or keys than `shortest` is left to the plain products.
    """

    forward: Callable[[Inputs], Results]
    backward: Callable[[Tensor, Inputs, Tensor, Tensor], InputGradients]
    bottom_right: bool = False
    shortest: int = 0


class DocumentRun(NamedTuple):
    """`number` documents that have `rows` queries and `keys` keys each, one after the other from these places on."""

    number: int
    rows: int
    keys: int
    first_row: int
    first_key: int


def document_runs(documents: DocumentBounds) -> Iterator[DocumentRun]:
    """Yield the runs of documents of one length, without those that have no rows.

    The host waits for the device if the bounds are on the device alone.
    """
    bounds = documents.on_host or (documents.cu_q.tolist(), documents.cu_k.tolist())
    spans = zip(*map(pairwise, bounds))
    for (rows, keys), run in groupby(spans, lambda span: tuple(b - a for a, b in span)):
        if rows:
            (first_row, _), (first_key, _) = next(run)
            yield DocumentRun(1 + sum(1 for _ in run), rows, keys, first_row, first_key)


class _Call(NamedTuple):
    """A kernel's call for a run of `number` documents.

    rows, keys: those of the run in the pack. part: which keys of every document the call has.
    """

    kernel: DocumentKernel
    inputs: Inputs
    number: int
    rows: slice
    keys: slice
    part: slice


def _run_calls(
    kernel: DocumentKernel, packed: Inputs, documents: DocumentBounds
) -> Iterator[_Call]:
    """Yield the calls of all runs of documents; of two for the same rows the one with the earlier keys comes first."""
    for number, nq, nk, row, key in document_runs(documents):
        rows, keys = slice(row, row + number * nq), slice(key, key + number * nk)
        query, *key_value = (
            _by_document(x[part], number) for x, part in zip(packed[:3], (rows, keys, keys))
        )
        window, run_kernel = None, kernel
        if packed.window and nk > packed.window:  # it cuts these documents
            window, run_kernel = packed.window, REFERENCE
        earlier = nk - nq  # the keys before that of the first row itself, if the mask is causal
        parts = [(0, nk, packed.causal)]
        if packed.causal and earlier and not run_kernel.bottom_right:
            parts = [(0, earlier, False), (earlier, nk, True)]
        for low, high, causal in parts:
            part = slice(low, high)
            k, v = (x[:, :, part] for x in key_value)
            inputs = Inputs(query, k, v, causal, packed.scale, window)
            is_short = min(nq, high - low) < run_kernel.shortest
            call_kernel = REFERENCE if is_short else run_kernel
            yield _Call(call_kernel, inputs, number, rows, keys, part)


def run_forward(kernel: DocumentKernel, inputs: Inputs, documents: DocumentBounds) -> Results:
    """Run a kernel on every document of q [Tq, H, E], k and v [Tk, K, E]; returns out [Tq, H, E], lse [H, Tq]."""
    calls = [*_run_calls(kernel, inputs, documents)]
    results = (call.kernel.forward(call.inputs) for call in calls)
    # [D, H, n] -> [H, D n], contiguous
    packed = (
        (_packed(out), lse.transpose(0, 1).flatten(1).contiguous()) for out, lse in results
    )
    if len(calls) == 1:
        return next(packed)
    q = inputs.q
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
    for call, (call_out, call_lse) in zip(calls, packed):
        if call.part.start == 0:
            out[call.rows], lse[:, call.rows] = call_out, call_lse
        else:
            merge_attention(out, lse, call.rows, call_out, call_lse)
    return out, lse


def merge_attention(
    out: Tensor, lse: Tensor, rows: slice | Tensor, more: Tensor, more_lse: Tensor
) -> None:
    """Let these rows of out [T, H, E] and lse [H, T] attend to further keys, whose results are `more`, `more_lse`."""
    old_lse, merged = lse[:, rows], out[rows]
    total = torch.logaddexp(old_lse, more_lse)
    share, more_share = ((x - total).exp().T[..., None] for x in (old_lse, more_lse))
    for start in range(0, len(more), MERGED_ROWS):
        part = slice(start, start + MERGED_ROWS)
        merged[part] = merged[part] * share[part] + more[part] * more_share[part]
    if isinstance(rows, Tensor):  # otherwise `merged` is a view of `out`
        out[rows] = merged
    lse[:, rows] = total


def run_backward(
    kernel: DocumentKernel,
    dout: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    documents: DocumentBounds,
) -> InputGradients:
    """Run a kernel's backward on every document; returns dq [Tq, H, E], dk and dv [Tk, K, E]."""
    calls = [*_run_calls(kernel, inputs, documents)]
    results = (
        call.kernel.backward(
            _by_document(dout[call.rows], call.number),
            call.inputs,
            _by_document(out[call.rows], call.number),
            lse[:, call.rows].unflatten(1, (call.number, -1)).transpose(0, 1).contiguous(),
        )
        for call in calls
    )
    if len(calls) == 1:
        return tuple(map(_packed, next(results)))
    dq, dk, dv = empty_gradients(inputs)
    for call, (call_dq, *key_grads) in zip(calls, results):
        for grad, of_part in zip((dk, dv), key_grads):
            _by_document(grad[call.keys], call.number)[:, :, call.part].copy_(of_part)
        if call.part.start == 0:
            dq[call.rows] = _packed(call_dq)
        else:
            dq[call.rows] += _packed(call_dq)
    return dq, dk, dv


def empty_gradients(inputs: Inputs) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]


def _by_document(rows: Tensor, number: int) -> Tensor:
    """[D n, heads, E] -> [D, heads, n, E], a view."""
    return rows.unflatten(0, (number, -1)).transpose(1, 2)


def _packed(values: Tensor) -> Tensor:
    """[D, heads, n, E] -> [D n, heads, E], contiguous."""
    return values.transpose(1, 2).flatten(0, 1).contiguous()


# --- plain matrix products ---------------------------------------------------------------------------------------


def _plain_forward(inputs: Inputs) -> Results:
    q = inputs.q
    wide = torch.promote_types(q.dtype, torch.float32)
    key, value = inputs.k.to(wide), inputs.v.to(wide)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide, device=q.device)
    # autocast would round the products
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        for rows, keys, scores in _score_tiles(inputs, key):
            total = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(total).exp_()
            out[:, :, rows] = (weights @ value[:, :, None, keys]).flatten(1, 2).to(q.dtype)
            lse[:, :, rows] = total.flatten(1, 2).squeeze(-1)
    return out, lse


def _plain_backward(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor) -> InputGradients:
    q, k, v = inputs[:3]
    key, value = k.to(lse.dtype), v.to(lse.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(key), torch.zeros_like(value)
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        for rows, keys, scores in _score_tiles(inputs, key):
            upstream, output, query = (_to_groups(x[:, :, rows], key) for x in (dout, out, q))
            weights = scores.sub_(_to_groups(lse[:, :, rows, None], key)).exp_()
            delta = (upstream * output).sum(-1, keepdim=True)
            dscores = weights * (upstream @ value[:, :, None, keys].mT - delta) * inputs.scale
            dq[:, :, rows] = (dscores @ key[:, :, None, keys]).flatten(1, 2).to(q.dtype)
            dk[:, :, keys] += dscores.flatten(2, 3).mT @ query.flatten(2, 3)
            dv[:, :, keys] += weights.flatten(2, 3).mT @ upstream.flatten(2, 3)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _score_tiles(inputs: Inputs, key: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield query rows, the keys that they see, and their scores [D, K, G, rows, keys]."""
    q, nq, nk = inputs.q, inputs.q.shape[2], key.shape[2]
    window = inputs.window or nk
    step = max(1, TILE_SCORES // (nk * q.shape[0] * q.shape[1]))
    if inputs.window:  # a tile's rows all meet the keys of its first row's window
        step = min(step, max(window, LEAST_ROWS))
    for start in range(0, nq, step):
        rows, keys = slice(start, min(start + step, nq)), slice(0, nk)
        first, end = start + nk - nq, rows.stop + nk - nq  # the keys of the rows themselves
        if inputs.causal:
            keys = slice(max(0, first + 1 - window), end)
        scores = _to_groups(q[:, :, rows], key) @ key[:, :, None, keys].mT * inputs.scale
        if inputs.causal:
            row_place = torch.arange(first, end, device=q.device)
            age = row_place[:, None] - torch.arange(keys.start, end, device=q.device)
            scores.masked_fill_((age < 0) | (age >= window), -torch.inf)
        yield rows, keys, scores


def _to_groups(values: Tensor, key: Tensor) -> Tensor:
    """[D, H, n, E] -> [D, K, G, n, E], in the keys' dtype."""
    return values.unflatten(1, (key.shape[1], -1)).to(key.dtype)


# --- torch's fused kernels, causal from the top left -------------------------------------------------------------


def _cpu_forward(inputs: Inputs) -> Results:
    """Run torch's blocked CPU kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_with_all_heads(inputs), 0.0, inputs.causal, scale=inputs.scale
    )


def _cpu_backward(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor) -> InputGradients:
    tensors = dout, *_with_all_heads(inputs), out, lse
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, inputs.causal, scale=inputs.scale
    )
    dk, dv = (grad.unflatten(1, (inputs.k.shape[1], -1)).sum(2) for grad in (dk, dv))
    return dq, dk, dv


def _with_all_heads(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v with a kv head for every query head, for a kernel that cannot share kv heads."""
    q, k, v = inputs[:3]
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _cudnn_forward(inputs: Inputs) -> Results:
    """Run cuDNN's fused attention: GPU, float16 or bfloat16."""
    # without a bias, with the log-sum-exp, without dropout and without a mask for debugging
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *inputs[:3], None, True, 0.0, inputs.causal, False, scale=inputs.scale
    )
    return out, lse.view(out.shape[:3])


def _cudnn_backward(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor) -> InputGradients:
    q, k, v = inputs[:3]
    # the state of a dropout generator and its offset, which are not used without dropout; then no bias and no bounds
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    tensors = dout, q, k, v, out, lse[..., None], unused, unused, None, None, None
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, q.shape[2], k.shape[2], 0.0, inputs.causal, scale=inputs.scale
    )


REFERENCE = DocumentKernel(_plain_forward, _plain_backward, bottom_right=True)
CPU = DocumentKernel(_cpu_forward, _cpu_backward)
# cuDNN refuses some tiny shapes, such as the tail of a pack, and builds a plan for each of the others
CUDNN = DocumentKernel(_cudnn_forward, _cudnn_backward, shortest=64)


def by_document(kernel: DocumentKernel) -> PackKernel:
    """Return what runs a kernel on every document of a pack."""
    return PackKernel(partial(run_forward, kernel), partial(run_backward, kernel))
