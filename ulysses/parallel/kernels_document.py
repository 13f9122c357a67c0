"""Attention kernels that work document by document: plain math, and torch's fused kernels that know no packing.

    packed q, k, v        [ doc 0 | doc 1 | doc 2 ... ]      one call each, on slices, nothing copied but GQA heads

`nq` queries meet `nk` keys bottom-right: the last query sees the last key. Kernels whose causal mask is top-left get
such a document as two calls, joined by their log-sum-exps:

              prefix       own keys
           +-----------+-----------+
    nq     |   full    |  \\ causal |        out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)
           +-----------+-----------+
               nk - nq      nq

The backward of each part uses the joint out and lse, which makes it the exact gradient of the whole.

Letters: T packed tokens, H query heads, K kv heads, G = H / K, E head dim.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .layout import Segments

Window = tuple[int, int]
TILE_SCORES = 1 << 24  # attention scores held at once by the plain kernel
SHORT = 64  # cuDNN refuses some tiny shapes, and builds a plan for each; a pack's tail is one


def documents(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """Yield the query rows and key rows of every document (waits for the device if bounds are not on the host)."""
    q, k = segments.bounds or (segments.cu_q.tolist(), segments.cu_k.tolist())
    for i in range(len(q) - 1):
        if q[i] < q[i + 1]:
            yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


# --- plain math --------------------------------------------------------------------------------------------------


def reference_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    window: Window | None,
) -> tuple[Tensor, Tensor]:
    """Compute out [T, H, E] and lse [H, T] by plain matrix products, a tile of query rows at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
    for at_q, at_k in documents(segments):
        keys, values = _by_head(k[at_k], wide), _by_head(v[at_k], wide)
        for rows, low, high, mask in _tiles(q, at_q, at_k, causal, window):
            scores = _scores(q[rows], keys[:, low:high], mask, scale, wide)
            total = scores.logsumexp(-1)
            weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp_()
            out[rows] = _from_groups(weights @ values[:, None, low:high]).to(q.dtype)
            lse[:, rows] = total.flatten(0, 1)
    return out, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *,
    causal: bool, scale: float, window: Window | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute dq, dk, dv from the saved output and log-sum-exp."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for at_q, at_k in documents(segments):
        keys, values = _by_head(k[at_k], wide), _by_head(v[at_k], wide)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, low, high, mask in _tiles(q, at_q, at_k, causal, window):
            group = q.shape[1] // k.shape[1]
            total = lse[:, rows].unflatten(0, (-1, group))[..., None]
            weights = (
                _scores(q[rows], keys[:, low:high], mask, scale, wide)
                - total.masked_fill(total == -torch.inf, 0)
            ).exp_()
            upstream = _to_groups(dout[rows], k.shape[1], wide)
            delta = (upstream * _to_groups(out[rows], k.shape[1], wide)).sum(-1, keepdim=True)
            dscores = weights * (upstream @ values[:, None, low:high].mT - delta) * scale
            dq[rows] = _from_groups(dscores @ keys[:, None, low:high]).to(q.dtype)
            dvalues[:, low:high] += weights.flatten(1, 2).mT @ upstream.flatten(1, 2)
            dkeys[:, low:high] += dscores.flatten(1, 2).mT @ _to_groups(
                q[rows], k.shape[1], wide
            ).flatten(1, 2)
        dk[at_k], dv[at_k] = dkeys.transpose(0, 1).to(k.dtype), dvalues.transpose(0, 1).to(v.dtype)
    return dq, dk, dv


def _tiles(
    q: Tensor, at_q: slice, at_k: slice, causal: bool, window: Window | None
) -> Iterator[tuple[slice, int, int, Tensor | None]]:
    """Cut a document's query rows; yield the rows, the range of keys they can see, and the mask inside it."""
    nq, nk = at_q.stop - at_q.start, at_k.stop - at_k.start
    left, right = visible(causal, window)
    step = max(1, min(nq, TILE_SCORES // max(1, nk * q.shape[1])))
    for a in range(0, nq, step):
        b = min(a + step, nq)
        first, last = a + nk - nq, b - 1 + nk - nq  # key positions of the first and last query
        low = 0 if left is None else min(max(0, first - left), nk)
        high = nk if right is None else max(low, min(nk, last + right + 1))
        mask = None
        if left is not None or right is not None:
            positions = torch.arange(first, last + 1, device=q.device)
            distance = torch.arange(low, high, device=q.device) - positions[:, None]
            mask = torch.zeros_like(distance, dtype=torch.bool)
            if right is not None:
                mask |= distance > right
            if left is not None:
                mask |= distance < -left
        yield slice(at_q.start + a, at_q.start + b), low, high, mask


def visible(causal: bool, window: Window | None) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None without limit."""
    left, right = (None if side is None or side < 0 else side for side in window or (-1, -1))
    return left, (0 if causal else right)


def _scores(
    q: Tensor, keys: Tensor, mask: Tensor | None, scale: float, wide: torch.dtype
) -> Tensor:
    scores = _to_groups(q, keys.shape[0], wide) @ keys[:, None].mT * scale
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def _by_head(values: Tensor, wide: torch.dtype) -> Tensor:
    return values.transpose(0, 1).to(wide)


def _to_groups(values: Tensor, num_kv_heads: int, wide: torch.dtype) -> Tensor:
    """[n, H, E] -> [K, G, n, E]"""
    return values.transpose(0, 1).unflatten(0, (num_kv_heads, -1)).to(wide)


def _from_groups(values: Tensor) -> Tensor:
    """[K, G, n, E] -> [n, H, E]"""
    return values.flatten(0, 1).transpose(0, 1)


# --- torch's fused kernels, [1, heads, n, E], top-left causal ------------------------------------------------------

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]
]


def fused_forward(
    kernel: Forward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a fused kernel on every document; out [T, H, E], lse [H, T]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(
        q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
    )
    for at_q, at_k in documents(segments):
        query, key, value = _heads_first(q[at_q]), _heads_first(k[at_k]), _heads_first(v[at_k])
        prefix = _prefix(at_q, at_k, causal)
        if prefix == 0:
            part, total = kernel(query, key, value, causal, scale)
        else:
            one, lse1 = kernel(query, key[:, :, :prefix], value[:, :, :prefix], False, scale)
            two, lse2 = kernel(query, key[:, :, prefix:], value[:, :, prefix:], True, scale)
            total = torch.logaddexp(lse1, lse2)
            part = one * (lse1 - total).exp()[..., None] + two * (lse2 - total).exp()[..., None]
        out[at_q] = part[0].transpose(0, 1)
        lse[:, at_q] = total[0]
    return out, lse


def fused_backward(
    kernel: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a fused kernel's backward on every document."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.empty_like(k, memory_format=torch.contiguous_format)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    for at_q, at_k in documents(segments):
        query, key, value = _heads_first(q[at_q]), _heads_first(k[at_k]), _heads_first(v[at_k])
        saved = _heads_first(out[at_q]), lse[:, at_q][None].contiguous()
        upstream = _heads_first(dout[at_q])
        prefix = _prefix(at_q, at_k, causal)
        if prefix == 0:
            grads = kernel(upstream, query, key, value, *saved, causal, scale)
        else:
            one = kernel(
                upstream, query, key[:, :, :prefix], value[:, :, :prefix], *saved, False, scale
            )
            two = kernel(
                upstream, query, key[:, :, prefix:], value[:, :, prefix:], *saved, True, scale
            )
            grads = (
                one[0] + two[0],
                torch.cat([one[1], two[1]], 2),
                torch.cat([one[2], two[2]], 2),
            )
        dq[at_q], dk[at_k], dv[at_k] = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


def _heads_first(values: Tensor) -> Tensor:
    return values.transpose(0, 1)[None]


def _prefix(at_q: slice, at_k: slice, causal: bool) -> int:
    """Keys that all of the document's queries see, when they need a call of their own."""
    extra = (at_k.stop - at_k.start) - (at_q.stop - at_q.start)
    if causal and extra < 0:
        raise ValueError(
            "a document has more queries than keys; only the reference kernel computes that causally"
        )
    return extra if causal else 0


def cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's blocked CPU kernel; kv heads are repeated, it knows no groups."""
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )


def cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `cpu_forward`."""
    repeated = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *repeated, out, lse, 0.0, causal, scale=scale
    )
    return dq, _fold(dk, k.shape[1]), _fold(dv, k.shape[1])


def _repeat(values: Tensor, num_heads: int) -> Tensor:
    return (
        values
        if values.shape[1] == num_heads
        else values.repeat_interleave(num_heads // values.shape[1], 1)
    )


def _fold(grads: Tensor, num_kv_heads: int) -> Tensor:
    return (
        grads if grads.shape[1] == num_kv_heads else grads.unflatten(1, (num_kv_heads, -1)).sum(2)
    )


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """cuDNN's fused attention (GPU, float16 or bfloat16); it knows kv groups. Short documents go by plain math."""
    if min(q.shape[2], k.shape[2]) < SHORT:
        weights, lse = _short_weights(q, k, None, causal, scale)
        return (weights @ v[:, :, None].to(weights.dtype)).flatten(1, 2).to(q.dtype), lse.flatten(
            1, 2
        )
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:3])


def cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `cudnn_forward`."""
    if min(q.shape[2], k.shape[2]) < SHORT:
        return _short_backward(dout, q, k, v, out, lse, causal, scale)
    unused = torch.zeros(
        (), dtype=torch.int64, device=q.device
    )  # the dropout generator's state; there is no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], unused, unused, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _short_weights(
    q: Tensor, k: Tensor, lse: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention weights [1, K, G, nq, nk] and log-sum-exps [1, K, G, nq], top-left causal."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.unflatten(1, (k.shape[1], -1)).to(wide) @ k[:, :, None].mT.to(wide) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.logsumexp(-1) if lse is None else lse.unflatten(1, (k.shape[1], -1))
    return (scores - total[..., None]).exp(), total


def _short_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = _short_weights(q, k, lse, causal, scale)
    upstream, output, query = (
        x.unflatten(1, (k.shape[1], -1)).to(weights.dtype) for x in (dout, out, q)
    )
    key, value = k[:, :, None].to(weights.dtype), v[:, :, None].to(weights.dtype)
    dscores = weights * (upstream @ value.mT - (upstream * output).sum(-1, keepdim=True)) * scale
    dq = (dscores @ key).flatten(1, 2)
    dk, dv = (dscores.mT @ query).sum(2), (weights.mT @ upstream).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
