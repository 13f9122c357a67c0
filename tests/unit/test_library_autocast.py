"""torch.autocast and torch's checkpoint, with which users of the library train, change no numbers.

Under autocast a product in half precision in the forward pass alone, where the backward pass computes it again without
it, would also give gradients that are those of no function.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from losses import linear_logprobs
from losses.distill import distillation
from ulysses import UlyssesAttention

DRAW = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(50, 64, generator=DRAW), torch.randn(100, 64, generator=DRAW)
TARGETS = torch.randint(0, 100, (50,), generator=DRAW)
HEADS = [torch.randn(50, heads, 16, generator=DRAW) for heads in (4, 2, 2)]


def logps(hidden, weight):
    return linear_logprobs(hidden, weight, TARGETS, tile_rows=20).logps


def entropy(hidden, weight):
    return linear_logprobs(hidden, weight, TARGETS, entropy=True).entropy


def nll(hidden, weight):
    return linear_logprobs(hidden, weight, TARGETS, loss_weights=torch.ones(50)).nll


def distilled(hidden, weight):
    loss = distillation(HIDDEN.flip(0), WEIGHT, beta=0.5, temperature=1.0, nll_weight=0.5)
    ones = torch.ones(50)
    return linear_logprobs(hidden, weight, TARGETS, loss_weights=ones, tile_loss=loss).nll


def attended(*heads, kernel="auto", window=None):
    attention = UlyssesAttention(None, 4, 2, 16, kernel, window=window)
    return attention(*heads, torch.tensor([0, 20, 50]))


def attended_plainly(*heads):
    return attended(*heads, kernel="reference")


def attended_through_a_window(*heads):
    return attended(*heads, window=7)


def attended_with_sinks(*heads):
    attention, sink = UlyssesAttention(None, 4, 2, 16), torch.linspace(-1, 1, 4)
    return attention(*heads, torch.tensor([0, 20, 50]), sink=sink + heads[0].mean())


HEAD_CASES = (logps, entropy, nll, distilled)
ATTENTION_CASES = (attended, attended_plainly, attended_through_a_window, attended_with_sinks)


@pytest.mark.parametrize("function", HEAD_CASES + ATTENTION_CASES)
def test_values_and_gradients_are_those_without_autocast(function):
    given = HEADS if function in ATTENTION_CASES else [HIDDEN, WEIGHT]
    inputs = [x.clone().requires_grad_() for x in given]
    wanted = function(*inputs)
    grads = torch.autograd.grad(wanted.square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = function(*inputs)
        inside = torch.autograd.grad(got.square().sum(), inputs, retain_graph=True)
    outside = torch.autograd.grad(got.square().sum(), inputs)
    torch.testing.assert_close(got, wanted)
    for found in (inside, outside):
        torch.testing.assert_close(found, grads)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", HEAD_CASES + ATTENTION_CASES)
def test_values_and_gradients_are_those_without_a_checkpoint(function, reentrant):
    """As of layers that are computed again in backward; torch lets an operation read what it saved only once."""
    given = HEADS if function in ATTENTION_CASES else [HIDDEN, WEIGHT]
    plain, again = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    wanted, got = function(*plain), checkpoint(function, *again, use_reentrant=reentrant)
    torch.testing.assert_close(got, wanted)
    for value in (wanted, got):
        value.square().sum().backward()
    torch.testing.assert_close([x.grad for x in again], [x.grad for x in plain])


@pytest.mark.parametrize("function", HEAD_CASES + ATTENTION_CASES)
def test_a_second_derivative_is_refused(function):
    """Of a sum torch's once_differentiable let it be 0 without a word."""
    given = HEADS if function in ATTENTION_CASES else [HIDDEN, WEIGHT]
    inputs = [x.clone().requires_grad_() for x in given]
    with pytest.raises(RuntimeError, match="has no second derivative; leave out create_graph"):
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
