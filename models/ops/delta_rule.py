"""The gated delta rule and the short convolution before it, over whole documents, in plain torch.

    S_t = exp(g_t) S_{t-1} + k_t (x) beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        out_t = S_t^T q_t / sqrt(K)

A chunk of C tokens is one step. With S the state before the chunk, G the sums of g from the chunk's beginning on (in
float64), and D_ij = exp(G_i - G_j) for i >= j, its tokens write U:

    U = (1 + tril(beta k k^T * D, -1))^-1 beta (v - exp(G) k S)
    out = (exp(G) q S + (q k^T * D) U) / sqrt(K)          S' = exp(G_C) S + (exp(G_C - G) k)^T U

Source: Yang et al. 2024 (2412.06464). On GPUs the kernels of delta_kernels.py do the same.

Shapes: T packed tokens, n chunks of C tokens, K key heads of width E, H value heads of width V, P parts of documents.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from losses.precision import at_least_float32
from models.families import Delta
from ulysses.parallel.recurrence import Recurrence, TreeLevel

CHUNK = 64
EPSILON = 1e-6  # beside the sum of squares of a query and of a key


def convolve(
    x: Tensor, weight: Tensor, recurrence: Recurrence, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return silu of the causal convolution of packed rows x [T, F] with a filter of each column [F, W], in parts."""
    pack = recurrence.with_copies(weight.shape[1] - 1)
    wide, taps = at_least_float32(x)[pack.rows], at_least_float32(weight)
    lengths = pack.cu_seqlens.diff()
    first = pack.cu_seqlens[:-1].repeat_interleave(lengths, output_size=len(wide))
    place = (torch.arange(len(wide), device=x.device) - first)[:, None]
    total = wide * taps[:, -1]
    for age in range(1, weight.shape[1]):
        total = total + (wide.roll(age, 0) * taps[:, -1 - age]).masked_fill(place < age, 0)
    return F.silu(total[pack.originals]).to(x.dtype).split(widths, 1)


def decays(a: Tensor, log_rates: Tensor, bias: Tensor) -> Tensor:
    """Return g [T, H], the logarithm of the share of a state that each token leaves, from the projection a [T, H]."""
    return -at_least_float32(log_rates).exp() * F.softplus(at_least_float32(a) + bias)


def unit(x: Tensor) -> Tensor:
    """Scale the vector of every head to unit length."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    level: TreeLevel,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the rule over the parts of a level.

    query and key [T, K, E] are scaled to unit length here; value [T, H, V]; g and beta [T, H]. start [P, H, E, V]: the
    states before the parts; None for zeros. Returns out [T, H, V] and the states after the parts [P, H, E, V], which
    are in float32 or better.
    """
    dtype, device = value.dtype, value.device
    query, key, value, beta = map(at_least_float32, (query, key, value, beta))
    group = value.shape[1] // key.shape[1]
    query, key = (unit(x).repeat_interleave(group, 1) for x in (query, key))
    spans = [range(*bounds) for bounds in pairwise(level.bounds)]
    # each step takes the next chunk of every part that has one: the parts' numbers, and their rows
    steps = [
        {i: span[begin : begin + CHUNK] for i, span in enumerate(spans) if begin < len(span)}
        for begin in range(0, max(map(len, spans)), CHUNK)
    ]
    chunks = [torch.arange(x.start, x.stop) for step in steps for x in step.values()]
    rows = pad_sequence(chunks, batch_first=True, padding_value=len(value)).to(device)

    def chunked(x: Tensor) -> Tensor:
        """Lay rows [T, H, ...] out as [n, H, C, ...], with zeros behind a part's end."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows].transpose(1, 2)

    q, k, v, beta = map(chunked, (query / key.shape[-1] ** 0.5, key, value, beta[..., None]))
    sums = chunked(g.double()).cumsum(-1)
    later = torch.ones(2 * rows.shape[1:], dtype=torch.bool, device=device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf)
    # D, exp(G) and exp(G_C - G) of the equations
    between, since, until = (
        x.exp().to(v.dtype)
        for x in (between, sums[..., None], (sums[..., -1:] - sums)[..., None])
    )
    system, scores = beta * (k @ k.mT) * between, (q @ k.mT) * between
    # the solver takes ones for the system's diagonal
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * since * k], -1), upper=False, unitriangular=True
    )
    new, old = solved.split([v.shape[-1], k.shape[-1]], -1)  # U = new - old S
    q, k = since * q, until * k
    if start is None:
        start = value.new_zeros(len(spans), value.shape[1], key.shape[-1], value.shape[-1])
    states, outs, first = [*start.to(v.dtype)], [], 0
    for step in steps:
        now, state = slice(first, first + len(step)), torch.stack([states[i] for i in step])
        written = new[now] - old[now] @ state
        outs.append(q[now] @ state + scores[now] @ written)
        state = since[now, :, -1:] * state + k[now].mT @ written
        for i, after in zip(step, state):
            states[i] = after
        first += len(step)
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    out = out[rows.flatten().argsort()[: len(value)]]
    return out.to(dtype), torch.stack(states)


def mix_step(
    delta: Delta,
    inputs: Tensor,
    memory: Tensor,
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    filters: Tensor,
    log_rates: Tensor,
    bias: Tensor,
) -> Tensor:
    """Take one token of each of n documents, q | k | v [n, F], through convolution and rule: out [n, H, V].

    inputs [n, W - 1, F], the last inputs of the convolution, and the states `memory` [n, H, E, V] are changed in place.
    """
    window = torch.cat([inputs, qkv[:, None]], 1)
    inputs.copy_(window[:, 1:])
    mixed = F.silu((window * at_least_float32(filters.T)).sum(1)).to(qkv.dtype).to(memory.dtype)
    widths = own_widths(delta, qkv.shape[1], b.shape[1])
    query, key, value = as_heads(delta, mixed.split(widths, 1))
    group = value.shape[1] // key.shape[1]
    query, key = (unit(x).repeat_interleave(group, 1)[:, :, None] for x in (query, key))
    memory *= decays(a, log_rates, bias).exp()[..., None, None]
    beta = at_least_float32(b).sigmoid()
    written = beta[..., None] * (value - (key @ memory)[:, :, 0])
    memory += key.mT * written[:, :, None]
    return ((query @ memory)[:, :, 0] / key.shape[-1] ** 0.5).to(qkv.dtype)


def mix_pack(
    delta: Delta,
    recurrence: Recurrence,
    kernels: ModuleType,
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    filters: Tensor,
    log_rates: Tensor,
    bias: Tensor,
) -> Tensor:
    """Convolve q | k | v [T, F] of any heads of a layer, and run the rule over the pack: out [T, H, V].

    kernels: this module, or delta_kernels. Shared prompts run before the sequences that continue them.
    """
    widths = own_widths(delta, qkv.shape[1], b.shape[1])
    heads = as_heads(delta, kernels.convolve(qkv, filters, recurrence, widths))
    inputs = *heads, decays(a, log_rates, bias), at_least_float32(b).sigmoid()
    outs: list[Tensor] = []
    final_states: list[Tensor] = []  # of all levels so far, from which later ones start
    for level in recurrence.tree_levels:
        start = torch.cat(final_states)[level.initial_states] if final_states else None
        out, states = kernels.delta_rule(
            *(x[level.rows] for x in inputs), level=level, start=start
        )
        outs.append(out)
        if level.final_states is not None:
            final_states.append(states[level.final_states])
    if not final_states:
        return out
    rows = torch.cat([level.rows for level in recurrence.tree_levels])  # type: ignore[misc]
    return torch.cat(outs)[rows.argsort()]


def own_widths(delta: Delta, columns: int, values: int) -> list[int]:
    """Return how many columns q, k and v have, from those of q | k | v together and the number of value heads."""
    of_values = values * delta.linear_value_head_dim
    return [(columns - of_values) // 2, (columns - of_values) // 2, of_values]


def as_heads(delta: Delta, parts: Sequence[Tensor]) -> list[Tensor]:
    """View q, k and v [..., columns] as heads [..., heads, width]."""
    E, V = delta.linear_key_head_dim, delta.linear_value_head_dim
    return [x.unflatten(-1, (-1, width)) for x, width in zip(parts, (E, E, V))]
