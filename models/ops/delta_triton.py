# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""Triton kernels around the gated delta rule: the short convolution before it, and one token of decoding.

Float32 inside, rounded once, no atomics: every result is the same on every run.

Shapes: T rows, F columns of q | k | v, W = 4 taps, n documents, K key heads of width E, H value heads of width V.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.families import Delta
from models.ops.delta_rule import EPSILON
from models.ops.passes_triton import triton
from ulysses.parallel.layout import Context

TAPS = 4  # of the models that exist; the kernels of the convolution hold the rows before one in registers
ROWS, BLOCK = 128, 128  # of a program, which goes through its rows one after the other


if triton is not None:
    import triton.language as tl

    from models.ops.passes_triton import load, store

    @triton.jit
    def _convolve_kernel(
        x, first, weight, out, grad, partial,
        rows, columns, x_row, partial_row,
        ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Write silu of the convolution to `out`; with `grad` the gradient of x instead, and sums for the weights'."""
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        # of the row itself, and of those one, two and three before it
        w0 = load(weight + column * 4 + 3, mask)
        w1 = load(weight + column * 4 + 2, mask)
        w2 = load(weight + column * 4 + 1, mask)
        w3 = load(weight + column * 4, mask)
        begin = tl.program_id(0).to(tl.int64) * ROWS
        x += column
        x1 = load(x + (begin - 1) * x_row, mask & (begin >= 1))
        x2 = load(x + (begin - 2) * x_row, mask & (begin >= 2))
        x3 = load(x + (begin - 3) * x_row, mask & (begin >= 3))
        # what is complete of the gradients of the three rows before; sums over rows for the weights
        d1 = tl.zeros((BLOCK,), dtype=tl.float32)
        d2, d3, s0, s1, s2, s3 = d1, d1, d1, d1, d1, d1
        # the next row is loaded while one is computed
        after = load(x + begin * x_row, mask)
        slope = d1
        if grad is not None:
            grad += column
            slope = load(grad + begin * columns, mask)
        # of a gradient, three rows more, which these are among the taps of
        for i in range(ROWS if grad is None else ROWS + 3):
            row = begin + i
            now, g, more = after, slope, mask & (row + 1 < rows)
            after = load(x + (row + 1) * x_row, more)
            age = row - tl.load(first + row, mask=row < rows, other=row)
            y1 = tl.where(age >= 1, x1, 0.0)
            y2 = tl.where(age >= 2, x2, 0.0)
            y3 = tl.where(age >= 3, x3, 0.0)
            total = w0 * now + w1 * y1 + w2 * y2 + w3 * y3
            part = tl.sigmoid(total)
            if grad is None:
                store(out + row * columns + column, total * part, mask & (row < rows))
            else:
                slope = load(grad + (row + 1) * columns, more)
                g *= part * (1 + total * (1 - part))
                d1 += tl.where(age >= 1, w1 * g, 0.0)
                d2 += tl.where(age >= 2, w2 * g, 0.0)
                d3 += tl.where(age >= 3, w3 * g, 0.0)
                store(out + (row - 3) * x_row + column, d3, mask & (i >= 3) & (row - 3 < rows))
                d3, d2, d1 = d2, d1, w0 * g
                own = tl.where(i < ROWS, g, 0.0)
                s0, s1, s2, s3 = s0 + own * now, s1 + own * y1, s2 + own * y2, s3 + own * y3
            x3, x2, x1 = x2, x1, now
        if grad is not None:
            partial += tl.program_id(0).to(tl.int64) * partial_row + column * 4
            tl.store(partial, s3, mask=mask)
            tl.store(partial + 1, s2, mask=mask)
            tl.store(partial + 2, s1, mask=mask)
            tl.store(partial + 3, s0, mask=mask)

    @triton.jit
    def _next_input(inputs, new, weight, column, mask, columns, TAPS: tl.constexpr):
        """Convolve columns of a token with those of the tokens before it, and move these up by one."""
        value = load(new + column, mask)
        total = value * load(weight + column * TAPS + TAPS - 1, mask)
        for i in tl.static_range(TAPS - 1):
            place = inputs + i * columns + column
            old = load(place, mask)
            total += old * load(weight + column * TAPS + i, mask)
            # with fewer columns than threads several hold the same one: all have read before any writes
            tl.debug_barrier()
            if i > 0:
                store(place - columns, old, mask)
        store(inputs + (TAPS - 2) * columns + column, value, mask)
        return (total * tl.sigmoid(total)).to(new.dtype.element_ty).to(tl.float32)

    @triton.jit
    def _step_kernel(
        inputs, memory, qkv, b, a, weight, log_rates, bias, out, columns, eps,
        GROUP: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
        E_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, TAPS: tl.constexpr,
    ):  # fmt: skip
        """Take a token of one document through one key head and its value heads."""
        document, head, heads = (
            tl.program_id(0).to(tl.int64),
            tl.program_id(1),
            tl.num_programs(1),
        )
        inputs += document * columns * (TAPS - 1)
        qkv += document * columns
        e, v = tl.arange(0, E_BLOCK), tl.arange(0, V_BLOCK)
        q = _next_input(inputs, qkv, weight, head * E + e, e < E, columns, TAPS)
        k = _next_input(inputs, qkv, weight, (heads + head) * E + e, e < E, columns, TAPS)
        q /= tl.sqrt((tl.sum(q * q, axis=0) + eps) * E)
        k /= tl.sqrt(tl.sum(k * k, axis=0) + eps)
        mask = (e < E)[:, None] & (v < V)[None, :]
        for i in tl.static_range(GROUP):
            value = head * GROUP + i
            new = _next_input(
                inputs, qkv, weight, 2 * heads * E + value * V + v, v < V, columns, TAPS
            )
            at = document * heads * GROUP + value
            rate = tl.load(a + at).to(tl.float32) + tl.load(bias + value).to(tl.float32)
            rate = tl.where(rate > 20.0, rate, tl.log(1 + tl.exp(tl.minimum(rate, 20.0))))
            left = tl.exp(-tl.exp(tl.load(log_rates + value).to(tl.float32)) * rate)
            place = memory + (at * E + e[:, None]) * V + v[None, :]
            state = left * tl.load(place, mask=mask, other=0.0)
            new -= tl.sum(k[:, None] * state, axis=0)
            new *= tl.sigmoid(tl.load(b + at).to(tl.float32))
            state += k[:, None] * new[None, :]
            tl.debug_barrier()
            tl.store(place, state, mask=mask)
            store(out + at * V + v, tl.sum(q[:, None] * state, axis=0), v < V)


class Convolve(torch.autograd.Function):
    """silu of the causal convolution of rows x [T, F] with filters [F, 4], its columns in dense parts of some widths.

    first [T] int32: the first row of each row's document.
    """

    @staticmethod
    def forward(
        ctx: Context[Sequence[int]],
        x: Tensor,
        weight: Tensor,
        first: Tensor,
        widths: Sequence[int],
    ) -> tuple[Tensor, ...]:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight, first)
        ctx.rest = widths
        outs = [x.new_empty(len(x), width) for width in widths]
        for out, rows, taps in zip(outs, x.split(widths, 1), weight.split(widths)):
            _convolve(rows, first, taps, out)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Sequence[int]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, first = ctx.saved_tensors
        found = torch.empty_like(x)
        sums = x.new_empty(triton.cdiv(len(x), ROWS), *weight.shape, dtype=torch.float32)
        parts = (
            a.split(ctx.rest, dim) for a, dim in ((x, 1), (weight, 0), (found, 1), (sums, 1))
        )
        for rows, taps, out, partial, grad in zip(*parts, grads):
            _convolve(rows, first, taps, out, grad.contiguous(), partial)
        return found, sums.sum(0).to(weight.dtype), None, None


def _convolve(x: Tensor, first: Tensor, weight: Tensor, out: Tensor, *back: Tensor) -> None:
    rows, columns = x.shape
    grad, partial = back or (None, None)
    with torch.cuda.device(x.device):
        _convolve_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK))](
            x, first, weight, out, grad, partial,
            rows, columns, x.stride(0), 0 if partial is None else partial.stride(0),
            ROWS=ROWS, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip


def step(shape: Delta, inputs: Tensor, memory: Tensor, qkv: Tensor, *others: Tensor) -> Tensor:
    """Do models/ops/delta_rule.py's `mix_step`; all tensors are dense."""
    n, H, E, V = memory.shape
    heads, out = shape.linear_num_key_heads, qkv.new_empty(n, H, V)
    with torch.cuda.device(qkv.device):
        _step_kernel[(n, heads)](
            inputs, memory, qkv, *others, out, qkv.shape[1], EPSILON,
            GROUP=H // heads, E=E, V=V, E_BLOCK=triton.next_power_of_2(E), V_BLOCK=triton.next_power_of_2(V),
            TAPS=inputs.shape[1] + 1, num_warps=4,
        )  # fmt: skip
    return out
