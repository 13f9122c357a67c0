# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""A Triton kernel that takes one token through the short convolution and the gated delta rule, for decoding.

Float32 inside, rounded once, no atomics: every result is the same on every run.

Shapes: n documents, K key heads of width E, H value heads of width V.
"""

import torch
from torch import Tensor

from models.families import Delta
from models.ops.delta_rule import EPSILON
from models.ops.passes_triton import triton

if triton is not None:
    import triton.language as tl

    from models.ops.passes_triton import load, store

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


def step(delta: Delta, inputs: Tensor, memory: Tensor, qkv: Tensor, *others: Tensor) -> Tensor:
    """Do models/ops/delta_rule.py's `mix_step`; all tensors are dense."""
    n, H, E, V = memory.shape
    heads, out = delta.linear_num_key_heads, qkv.new_empty(n, H, V)
    with torch.cuda.device(qkv.device):
        _step_kernel[(n, heads)](
            inputs, memory, qkv, *others, out, qkv.shape[1], EPSILON,
            GROUP=H // heads, E=E, V=V, E_BLOCK=triton.next_power_of_2(E), V_BLOCK=triton.next_power_of_2(V),
            TAPS=inputs.shape[1] + 1, num_warps=4,
        )  # fmt: skip
    return out
