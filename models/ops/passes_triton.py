# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""Triton kernels of the elementwise operations: one pass over memory each, float32 inside, rounded once.

Row offsets are 64-bit: a tensor may hold more than 2^31 elements. No atomics: every result is the same on every run.
Triton launches on the current device, so every launch makes its tensors' device the current one.

Shapes: S rows, D width, H query heads, K kv heads, E head dim, F feed-forward width.
"""

from collections.abc import Sequence
from functools import cache

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
    def load(pointer, mask):
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def store(pointer, value, mask):
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _rotate_kernel(
        tensors, outs, strides, heads, weights, cos_table, sin_table, sign, eps,
        HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)[None, :]
        table = row * HALF + column
        cos = load(cos_table + table, column < HALF)
        sin = load(sin_table + table, column < HALF) * sign
        for i in tl.static_range(2):  # query and key
            x_row, x_head, out_row, out_head = strides[i]
            head = tl.arange(0, HEADS[i])[:, None]
            mask = (head < heads[i]) & (column < HALF)
            source = tensors[i] + row * x_row + head * x_head + column
            first = load(source, mask)
            second = load(source + HALF, mask)
            if weights[i] is not None:  # each head's RMSNorm
                squares = tl.sum(first * first + second * second, axis=1)[:, None]
                scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
                first *= scale * load(weights[i] + column, column < HALF)
                second *= scale * load(weights[i] + HALF + column, column < HALF)
            target = outs[i] + row * out_row + head * out_head + column
            store(target, first * cos - second * sin, mask)
            store(target + HALF, second * cos + first * sin, mask)

    @triton.jit
    def _value_and_slope(g, KIND: tl.constexpr):
        # tanh(z) = 2 sigmoid(2 z) - 1, z = sqrt(2 / pi) (g + 0.044715 g^3)
        if KIND == "gelu_pytorch_tanh":
            s = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
            inner = 1.5957691216057308 * (1 + 0.134145 * g * g)
        else:
            s = tl.sigmoid(g)
            inner = 1.0
        value = g * s
        return value, s + value * (1 - s) * inner

    @triton.jit
    def _gated_kernel(
        gate, up, out, grad, grads, count, gap,
        KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = at // WIDTH
        mask = at < count
        g = load(gate + at + row * gap, mask)
        u = load(up + at + row * gap, mask)
        value, slope = _value_and_slope(g, KIND)
        if grad is not None:
            d = load(grad + at, mask)
            target = grads + at + row * WIDTH
            store(target, d * u * slope, mask)
            store(target + WIDTH, d * value, mask)
        store(out + at, value * u, mask)

    @triton.jit
    def _weighted_kernel(
        both,
        weights,
        out,
        grad,
        to_both,
        to_weights,
        rows,
        out_row,
        to_both_row,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        KIND: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (column < WIDTH)
        step: tl.constexpr = 2 if KIND == "clamped" else 1
        between: tl.constexpr = 1 if KIND == "clamped" else WIDTH
        at, place = row * WIDTH + column, row * 2 * WIDTH + column * step
        g = load(both + place, mask)
        u = load(both + place + between, mask)
        w = tl.load(weights + row, mask=row < rows, other=0.0)
        value, slope = _value_and_slope(g, KIND)
        inner = 1.0
        if KIND == "clamped":
            below = tl.minimum(g, 7.0)
            s = tl.sigmoid(1.702 * below)
            value, slope = below * s, tl.where(g <= 7.0, s + 1.702 * below * s * (1 - s), 0.0)
            inner = tl.where(tl.abs(u) <= 7.0, 1.0, 0.0)
            u = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1
        if grad is not None:
            d = load(grad + at, mask)
            sums = tl.sum(d * value * u, axis=1)[:, None]
            tl.store(to_weights + row, sums, mask=row < rows)
            d *= w
            place = to_both + row * to_both_row + column * step
            store(place, d * u * slope, mask)
            store(place + between, d * value * inner, mask)
        store(out + row * out_row + column, value * u * w, mask)

    @triton.jit
    def _sum_parts_kernel(
        parts, places, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in tl.static_range(COUNT):
            place = tl.load(places + row * COUNT + i)
            total += load(parts + place * WIDTH + column, mask)
        store(out + row * WIDTH + column, total, mask)

    @triton.jit
    def _spread_kernel(
        rows,
        places,
        out,
        out_row,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        COUNT: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        value = tl.load(rows + row * WIDTH + column, mask=mask)
        for i in tl.static_range(COUNT):
            place = tl.load(places + row * COUNT + i)
            tl.store(out + place * out_row + column, value, mask=mask)

    @triton.jit
    def _rms_norm_kernel(
        x,
        weight,
        out,
        residual,
        partial,
        rows,
        eps,
        x_row,
        x_head,
        out_row,
        out_head,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        program = tl.program_id(0)
        column = tl.arange(0, BLOCK)[None, :]
        w = load(weight + column, column < WIDTH)
        grad_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
            row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
            token = row // HEADS
            head = row % HEADS
            mask = (row < rows) & (column < WIDTH)
            target = out + token * out_row + head * out_head + column
            v = load(x + token * x_row + head * x_head + column, mask)
            # every load comes before the first reduction, which would wait for each in turn
            d = load(target, mask) if partial is not None else w
            more = load(residual + row * WIDTH + column, mask) if residual is not None else 0.0
            scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=1)[:, None] / WIDTH + eps)
            v *= scale
            if partial is None:
                d *= v
            else:
                grad_weight += d * v
                d *= w
                d = (d - v * (tl.sum(d * v, axis=1)[:, None] / WIDTH)) * scale + more
            store(target, d, mask)
        if partial is not None:
            sums = tl.sum(grad_weight, axis=0)[None, :]
            store(partial + program * WIDTH + column, sums, column < WIDTH)

    @triton.jit
    def _nf4_kernel(
        codes,
        absmax_codes,
        nested,
        levels,
        out,
        count,
        stride,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
        block = at // 32
        absmax_code = tl.load(absmax_codes + block, mask=mask, other=0).to(tl.int32)
        nested_absmax = tl.load(nested + 257 + block // 256, mask=mask, other=0.0)
        absmax = tl.load(nested + 1 + absmax_code) * nested_absmax + tl.load(nested)
        high, low = tl.load(levels + (code >> 4)), tl.load(levels + (code & 15))
        both = tl.interleave(high * absmax, low * absmax)
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        store(out + at // WIDTH * stride + at % WIDTH, both, at < 2 * count)


# The values that the codes of NF4 stand for, as in bitsandbytes.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@cache
def _nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


def dequantize_nf4(codes: Tensor, absmax_codes: Tensor, nested: Tensor, out: Tensor) -> None:
    """Write the matrices of the parts of models/quantized.py into `out` [..., F, D].

    Rows of `out`, or else its matrices, may have gaps between them. Every product and sum is rounded by itself, as in
    bitsandbytes.
    """
    width, stride = out.shape[-1], out.stride(-2)
    if width == stride:
        width, stride = width * out.shape[-2], out.stride(0)
    count, levels = len(codes), _nf4_levels(out.device)
    arguments = codes, absmax_codes, nested, levels, out, count, stride, width, _BLOCK
    with torch.cuda.device(out.device):
        # without fused products and sums
        _nf4_kernel[(triton.cdiv(count, _BLOCK),)](*arguments, enable_fp_fusion=False)


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    sign: float,
    out: Sequence[Tensor],
    eps: float,
    weights: tuple[Tensor | None, ...],
) -> None:
    """Rotate query [S, H, E] and key [S, K, E] into `out`, which may be the inputs; the last axis must be dense.

    weights: those of the norms [E] before it, or None where there are none.
    """
    both, half = (query, key), query.shape[-1] // 2
    block = triton.next_power_of_2(half)
    heads = tuple(x.shape[1] for x in both)
    heads_block = tuple(map(triton.next_power_of_2, heads))
    strides = tuple((*x.stride()[:2], *y.stride()[:2]) for x, y in zip(both, out))
    with torch.cuda.device(query.device):
        _rotate_kernel[(len(query),)](
            both, tuple(out), strides, heads, weights, cos, sin, sign, eps,
            HALF=half, BLOCK=block, HEADS=heads_block,
            num_warps=4 if heads_block[0] * block <= 2048 else 8,
        )  # fmt: skip


def gated(
    gate: Tensor, up: Tensor, kind: str, grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return act(gate) * up of dense rows [S, F], and for its `grad` both gradients side by side [S, 2F].

    kind: "silu" or "gelu_pytorch_tanh". gate and up have the same strides.
    """
    (rows, width), count = gate.shape, gate.numel()
    out = gate.new_empty(rows, width)
    grads = None
    if grad is not None:
        grad, grads = grad.contiguous(), gate.new_empty(rows, 2 * width)
    gap = gate.stride(0) - width
    with torch.cuda.device(gate.device):
        _gated_kernel[(triton.cdiv(count, _BLOCK),)](
            gate, up, out, grad, grads, count, gap, KIND=kind, WIDTH=width, BLOCK=_BLOCK
        )
    return out, grads


def weighted(
    both: Tensor,
    weights: Tensor,
    kind: str,
    room: Sequence[int],
    grad: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return act(gate) * up * weight of dense rows [M, 2F], and for its `grad` [M, F] the gradients.

    weights [M] are float32, and so is their gradient. kind: as in `gated`, or "clamped" (experts.py). room: how many
    columns the result and the gradient of `both` have at their end that are not written.
    """
    rows, width = len(both), both.shape[1] // 2
    out, to_both, to_weights = both.new_empty(rows, width + room[0]), None, None
    if grad is not None:
        grad, to_both = grad.contiguous(), both.new_empty(rows, 2 * width + room[1])
        to_weights = torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    rows_at_once = max(1, 4096 // block)
    with torch.cuda.device(both.device):
        _weighted_kernel[(triton.cdiv(rows, rows_at_once),)](
            both,
            weights,
            out,
            grad,
            to_both,
            to_weights,
            rows,
            width + room[0],
            2 * width + room[1],
            WIDTH=width,
            BLOCK=block,
            ROWS=rows_at_once,
            KIND=kind,
            num_warps=8,
        )
    return out, to_both, to_weights


def sum_parts(parts: Tensor, places: Tensor, count: int) -> Tensor:
    """Return the sums [S, D] of `count` dense rows of parts [M, D] each, whose numbers are places [S * count]."""
    rows, width = len(places) // count, parts.shape[1]
    out = parts.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    with torch.cuda.device(parts.device):
        _sum_parts_kernel[(rows, triton.cdiv(width, block))](
            parts, places, out, WIDTH=width, BLOCK=block, COUNT=count
        )
    return out


def spread(rows: Tensor, places: Tensor, count: int, room: int) -> Tensor:
    """Write each of the rows [S, D] to `count` rows of a new tensor [M, D + room], whose numbers are places [M].

    The last `room` columns are not written.
    """
    rows = rows.contiguous()
    width = rows.shape[1]
    out = rows.new_empty(len(places), width + room)
    block = min(2048, triton.next_power_of_2(width))
    with torch.cuda.device(rows.device):
        _spread_kernel[(len(rows), triton.cdiv(width, block))](
            rows, places, out, width + room, WIDTH=width, BLOCK=block, COUNT=count
        )
    return out


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    back: bool = False,
) -> Tensor | None:
    """Write x [S, D] or [S, H, D], its last axis scaled to unit mean square, times weight into `out`.

    With `back`, `out` holds the gradient of the result and becomes that of x, to which `residual` (contiguous) is
    added; the gradient of weight is returned in float32. The last axis must be dense.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    # a thread has 16 numbers of each tensor, or 64 where a block is wider than the row
    each = 16 if width == block else 64
    rows_at_once = max(1, (2048 if width == block else 4096) // block)
    warps = min(16, max(1, rows_at_once * block // (32 * each)))
    programs, partial = triton.cdiv(rows, rows_at_once), None
    if back:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(programs, 20 // warps * processors)  # as many as run at once
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _rms_norm_kernel[(programs,)](
            x,
            weight,
            out,
            residual,
            partial,
            rows,
            eps,
            *x.stride()[:2],
            *out.stride()[:2],
            HEADS=x.shape[1:-1].numel(),
            WIDTH=width,
            BLOCK=block,
            ROWS=rows_at_once,
            num_warps=warps,
        )
    return None if partial is None else partial.sum(0)
