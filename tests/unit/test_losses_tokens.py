"""Token losses and PPO against loops in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from losses import (
    dft_nll,
    gae,
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
    logps, weights = (
        torch.randn(12, dtype=torch.float64),
        torch.rand(12, dtype=torch.float64).round(),
    )
    whole = token_nll(logps, weights)
    for split in ([12], [5, 7], [1, 1, 10]):
        parts = [token_nll(a, b) for a, b in zip(logps.split(split), weights.split(split))]
        torch.testing.assert_close(
            sum(p[0] for p in parts) / sum(p[1] for p in parts), whole[0] / whole[1]
        )


@pytest.mark.parametrize("e", [0.0, 0.1])
def test_label_smoothing_equals_torch(e):
    hidden, weight = (
        torch.randn(5, 4, dtype=torch.float64),
        torch.randn(9, 4, dtype=torch.float64),
    )
    targets = torch.randint(9, (5,))
    out = linear_logprobs(hidden, weight, targets, lse=True, mean_logit=True)
    want = F.cross_entropy(hidden @ weight.t(), targets, label_smoothing=e, reduction="none")
    torch.testing.assert_close(label_smoothed_nll(out.logps, out.lse, out.mean_logit, e), want)
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        label_smoothed_nll(out.logps, out.lse, out.mean_logit, 1)


def test_dft_holds_the_probability_constant():
    logps = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    dft_nll(logps).sum().backward()
    torch.testing.assert_close(logps.grad, -logps.detach().exp())
    torch.testing.assert_close(dft_nll(logps), -logps.exp() * logps)


def test_z_loss():
    assert z_loss(torch.tensor([3.0]), 1e-4).item() == pytest.approx(9e-4)
    with pytest.raises(ValueError, match="z-loss coefficient is -1"):
        z_loss(torch.zeros(1), -1)


# PPO


def gae_loop(rewards, values, gamma, lam):
    advantages, later = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * after - values[t] + gamma * lam * later
        advantages[t] = later
    return advantages


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (1.0, 1.0), (0.0, 0.5), (0.9, 0.0), (1.0, 0.5)]
)
def test_packed_gae_equals_the_loop(gamma, lam):
    g = torch.Generator().manual_seed(0)
    lengths = [1, 37, 2, 64, 65, 1, 130]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    rewards, values = (
        torch.randn(sum(lengths), generator=g, dtype=torch.float64) for _ in range(2)
    )
    advantages, returns = packed_gae(rewards, values, cu.int(), gamma, lam)
    want = []
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        want += gae_loop(rewards[a:b].tolist(), values[a:b].tolist(), gamma, lam)
    torch.testing.assert_close(
        advantages, torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(returns, advantages + values)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (0.0, 0.5), (0.9, 0.0)])
@pytest.mark.parametrize("side", ["right", "left", "both", "nothing"])
def test_padded_gae_equals_the_loop(gamma, lam, side):
    """Whatever stands in the padding, and wherever that is."""
    g = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5, 9, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(5, 9)
    for row, length in enumerate((9, 1, 0, 4, 7)):
        start = {"right": 0, "left": 9 - length, "both": (9 - length) // 2, "nothing": 0}[side]
        mask[row, start : start + length] = side != "nothing"
    rewards[mask == 0], values[mask == 0] = torch.nan, torch.inf
    advantages, returns = gae(rewards.requires_grad_(), values, mask, gamma, lam)
    assert (
        not advantages.requires_grad
        and not advantages[mask == 0].any()
        and not returns[mask == 0].any()
    )
    for row, kept in enumerate(mask.bool()):
        own = values[row][kept]
        want = torch.tensor(
            gae_loop(rewards[row][kept].tolist(), own.tolist(), gamma, lam), dtype=torch.float64
        )
        torch.testing.assert_close(advantages[row][kept], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns[row][kept], want + own, rtol=1e-12, atol=1e-12)


class Operations(TorchDispatchMode):
    """Count the tensor operations that are called."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_packed_gae_has_no_loop_over_tokens():
    counts = []
    for n in (3_000, 300_000):
        with Operations() as operations:
            advantages, _ = packed_gae(
                torch.ones(n), torch.zeros(n), torch.tensor([0, n]), 1.0, 1.0
            )
        counts.append(operations.count)
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
    for bounds, said in (([], "0, here 0"), ([1, 2], "0, here 1"), ([0, 3, 1, 2], "0, here 0")):
        with pytest.raises(ValueError, match=f"must rise from {said}, to the token count"):
            packed_gae(zeros, zeros, torch.tensor(bounds))


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
    logps, old, advantages = (
        torch.randn(40, generator=g, dtype=torch.float64) for _ in range(3)
    )
    options = {"clip_high": high, "dual_clip": dual, "kind": kind}
    out = ppo_policy_loss(logps, old, advantages, 0.2, **options)
    want = [
        policy_literal(*row, 0.2, high or 0.2, dual, kind)
        for row in zip(logps.tolist(), old.tolist(), advantages.tolist())
    ]
    torch.testing.assert_close(out.losses, torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(out.ratios, (logps - old).exp())
    logps.requires_grad_()

    def loss(x):
        return ppo_policy_loss(x, old, advantages, **options).losses

    (grad,) = torch.autograd.grad(loss(logps).sum(), logps)
    if kind == "cispo":  # the bounded ratio is a weight, and clipped tokens learn
        weights = (logps.detach() - old).exp().clamp(max=1.3)
        torch.testing.assert_close(grad, -advantages * weights)
        assert torch.equal(out.clipped.bool(), out.ratios > 1.3)
        return
    assert torch.autograd.gradcheck(loss, logps)
    assert torch.equal(
        grad == 0, out.clipped.bool()
    )  # a clipped token gives no gradient, any other does


def test_policy_loss_limits():
    for gap in (1e4, -1e4):
        for a in (1.0, -1.0):
            logps = torch.tensor([gap], requires_grad=True)
            out = ppo_policy_loss(logps, torch.zeros(1), torch.tensor([a]))
            out.losses.sum().backward()
            assert torch.isfinite(out.losses).all() and torch.isfinite(logps.grad).all()
    out = ppo_policy_loss(torch.zeros(3), torch.zeros(3), torch.tensor([1.0, -2.0, 0.0]))
    assert (
        out.ratios.tolist() == [1.0] * 3
        and out.losses.tolist() == [-1.0, 2.0, 0.0]
        and not out.clipped.any()
    )
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


def test_no_value_within_the_range_counts_as_clipped():
    """Also where the old value plus the difference to it is rounded to another value."""
    v, old = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * 0.03
    assert not ppo_value_loss(v, old, torch.zeros(1000), 0.5).clipped.any()


def test_value_loss():
    v, old, g = (
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([0.0, 0.9, 0.0]),
        torch.tensor([2.0, 2.0, -3.0]),
    )
    out = ppo_value_loss(v, old, g, 0.2)
    assert out.losses.tolist() == pytest.approx(
        [0.5 * 1.8**2, 0.5, 4.5]
    ) and out.clipped.tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(ppo_value_loss(v, old, g, None).losses, 0.5 * (v - g) ** 2)
    assert torch.autograd.gradcheck(
        lambda x: ppo_value_loss(x, old.double(), g.double()).losses,
        v.double().requires_grad_(),
    )
    with pytest.raises(ValueError, match="value clip is -1"):
        ppo_value_loss(v, old, g, -1)


def test_kl_estimates():
    d = torch.linspace(-3, 3, 7, dtype=torch.float64)
    zero = torch.zeros_like(d)
    torch.testing.assert_close(kl_estimate(d, zero, "k1"), d)
    torch.testing.assert_close(kl_estimate(d, zero, "k2"), d**2 / 2)
    torch.testing.assert_close(kl_estimate(d, zero, "k3"), torch.exp(-d) - 1 + d)
    assert (kl_estimate(d, zero, "k3") >= 0).all()
    assert torch.isfinite(kl_estimate(torch.tensor([-1e4, 1e4]), torch.zeros(2), "k3")).all()
    with pytest.raises(ValueError, match="must be k1, k2 or k3"):
        kl_estimate(d, zero, "k4")


def test_kl_estimates_agree_in_expectation():
    """k1 and k3 estimate KL(p || q) from samples of p without bias."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(8, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    sample = torch.multinomial(p.exp(), 200_000, True, generator=g)
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        assert kl_estimate(p[sample], q[sample], kind).mean().item() == pytest.approx(
            exact, abs=0.02
        )


def test_group_advantages():
    """Against the papers' equations, one group at a time; groups of 4, 3, 2 and 1 answers in any order."""
    scores = torch.tensor([1, 2, 4, 0.5, 0.5, 0.5, -1, 3, 0, 7], dtype=torch.float64)
    groups = torch.tensor([3, 9, 3, 5, 5, 5, 3, 3, 9, -2])
    cases: Any = (
        ("group", True),
        ("group", "batch"),
        ("group", False),
        ("leave_one_out", True),
    )
    for kind, scale in cases:
        found = group_advantages(scores, groups, kind, scale=scale)
        for i, r in enumerate(scores.tolist()):
            group = scores[groups == groups[i]].tolist()
            mean, others = sum(group) / len(group), max(1, len(group) - 1)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in group) / others)
            if scale == "batch":
                deviation = math.sqrt(float(((scores - scores.mean()) ** 2).sum()) / 9)
            expected = (r - mean) / (deviation + 1e-4) if scale else r - mean
            if kind == "leave_one_out":
                expected = r - (sum(group) - r) / others if len(group) > 1 else 0
            assert found[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert group_advantages(scores[:1], groups[:1], scale="batch").tolist() == [0]
    with pytest.raises(ValueError, match="kind is 'gae' but must be group or leave_one_out"):
        group_advantages(scores, groups, "gae")


def test_whiten():
    values = torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    kept = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    got = whiten(values, mask)
    torch.testing.assert_close(
        got[mask.bool()], (kept - kept.mean()) / (kept.var(unbiased=False) + 1e-8).sqrt()
    )
    assert not got[~mask.bool()].any()
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]
    assert whiten(torch.tensor([5.0]), torch.zeros(1)).tolist() == [0.0]


def test_score_lands_on_the_last_token():
    """[t, t, eos] and [t, t] cut off: the score stands on eos itself, and the penalty on the answer without one."""
    kl = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    got = token_rewards(
        kl, torch.tensor([10.0, 1.0]), torch.tensor([2, 4]), 0.5, missing_eos_penalty=2.0,
        has_eos=torch.tensor([True, False]),
    )  # fmt: skip
    torch.testing.assert_close(got, torch.tensor([-0.05, -0.1, 10 - 0.15, -0.2, -1 - 0.25]))
    with pytest.raises(ValueError, match="has_eos is missing"):
        token_rewards(
            kl, torch.zeros(1), torch.zeros(1, dtype=torch.long), 0.5, missing_eos_penalty=1.0
        )
    with pytest.raises(ValueError, match="each answer needs one of both"):
        token_rewards(kl, torch.zeros(1), torch.zeros(2, dtype=torch.long), 0.5)
