"""Token losses and PPO against loops in float64."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

from losses import (
    dft_nll,
    group_advantages,
    kl_estimate,
    label_smoothed_nll,
    linear_logprobs,
    packed_gae,
    ppo_policy_loss,
    ppo_value_loss,
    token_nll,
    token_rewards,
    weighted_sum,
    whiten,
    z_loss,
)
from tests.operations import Operations

DOUBLE = torch.float64
double, drawn = partial(torch.tensor, dtype=DOUBLE), partial(torch.randn, dtype=DOUBLE)


def test_token_nll_and_its_limits():
    logps = torch.tensor([-1.0, -2.0, -float("inf"), float("nan")], requires_grad=True)
    total, count = token_nll(logps, torch.tensor([1.0, 0.5, 0.0, 0.0]))
    total.backward()
    assert (total.item(), count.item()) == (2.0, 1.5)
    assert logps.grad.tolist() == [-1.0, -0.5, 0.0, 0.0]
    logps = torch.zeros(3, requires_grad=True)
    total, count = token_nll(logps, torch.zeros(3))
    total.backward()
    assert (total.item(), count.item(), logps.grad.tolist()) == (0.0, 0.0, [0.0] * 3)
    empty = torch.zeros(0, requires_grad=True)
    token_nll(empty, torch.zeros(0))[0].backward()
    assert token_nll(torch.zeros(2).bfloat16(), torch.ones(2))[0].dtype == torch.float32
    with pytest.raises(ValueError, match="give one weight each"):
        weighted_sum(torch.zeros(2), torch.zeros(3))


def test_micro_batches_add_up_to_the_whole():
    logps, weights = drawn(12), torch.rand(12, dtype=DOUBLE).round()
    whole, count = token_nll(logps, weights)
    for split in ([12], [5, 7], [1, 1, 10]):
        losses, counts = zip(*map(token_nll, logps.split(split), weights.split(split)))
        assert_close(sum(losses) / sum(counts), whole / count)


@pytest.mark.parametrize("e", [0.0, 0.1])
def test_label_smoothing_equals_torch(e):
    hidden, weight, targets = drawn(5, 4), drawn(9, 4), torch.randint(9, (5,))
    out = linear_logprobs(hidden, weight, targets, lse=True, mean_logit=True)
    want = F.cross_entropy(hidden @ weight.t(), targets, label_smoothing=e, reduction="none")
    assert_close(label_smoothed_nll(out.logps, out.lse, out.mean_logit, e), want)
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        label_smoothed_nll(out.logps, out.lse, out.mean_logit, 1)


def test_dft_holds_the_probability_constant():
    logps = double([-1.0, -3.0], requires_grad=True)
    dft_nll(logps).sum().backward()
    assert_close(logps.grad, -logps.detach().exp())
    assert_close(dft_nll(logps), -logps.exp() * logps)


def test_z_loss():
    assert z_loss(torch.tensor([3.0]), 1e-4).item() == pytest.approx(9e-4)
    with pytest.raises(ValueError, match="z-loss coefficient is -1"):
        z_loss(torch.zeros(1), -1)


# PPO


def gae_loop(rewards, values, gamma, lam):
    advantages, later, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        later = reward + gamma * after - value + gamma * lam * later
        advantages, after = [later, *advantages], value
    return advantages


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (1.0, 1.0), (0.0, 0.5), (0.9, 0.0), (1.0, 0.5)]
)
def test_packed_gae_equals_the_loop(gamma, lam):
    g = torch.Generator().manual_seed(0)
    lengths = [1, 37, 2, 64, 65, 1, 130]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    rewards, values = (drawn(sum(lengths), generator=g) for _ in range(2))
    advantages, returns = packed_gae(rewards, values, cu.int(), gamma, lam)
    want = []
    for row in zip(rewards.split(lengths), values.split(lengths)):
        want += gae_loop(*(x.tolist() for x in row), gamma, lam)
    assert_close(advantages, double(want), rtol=1e-10, atol=1e-10)
    assert_close(returns, advantages + values)


def test_packed_gae_has_no_loop_over_tokens():
    counts = []
    for n in (3_000, 300_000):
        given = torch.ones(n), torch.zeros(n), torch.tensor([0, n])
        with Operations() as operations:
            advantages, _ = packed_gae(*given, 1.0, 1.0)
        counts.append(len(operations.called))
        assert advantages[0].item() == pytest.approx(n, rel=1e-6)
    assert counts[1] < 2 * counts[0]
    empty, _ = packed_gae(torch.zeros(0), torch.zeros(0), torch.tensor([0]))
    assert empty.shape == (0,)


def test_packed_gae_refuses():
    zeros, ends = torch.zeros(2), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"both must be packed \[T\]"):
        packed_gae(zeros, torch.zeros(3), ends)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        packed_gae(zeros, zeros, ends, gamma=1.5)
    with pytest.raises(ValueError, match="cu_seqlens ends at 3 but there are 2"):
        packed_gae(zeros, zeros, torch.tensor([0, 3]))


def policy_literal(logp, old, a, low, high, dual, kind):
    rho = math.exp(logp - old)
    if kind == "cispo":
        return -a * min(rho, 1 + high) * logp
    loss = max(-a * rho, -a * min(max(rho, 1 - low), 1 + high))
    return min(loss, -dual * a) if dual and a < 0 else loss


@pytest.mark.parametrize(
    ("high", "dual", "kind"),
    [
        (None, None, "clip"),
        (0.28, None, "clip"),
        (None, 3.0, "clip"),
        (0.1, 1.15, "clip"),
        (0.3, None, "cispo"),
    ],
)
def test_policy_loss_equals_its_equation(high, dual, kind):
    g = torch.Generator().manual_seed(2)
    logps, old, advantages = (drawn(40, generator=g) for _ in range(3))
    options = {"clip_high": high, "dual_clip": dual, "kind": kind}
    out = ppo_policy_loss(logps, old, advantages, 0.2, **options)
    rows = zip(*(x.tolist() for x in (logps, old, advantages)))
    want = [policy_literal(*row, 0.2, high or 0.2, dual, kind) for row in rows]
    assert_close(out.losses, double(want))
    assert_close(out.ratios, (logps - old).exp())
    logps.requires_grad_()

    def loss(x):
        return ppo_policy_loss(x, old, advantages, **options).losses

    (gradient,) = grad(loss(logps).sum(), logps)
    if kind == "cispo":  # the bounded ratio is a weight, and clipped tokens learn
        weights = (logps.detach() - old).exp().clamp(max=1.3)
        assert_close(gradient, -advantages * weights)
        assert torch.equal(out.clipped.bool(), out.ratios > 1.3)
        return
    assert gradcheck(loss, logps)
    # a clipped token gives no gradient, any other does
    assert torch.equal(gradient == 0, out.clipped.bool())


def test_policy_loss_limits():
    logps = torch.tensor([1e4, 1e4, -1e4, -1e4], requires_grad=True)
    out = ppo_policy_loss(logps, torch.zeros(4), torch.tensor([1.0, -1.0] * 2))
    out.losses.sum().backward()
    assert out.losses.isfinite().all() and logps.grad.isfinite().all()
    out = ppo_policy_loss(torch.zeros(3), torch.zeros(3), torch.tensor([1.0, -2.0, 0.0]))
    assert out.ratios.tolist() == [1.0] * 3 and not out.clipped.any()
    assert out.losses.tolist() == [-1.0, 2.0, 0.0]
    zero = torch.zeros(1)
    for options, complaint in (
        ({"clip": 1.5}, r"clip is 1\.5"),
        ({"dual_clip": 1}, "dual_clip is 1"),
        ({"dual_clip": 1.2, "clip_high": 0.3}, r"must be above 1 \+ clip_high, 1.3"),
        ({"dual_clip": 3, "kind": "cispo"}, "only the kind clip has it"),
        ({"kind": "clipped"}, "must be clip or cispo"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ppo_policy_loss(zero, zero, zero, **options)


def test_value_loss():
    v, old, g = double([[1, 1, 0], [0, 0.9, 0], [2, 2, -3]])
    out = ppo_value_loss(v, old, g, 0.2)
    assert out.losses.tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 4.5])
    assert out.clipped.tolist() == [1.0, 0.0, 0.0]
    assert_close(ppo_value_loss(v, old, g, None).losses, 0.5 * (v - g) ** 2)
    assert gradcheck(lambda x: ppo_value_loss(x, old, g).losses, v.clone().requires_grad_())
    with pytest.raises(ValueError, match="value clip is -1"):
        ppo_value_loss(v, old, g, -1)


def test_kl_estimates():
    d = torch.linspace(-3, 3, 7, dtype=DOUBLE)
    zero = torch.zeros_like(d)
    assert_close(kl_estimate(d, zero, "k1"), d)
    assert_close(kl_estimate(d, zero, "k2"), d**2 / 2)
    assert_close(kl_estimate(d, zero, "k3"), torch.exp(-d) - 1 + d)
    assert (kl_estimate(d, zero, "k3") >= 0).all()
    assert torch.isfinite(kl_estimate(torch.tensor([-1e4, 1e4]), torch.zeros(2), "k3")).all()
    with pytest.raises(ValueError, match="must be k1, k2 or k3"):
        kl_estimate(d, zero, "k4")


def test_kl_estimates_agree_in_expectation():
    """k1 and k3 estimate KL(p || q) from samples of p without bias."""
    g = torch.Generator().manual_seed(0)
    p, q = (drawn(8, generator=g).log_softmax(0) for _ in range(2))
    sample = torch.multinomial(p.exp(), 200_000, True, generator=g)
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        found = kl_estimate(p[sample], q[sample], kind).mean().item()
        assert found == pytest.approx(exact, abs=0.02)


def test_group_advantages():
    """Against the papers' equations, one group at a time."""
    scores = double([1.0, 2.0, 4.0, 0.5, 0.5, 0.5, -1.0, 3.0, 0.0])
    for kind, scale in (
        ("group", True), ("group", "batch"), ("group", False), ("leave_one_out", True)
    ):  # fmt: skip
        found = group_advantages(scores, 3, kind, scale=scale)
        for i, r in enumerate(scores.tolist()):
            group = scores[i // 3 * 3 : i // 3 * 3 + 3].tolist()
            mean = sum(group) / 3
            deviation = math.sqrt(sum((x - mean) ** 2 for x in group) / 2)
            if scale == "batch":
                deviation = math.sqrt(float(((scores - scores.mean()) ** 2).sum()) / 8)
            expected = (r - mean) / (deviation + 1e-4) if scale else r - mean
            if kind == "leave_one_out":
                expected = r - (sum(group) - r) / 2
            assert found[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    for size, kind in ((1, "group"), (2, "group"), (3, "gae")):
        with pytest.raises(ValueError, match="groups must have one size of at least 2"):
            group_advantages(scores, size, kind)


def test_whiten():
    values = double([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]])
    mask, kept = torch.tensor([[1, 1, 0], [1, 0, 0]]), double([1.0, 2.0, 4.0])
    got = whiten(values, mask)
    whitened = (kept - kept.mean()) / (kept.var(unbiased=False) + 1e-8).sqrt()
    assert_close(got[mask.bool()], whitened)
    assert not got[~mask.bool()].any()
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]
    assert whiten(torch.tensor([5.0]), torch.zeros(1)).tolist() == [0.0]


def test_score_lands_on_the_last_token():
    """[t, t, eos] and [t, t] cut off: the score stands on eos itself, and the penalty on the answer without one."""
    kl, scores, ends = (
        torch.tensor(x) for x in ([0.1, 0.2, 0.3, 0.4, 0.5], [10.0, 1.0], [2, 4])
    )
    has_eos = torch.tensor([True, False])
    got = token_rewards(kl, scores, ends, 0.5, missing_eos_penalty=2.0, has_eos=has_eos)
    assert_close(got, torch.tensor([-0.05, -0.1, 10 - 0.15, -0.2, -1 - 0.25]))
    with pytest.raises(ValueError, match="has_eos is missing"):
        token_rewards(kl, scores, ends, 0.5, missing_eos_penalty=1.0)
    with pytest.raises(ValueError, match="each answer needs one of both"):
        token_rewards(kl, scores[:1], ends, 0.5)
