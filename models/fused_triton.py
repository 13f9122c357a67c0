# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""Triton kernels of fused.py: one pass over memory each, float32 inside, rounded once.

Row offsets are 64-bit: a tensor may hold more than 2^31 elements. No atomics: every result is the same on every run.
Triton launches on the current device, so every launch makes that of its tensors current.

Shapes: S rows, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_BLOCK = 1024

if triton is not None:

    @triton.jit
    def _load(pointer, mask):
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _store(pointer, value, mask):
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _rotate_heads(
        x,
        out,
        x_row,
        x_head,
        out_row,
        out_head,
        row,
        cos,
        sin,
        heads,
        weight,
        eps,
        HALF: tl.constexpr,
        BLOCK: tl.constexpr,
        HEADS: tl.constexpr,
    ):
        head = tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        mask = (head < heads) & (column < HALF)
        source = x + row * x_row + head * x_head + column
        first = _load(source, mask)
        second = _load(source + HALF, mask)
        if weight is not None:  # each head's RMSNorm
            squares = tl.sum(first * first + second * second, axis=1)[:, None]
            scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
            first *= scale * _load(weight + column, column < HALF)
            second *= scale * _load(weight + HALF + column, column < HALF)
        target = out + row * out_row + head * out_head + column
        _store(target, first * cos - second * sin, mask)
        _store(target + HALF, second * cos + first * sin, mask)

    @triton.jit
    def _rotate_kernel(
        q,
        k,
        q_out,
        k_out,
        cos_table,
        sin_table,
        sign,
        q_row,
        q_head,
        k_row,
        k_head,
        qo_row,
        qo_head,
        ko_row,
        ko_head,
        q_heads,
        k_heads,
        eps,
        q_weight,
        k_weight,
        HALF: tl.constexpr,
        BLOCK: tl.constexpr,
        Q_HEADS: tl.constexpr,
        K_HEADS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        mask = column < HALF
        cos = _load(cos_table + row * HALF + column, mask)[None, :]
        sin = _load(sin_table + row * HALF + column, mask)[None, :] * sign
        _rotate_heads(
            q,
            q_out,
            q_row,
            q_head,
            qo_row,
            qo_head,
            row,
            cos,
            sin,
            q_heads,
            q_weight,
            eps,
            HALF,
            BLOCK,
            Q_HEADS,
        )
        _rotate_heads(
            k,
            k_out,
            k_row,
            k_head,
            ko_row,
            ko_head,
            row,
            cos,
            sin,
            k_heads,
            k_weight,
            eps,
            HALF,
            BLOCK,
            K_HEADS,
        )

    @triton.jit
    def _swiglu_kernel(gate, up, out, count, gap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        source = at + at // WIDTH * gap
        g = _load(gate + source, mask)
        u = _load(up + source, mask)
        _store(out + at, g * tl.sigmoid(g) * u, mask)

    @triton.jit
    def _swiglu_backward_kernel(
        grad, gate, up, both, out, count, gap, WIDTH: tl.constexpr, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        source = at + at // WIDTH * gap
        d = _load(grad + at, mask)
        g = _load(gate + source, mask)
        u = _load(up + source, mask)
        s = tl.sigmoid(g)
        silu = g * s
        _store(out + at, silu * u, mask)
        target = both + at + at // WIDTH * WIDTH
        _store(target, d * u * (s + silu * (1 - s)), mask)
        _store(target + WIDTH, d * silu, mask)

    @triton.jit
    def _rms_norm_kernel(
        x,
        weight,
        out,
        rows,
        eps,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        at = row * WIDTH + column
        mask = (row < rows) & (column < WIDTH)
        v = _load(x + at, mask)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=1)[:, None] / WIDTH + eps)
        _store(out + at, v * scale * _load(weight + column, column < WIDTH), mask)

    @triton.jit
    def _rms_norm_backward_kernel(
        grad,
        x,
        weight,
        residual,
        partial,
        rows,
        eps,
        grad_row,
        grad_head,
        x_row,
        x_head,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        program = tl.program_id(0)
        column = tl.arange(0, BLOCK)[None, :]
        w = _load(weight + column, column < WIDTH)
        grad_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
            row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
            token = row // HEADS
            head = row % HEADS
            mask = (row < rows) & (column < WIDTH)
            v = _load(x + token * x_row + head * x_head + column, mask)
            target = grad + token * grad_row + head * grad_head + column
            d = _load(target, mask)
            more = _load(residual + row * WIDTH + column, mask) if residual is not None else 0.0
            scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=1)[:, None] / WIDTH + eps)
            normal = v * scale
            grad_weight += d * normal
            d = d * w
            d = (d - normal * (tl.sum(d * normal, axis=1)[:, None] / WIDTH)) * scale
            _store(target, d + more, mask)
        sums = tl.sum(grad_weight, axis=0)[None, :]
        _store(partial + program.to(tl.int64) * WIDTH + column, sums, column < WIDTH)


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    sign: float,
    out: Sequence[Tensor],
    *norms: Any,
) -> None:
    """Rotate query [S, H, E] and key [S, K, E] into `out`, which may be the inputs; the last axis must be dense.

    `norms` are eps and the weights [E] of the norms before it, or None where there are none.
    """
    half = query.shape[-1] // 2
    block = triton.next_power_of_2(half)
    heads = [triton.next_power_of_2(x.shape[1]) for x in (query, key)]
    with torch.cuda.device(query.device):
        _rotate_kernel[(query.shape[0],)](
            query,
            key,
            *out,
            cos,
            sin,
            sign,
            *(stride for x in (query, key, *out) for stride in x.stride()[:2]),
            query.shape[1],
            key.shape[1],
            *norms,
            HALF=half,
            BLOCK=block,
            Q_HEADS=heads[0],
            K_HEADS=heads[1],
            num_warps=4 if heads[0] * block <= 2048 else 8,
        )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of dense rows [S, F]; gate and up have the same strides."""
    out = gate.new_empty(gate.shape)
    count, width = gate.numel(), gate.shape[1]
    with torch.cuda.device(gate.device):
        _swiglu_kernel[(triton.cdiv(count, _BLOCK),)](
            gate, up, out, count, gate.stride(0) - width, WIDTH=width, BLOCK=_BLOCK
        )
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up side by side [S, 2F], and silu(gate) * up again; grad is contiguous."""
    (rows, width), count = gate.shape, gate.numel()
    both, out = gate.new_empty(rows, 2 * width), gate.new_empty(gate.shape)
    with torch.cuda.device(gate.device):
        _swiglu_backward_kernel[(triton.cdiv(count, _BLOCK),)](
            grad, gate, up, both, out, count, gate.stride(0) - width, WIDTH=width, BLOCK=_BLOCK
        )
    return both, out


def _by_rows(width: int) -> dict[str, int]:
    """Return how a norm's program is cut: several narrow rows at a time, 16 numbers of each tensor in a thread."""
    block = triton.next_power_of_2(width)
    rows, warps = max(1, 2048 // block), min(16, max(4, block // 512))
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the contiguous rows x [..., D], scaled to unit mean square, times weight."""
    out, cut = torch.empty_like(x), _by_rows(x.shape[-1])
    rows = x.numel() // x.shape[-1]
    with torch.cuda.device(x.device):
        _rms_norm_kernel[(triton.cdiv(rows, cut["ROWS"]),)](x, weight, out, rows, eps, **cut)
    return out


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn grad into the gradient of x [S, D] or [S, H, D] (plus `residual`), and return weight's too, in float32.

    The last axis must be dense, and `residual` contiguous.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    cut = _by_rows(width)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # as many as run at once
    programs = min(triton.cdiv(rows, cut["ROWS"]), 20 // cut["num_warps"] * processors)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _rms_norm_backward_kernel[(programs,)](
            grad,
            x,
            weight,
            residual,
            partial,
            rows,
            eps,
            *grad.stride()[:2],
            *x.stride()[:2],
            HEADS=x.shape[1:-1].numel(),
            **cut,
        )
    return grad, partial.sum(0)
