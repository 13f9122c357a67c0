"""The gated delta rule in chunks against the recurrence step by step in float64, with decays of trained models.

Documents of 1 to 300 tokens cross chunks; answers start from the state of a prompt that they share.
"""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from models.families import Delta
from models.ops.delta_rule import convolve, decays, delta_rule, mix_pack, unit
from ulysses.parallel.recurrence import Recurrence

CPU = torch.device("cpu")
K, H, E, V = 2, 6, 8, 12
LENGTHS = (1, 300, 63, 64, 65, 2)
# whole documents, the packed rows that suffixes leave out, by their place: cuts at 70 and 300 of the second one, then
# at one row of a suffix, and at the end of that suffix's suffix
SHARING = {
    2: [(1, 71)],
    3: [(1, 301)],
    4: [(1, 71), (301, 302)],
    5: [(1, 71), (301, 302), (428, 493)],
}


def drawn(total, dtype):
    """Decays are those of trained models: from hardly any to all in one token, below float32's smallest number."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    given = {
        "query": 3 * normal(total, K, E),
        "key": normal(total, K, E) + 1,  # keys of trained models point the same way
        "value": normal(total, H, V),
        "a": 3 * normal(total, H),
        "b": 2 * normal(total, H),
        "A_log": torch.tensor([-6.0, -2.0, 0.0, 1.0, 2.5, 4.0], dtype=torch.float64),
        "dt_bias": torch.tensor([-4.0, -2.0, 0.0, 1.0, 3.0, 20.0], dtype=torch.float64),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


def bounds_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def step_by_step(given, bounds, prefixes):
    """One token after the other, each document by itself after the whole of what it shares."""
    group, out = H // K, []
    q, k = (unit(given[x]).repeat_interleave(group, 1) for x in ("query", "key"))
    left = decays(given["a"], given["A_log"], given["dt_bias"]).exp()
    beta = given["b"].sigmoid()
    for place in range(len(bounds) - 1):
        state = q.new_zeros(H, E, V)
        own = range(bounds[place], bounds[place + 1])
        for t in chain(*(range(*part) for part in prefixes.get(place, ())), own):
            state = left[t][:, None, None] * state
            new = beta[t][:, None] * (
                given["value"][t] - torch.einsum("hev,he->hv", state, k[t])
            )
            state = state + k[t][..., None] * new[:, None]
            if t in own:
                out.append(torch.einsum("hev,he->hv", state, q[t]) / E**0.5)
    return torch.stack(out)


def in_chunks(given, bounds, prefixes):
    kernels = SimpleNamespace(
        convolve=lambda rows, *_, widths=0: rows.split([K * E, K * E, H * V], 1),
        delta_rule=delta_rule,
    )
    qkv = torch.cat([given[name].flatten(1) for name in ("query", "key", "value")], 1)
    others = given["b"], given["a"], qkv, given["A_log"], given["dt_bias"]
    return mix_pack(
        Delta(K, H, E, V, 4), Recurrence(bounds, prefixes, CPU), kernels, qkv, *others
    )


def with_gradients(out, given):
    weights = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    grads = torch.autograd.grad((out * weights.to(out.dtype)).sum(), list(given.values()))
    return {"out": out.detach(), **dict(zip(given, grads))}


@pytest.mark.parametrize("prefixes", [{}, SHARING], ids=["whole", "shared"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_chunks_equal_the_recurrence(dtype, bound, prefixes):
    bounds = bounds_of(LENGTHS)
    exact, given = drawn(bounds[-1], torch.float64), drawn(bounds[-1], dtype)
    exact = {name: x.detach().to(dtype).double().requires_grad_() for name, x in exact.items()}
    wanted = with_gradients(step_by_step(exact, bounds, prefixes), exact)
    found = with_gradients(in_chunks(given, bounds, prefixes), given)
    for name, x in wanted.items():
        error = float((found[name].double() - x).norm() / x.norm())
        assert error < bound, (name, error)


def test_the_convolution_sees_its_own_document_and_what_it_shares():
    bounds, F_, W = bounds_of(LENGTHS), 5, 4
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(bounds[-1], F_, generator=draw, dtype=torch.float64)
    weight = torch.randn(F_, W, generator=draw, dtype=torch.float64)
    for prefixes in ({}, SHARING):
        found = torch.cat(convolve(x, weight, Recurrence(bounds, prefixes, CPU), [2, 3]), 1)
        for place, length in enumerate(LENGTHS):
            own = slice(bounds[place], bounds[place + 1])
            whole = torch.cat([*(x[slice(*part)] for part in prefixes.get(place, ())), x[own]])
            wanted = F.conv1d(whole.T, weight[:, None], padding=W - 1, groups=F_)
            wanted = F.silu(wanted[:, : len(whole)].T)[-length:]
            torch.testing.assert_close(found[own], wanted)
        # as the kernels get it: a pack in which copies of the prompt's last rows come before an answer
        pack = Recurrence(bounds, prefixes, CPU).with_copies(W - 1)
        (with_copies,) = convolve(x[pack.rows], weight, Recurrence(pack.bounds, {}, CPU), [5])
        torch.testing.assert_close(with_copies[pack.originals], found)
