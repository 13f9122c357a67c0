"""The pairwise losses, KTO and the reward loss against their equations, evaluated here with 60 digits."""

import inspect
import math

import pytest
import torch
from mpmath import diff, exp, log, mp, mpf

import losses
from losses import (
    DPO_LOSS_TYPES,
    LENGTH_NORMALISED,
    REFERENCE_FREE,
    aot_margins,
    dpo_loss,
    kto_loss,
    ld_dpo_weights,
    reward_loss,
)

SMOOTHED = {
    "sigmoid": 0.1,
    "robust": 0.1,
    "exo_pair": 0.01,
    "simpo": 0.2,
    "sigmoid_norm": 0.3,
    "aot": 0.1,
}


mp.dps = 60  # and exponents without bound, so that no equation overflows


def s(x):
    return 1 / (1 + exp(-x))


def ls(x):
    return log(s(x))


def literal(name, pw, pl, rw, rl, nw, nl, beta, e):
    """One pair, straight from the equations."""
    pw, pl, rw, rl, beta, e = map(mpf, (pw, pl, rw, rl, beta, e))
    a, b = pw - rw, pl - rl
    d = a - b
    match name:
        case "sigmoid" | "aot":  # a single pair is its own rank; many pairs have their own test
            return -(1 - e) * ls(beta * d) - e * ls(-beta * d)
        case "robust":
            return (-(1 - e) * ls(beta * d) + e * ls(-beta * d)) / (1 - 2 * e)
        case "hinge":
            return max(0.0, 1 - beta * d)
        case "ipo":
            return (a / nw - b / nl - 1 / (2 * beta)) ** 2
        case "ipo_sum":
            return (d - 1 / (2 * beta)) ** 2
        case "simpo":
            z = beta * (pw / nw - pl / nl) - 0.5
            return -(1 - e) * ls(z) - e * ls(-z)
        case "sigmoid_norm":
            z = beta * (a / nw - b / nl)
            return -(1 - e) * ls(z) - e * ls(-z)
        case "orpo":

            def log_odds(m):
                return m - log(1 - exp(m))

            return -pw / nw - beta * ls(log_odds(pw / nw) - log_odds(pl / nl))
        case "exo_pair":
            q, p = s(beta * d), s(-beta * d)
            return q * (log(q) - log(1 - e)) + p * (log(p) - log(e))
        case "nca_pair":
            return -ls(beta * a) - 0.5 * ls(-beta * a) - 0.5 * ls(-beta * b)
        case "bco_pair":
            return -ls(beta * a) - ls(-beta * b)
        case "sppo_hard":
            return (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
        case "apo_zero":
            return 1 - s(beta * a) + s(beta * b)
        case "apo_down":
            return s(beta * a) + 1 - s(beta * d)
        case "discopop":
            z = beta * d
            k = s(z / mpf(0.05))
            return -(1 - k) * ls(z) + k * exp(-z)


def batch(n=6, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    pw, pl, rw, rl = (
        -(5 + 20 * torch.rand(n, generator=g, dtype=torch.float64)) for _ in range(4)
    )
    nw, nl = (torch.randint(3, 30, (n,), generator=g) for _ in range(2))
    return [t.to(dtype) for t in (pw, pl, rw, rl)], nw, nl


def call(name, logps, nw, nl, beta, e=0.0, **kwargs):
    pw, pl, rw, rl = logps
    if name in REFERENCE_FREE:
        rw = rl = None
    lengths = (
        {"chosen_lengths": nw, "rejected_lengths": nl} if name in LENGTH_NORMALISED else {}
    )
    return dpo_loss(pw, pl, rw, rl, beta, name, e, **lengths, **kwargs)


@pytest.mark.parametrize("name", DPO_LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_family_equals_its_equation(name, beta):
    logps, nw, nl = batch()
    if name == "aot":  # pairs that are sorted already
        logps = [t.sort(descending=side % 2 > 0).values for side, t in enumerate(logps)]
    for e in {SMOOTHED.get(name, 0.0), 0.01 if name == "exo_pair" else 0.0}:
        got, chosen, rejected = call(name, logps, nw, nl, beta, e)
        rows = zip(*(t.tolist() for t in (*logps, nw, nl)))
        want = [float(literal(name, *row, beta, e)) for row in rows]
        torch.testing.assert_close(
            got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )
        seen = [
            p if name in REFERENCE_FREE else p - r
            for p, r in ((logps[0], logps[2]), (logps[1], logps[3]))
        ]
        if name in LENGTH_NORMALISED:
            seen = [seen[0] / nw, seen[1] / nl]
        torch.testing.assert_close(chosen, beta * seen[0])
        torch.testing.assert_close(rejected, beta * seen[1])


@pytest.mark.parametrize("name", DPO_LOSS_TYPES)
def test_dpo_family_gradients(name):
    logps, nw, nl = batch(3, seed=1)
    for t in logps[:2]:
        t.requires_grad_()
    e = SMOOTHED.get(name, 0.0)
    assert torch.autograd.gradcheck(
        lambda w, q: call(name, [w, q, *logps[2:]], nw, nl, 0.3, e)[0], logps[:2]
    )


@pytest.mark.parametrize("name", DPO_LOSS_TYPES)
@pytest.mark.parametrize(
    "point", [(1e4, -1e4), (-1e4, 1e4), (-1e4, -1e4), (-1.0, -1.0), (0.0, 0.0)]
)
def test_dpo_family_at_the_limits(name, point):
    """Huge margins either way, and an equal pair: float32 value and gradient are the equation's."""
    near_one = -(2.0**-10) if name == "orpo" else 0.0  # ORPO has no value at probability 1
    point = [min(x, near_one) if name in REFERENCE_FREE else x for x in point]
    e, zero, one = SMOOTHED.get(name, 0.0), torch.zeros(1), torch.ones(1)
    sides = [torch.tensor([x], requires_grad=True) for x in point]
    got, chosen, rejected = call(name, [*sides, zero, zero], one, one, 0.1, e)
    got.sum().backward()
    assert torch.isfinite(chosen).all() and torch.isfinite(rejected).all()
    for order, found in (((0, 0), got), ((1, 0), sides[0].grad), ((0, 1), sides[1].grad)):
        want = float(
            diff(lambda w, q: literal(name, w, q, 0, 0, 1, 1, 0.1, e), tuple(point), order)
        )
        assert found.item() == pytest.approx(want, rel=1e-6, abs=1e-6), order


def test_bco_pair_subtracts_its_running_mean():
    """trl's formula up to 0.28: both rewards are measured against delta, which carries no gradient."""
    (pw, pl, rw, rl), _, _ = batch(seed=8)
    got = dpo_loss(pw, pl, rw, rl, 0.2, "bco_pair", bco_delta=0.7)[0]
    rows = zip(*(t.tolist() for t in (pw, pl, rw, rl)))
    want = [float(-ls(0.2 * (a - c) - 0.7) - ls(-(0.2 * (b - d) - 0.7))) for a, b, c, d in rows]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_aot_compares_sorted_margins():
    """trl's formula: margins of policy and reference, each sorted; ours keeps the order of the pairs."""
    (pw, pl, rw, rl), _, _ = batch(9, seed=9)
    delta = (pw - pl).sort().values - (rw - rl).sort().values
    want = torch.tensor(
        [float(-mpf("0.9") * ls(0.3 * d) - mpf("0.1") * ls(-0.3 * d)) for d in delta.tolist()]
    )
    got, chosen, _ = dpo_loss(pw, pl, rw, rl, 0.3, "aot", 0.1)
    torch.testing.assert_close(got[(pw - pl).argsort()], want.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(chosen, 0.3 * (pw - rw))
    # a part of the pairs, compared with what all of them say
    margins = aot_margins(pw - pl, rw - rl)[2:5]
    part = dpo_loss(
        pw[2:5], pl[2:5], rw[2:5], rl[2:5], 0.3, "aot", 0.1, aot_reference_margins=margins
    )[0]
    torch.testing.assert_close(part, got[2:5])


def test_a_list_of_losses_is_their_weighted_sum():
    """trl's loss_type list and loss_weights; each loss takes the options that it knows."""
    logps, nw, nl = batch(seed=10)
    lengths = {"chosen_lengths": nw, "rejected_lengths": nl}
    names, weights = ["ipo", "sigmoid", "bco_pair", "simpo", "hinge"], [0.5, 0.8, 0.2, 2.0, 0.0]
    got, chosen, _ = dpo_loss(
        *logps, 0.2, names, 0.1, loss_weights=weights, f_divergence="js", **lengths
    )
    own = {
        "sigmoid": {"label_smoothing": 0.1, "f_divergence": "js"},
        "simpo": {"label_smoothing": 0.1},
    }
    want = sum(
        w * dpo_loss(*logps, 0.2, n, **own.get(n, {}), **lengths)[0]
        for n, w in zip(names, weights)
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        chosen, dpo_loss(*logps, 0.2, "ipo", **lengths)[1]
    )  # rewards are the first one's
    alike = dpo_loss(*logps, 0.2, ["sigmoid", "hinge"])[0]
    torch.testing.assert_close(
        alike, dpo_loss(*logps, 0.2, ["sigmoid", "hinge"], loss_weights=[1, 1])[0]
    )
    assert torch.equal(dpo_loss(*logps, 0.2, ["sigmoid"])[0], dpo_loss(*logps, 0.2)[0])


def test_orpo_is_finite_at_probability_one():
    sides = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    got, *_ = call("orpo", [*sides, None, None], torch.ones(1), torch.ones(1), 0.1)
    got.sum().backward()
    assert all(torch.isfinite(t).all() for t in (got, *(side.grad for side in sides)))


def test_equal_pair_is_log_two_and_robust_may_be_negative():
    zero = torch.zeros(1)
    torch.testing.assert_close(dpo_loss(zero, zero, zero, zero)[0], torch.tensor([math.log(2)]))
    assert dpo_loss(zero + 500, zero - 500, zero, zero, 0.1, "robust", 0.1)[0].item() < 0


def test_empty_completions_and_no_pairs():
    zero = torch.zeros(2, requires_grad=True)
    for name in LENGTH_NORMALISED:
        got = call(name, [zero, zero, zero, zero], torch.zeros(2), torch.zeros(2), 0.1)[0]
        assert torch.isfinite(got).all()
    empty = torch.zeros(0, requires_grad=True)
    losses_, *_ = dpo_loss(empty, empty, empty, empty)
    losses_.sum().backward()
    assert losses_.shape == (0,) and empty.grad.shape == (0,)


def test_half_precision_is_computed_in_float32():
    logps, _, _ = batch(dtype=torch.bfloat16)
    got = dpo_loss(*logps)[0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, dpo_loss(*[t.float() for t in logps])[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_f_divergences(kind):
    logps, nw, nl = batch(seed=5)
    logps = [t / 5 for t in logps]
    score = {
        "reverse_kl": lambda r: r,
        "forward_kl": lambda r: 1 - exp(-r),
        "js": lambda r: log(2) + ls(r),
        "alpha": lambda r: (exp(-0.3 * r) - 1) / -0.3,
    }[kind]
    got = call("sigmoid", logps, nw, nl, 0.1, f_divergence=kind, f_alpha=0.7)[0]
    want = [
        float(-ls(0.1 * (score(pw - rw) - score(pl - rl))))
        for pw, pl, rw, rl in zip(*(t.tolist() for t in logps))
    ]
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    for extreme in (1e4, -1e4):
        value = torch.tensor([extreme], requires_grad=True)
        zero = torch.zeros(1)
        loss = dpo_loss(value, zero, zero, zero, f_divergence=kind)[0]
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(value.grad).all()


def test_alpha_divergence_meets_the_others_at_its_ends():
    logps, nw, nl = batch(seed=6)
    near_reverse = call("sigmoid", logps, nw, nl, 0.1, f_divergence="alpha", f_alpha=1 - 1e-7)[
        0
    ]
    torch.testing.assert_close(near_reverse, dpo_loss(*logps)[0], rtol=1e-5, atol=1e-6)
    zero = call("sigmoid", logps, nw, nl, 0.1, f_divergence="alpha", f_alpha=0.0)[0]
    torch.testing.assert_close(
        zero, call("sigmoid", logps, nw, nl, 0.1, f_divergence="forward_kl")[0]
    )


def test_ld_dpo_weights():
    index = torch.tensor([0, 1, 2, 3, 0, 1])
    got = ld_dpo_weights(index, torch.tensor([2, 2, 2, 2, 2, 2]), 0.25)
    assert got.tolist() == [1, 1, 0.25, 0.25, 1, 1]
    with pytest.raises(ValueError, match=r"alpha is 1.5 but must lie in \[0, 1\]"):
        ld_dpo_weights(index, index, 1.5)


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"loss_type": "cdpo"}, "'sigmoid' with label_smoothing"),
        ({"loss_type": "kto_pair"}, "use kto_loss"),
        ({"loss_type": ["sigmoid", "sft"]}, "or set dpo.sft_weight"),
        (
            {"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]},
            "names 2 losses and loss_weights has 1",
        ),
        ({"loss_type": []}, "names 0 losses"),
        ({"loss_type": ["hinge", "ipo_sum"], "label_smoothing": 0.1}, "has none"),
        (
            {"policy_chosen_logps": torch.zeros(1, 3)},
            r"shapes \[\[1, 3\], \[1\].* sums over the tokens of each",
        ),
        ({"reference_chosen_logps": torch.zeros(())}, "every pair needs one of each"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "'hinge' has none"),
        ({"loss_type": "exo_pair"}, "infinite at label_smoothing 0"),
        ({"loss_type": "ipo"}, "pass chosen_lengths and rejected_lengths"),
        ({"reference_chosen_logps": None}, "needs reference_chosen_logps"),
        ({"f_divergence": "js", "loss_type": "ipo_sum"}, "f_divergence is 'js'"),
        ({"f_divergence": "kl"}, "must be one of reverse_kl"),
        ({"f_divergence": "alpha", "f_alpha": 1}, "set f_divergence to 'reverse_kl'"),
        ({"loss_type": "discopop", "discopop_tau": 2.0}, "discopop_tau is 2.0"),
        ({"policy_rejected_logps": torch.zeros(2)}, "every pair needs one of each"),
    ],
)
def test_dpo_refuses(arguments, message):
    base = dict.fromkeys(
        (
            "policy_chosen_logps",
            "policy_rejected_logps",
            "reference_chosen_logps",
            "reference_rejected_logps",
        ),
        ONE,
    )
    with pytest.raises(ValueError, match=message):
        dpo_loss(**(base | arguments))


# reward model


def test_reward_loss_equals_its_equation():
    w, q, m = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    want = [
        float(-ls(a - b - c) + 0.01 * (a + b) ** 2)
        for a, b, c in zip(w.tolist(), q.tolist(), m.tolist())
    ]
    torch.testing.assert_close(
        reward_loss(w, q, m, 0.01), torch.tensor(want, dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(
        lambda a, b: reward_loss(a, b, m, 0.1), (w.requires_grad_(), q.requires_grad_())
    )
    torch.testing.assert_close(reward_loss(ONE, ONE), torch.tensor([math.log(2)]))
    extreme = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = reward_loss(extreme, -extreme)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4] and extreme.grad.tolist() == [0.0, -2.0]
    with pytest.raises(ValueError, match="one value per pair"):
        reward_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="center_coefficient is -1"):
        reward_loss(ONE, ONE, center_coefficient=-1)


# KTO


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_equals_its_equation(loss_type):
    g = torch.Generator().manual_seed(3)
    pc, rc = (torch.randn(4, generator=g, dtype=torch.float64) for _ in range(2))
    pr, rr = (torch.randn(3, generator=g, dtype=torch.float64) for _ in range(2))
    pk, rk = (torch.randn(7, generator=g, dtype=torch.float64) for _ in range(2))
    kl_logps = (pk, rk) if loss_type == "kto" else (None, None)
    got, chosen, rejected, kl = kto_loss(
        pc, pr, kl_logps[0], rc, rr, kl_logps[1], 0.5, 1.2, 0.8, loss_type=loss_type
    )
    z0 = max(0.0, (pk - rk).mean().item()) if loss_type == "kto" else 0.0
    want = [float(1.2 * (1 - s(0.5 * (a - b - z0)))) for a, b in zip(pc.tolist(), rc.tolist())]
    want += [
        float(0.8 * (1 - s(0.5 * (z0 - (a - b))))) for a, b in zip(pr.tolist(), rr.tolist())
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(chosen, 0.5 * (pc - rc))
    torch.testing.assert_close(rejected, 0.5 * (pr - rr))
    assert abs(kl.item() - z0) < 1e-12
    given = kto_loss(pc, pr, None, rc, rr, None, 0.5, kl=torch.tensor(0.3))
    assert abs(given[3].item() - 0.3) < 1e-7
    assert torch.autograd.gradcheck(
        lambda a, b: kto_loss(a, b, None, rc, rr, None, 0.5, kl=torch.tensor(0.3))[0],
        (pc.requires_grad_(), pr.requires_grad_()),
    )


def test_kto_limits():
    k = torch.zeros(2, requires_grad=True)
    # the baseline is clamped at 0 and carries no gradient
    pc = torch.zeros(1, requires_grad=True)
    got, *_, kl = kto_loss(pc, torch.zeros(0), k - 1, ONE, torch.zeros(0), torch.zeros(2))
    got.sum().backward()
    assert kl.item() == 0 and k.grad is None and pc.grad is not None
    *_, kl = kto_loss(pc, torch.zeros(0), k + 2, ONE, torch.zeros(0), torch.zeros(2))
    assert kl.item() == 2 and not kl.requires_grad
    # one side empty, huge ratios
    for extreme in (1e4, -1e4, 30.0, 0.0):
        pr = torch.tensor([extreme], requires_grad=True)
        got, *_ = kto_loss(
            torch.zeros(0), pr, None, torch.zeros(0), ONE, None, kl=torch.tensor(0.0)
        )
        got.sum().backward()
        p = float(s(mpf(extreme) / 10))
        assert got.item() == pytest.approx(p, abs=1e-6) and pr.grad.item() == pytest.approx(
            0.1 * p * (1 - p), abs=1e-6
        )
    with pytest.raises(ValueError, match="needs at least one mismatched example"):
        kto_loss(ONE, ONE, None, ONE, ONE, None)
    with pytest.raises(ValueError, match="needs at least one mismatched example"):
        kto_loss(ONE, ONE, torch.zeros(0), ONE, ONE, torch.zeros(0))
    with pytest.raises(ValueError, match="apo_zero_unpaired has no KL baseline"):
        kto_loss(ONE, ONE, ONE, ONE, ONE, ONE, loss_type="apo_zero_unpaired")
    with pytest.raises(ValueError, match="kto_loss knows kto, apo_zero_unpaired"):
        kto_loss(ONE, ONE, ONE, ONE, ONE, ONE, loss_type="bco")
    with pytest.raises(ValueError, match="beta is 0"):
        kto_loss(ONE, ONE, ONE, ONE, ONE, ONE, beta=0)
    with pytest.raises(ValueError, match="desirable_weight is -1"):
        kto_loss(ONE, ONE, ONE, ONE, ONE, ONE, desirable_weight=-1)


SIGNATURES = {
    "dpo_loss": "policy_chosen_logps policy_rejected_logps reference_chosen_logps reference_rejected_logps beta=0.1 "
    "loss_type='sigmoid' label_smoothing=0.0 * chosen_lengths=None rejected_lengths=None loss_weights=() "
    "simpo_gamma=0.5 discopop_tau=0.05 f_divergence='reverse_kl' f_alpha=0.5 bco_delta=0.0 aot_reference_margins=None",
    "aot_margins": "policy reference",
    "kto_loss": "policy_chosen_logps policy_rejected_logps policy_KL_logps reference_chosen_logps "
    "reference_rejected_logps reference_KL_logps beta=0.1 desirable_weight=1.0 undesirable_weight=1.0 * kl=None "
    "loss_type='kto'",
    "reward_loss": "chosen_rewards rejected_rewards margin=None center_coefficient=0.0",
    "ld_dpo_weights": "token_index public_lengths alpha",
    "linear_logprobs": "hidden weight targets * entropy=False lse=False mean_logit=False temperature=1.0 "
    "tile_rows='auto' loss_weights=None tile_loss=None",
    "token_nll": "logps weights",
    "weighted_sum": "values weights",
    "label_smoothed_nll": "logps lse mean_logit label_smoothing",
    "dft_nll": "logps",
    "z_loss": "lse coefficient",
    "group_advantages": "scores groups kind='group' * scale=True",
    "gae": "rewards values mask gamma=1.0 lam=0.95",
    "packed_gae": "rewards values cu_seqlens gamma=1.0 lam=0.95",
    "ppo_policy_loss": "logps old_logps advantages clip=0.2 * clip_high=None dual_clip=None kind='clip'",
    "ppo_value_loss": "values old_values returns clip=0.2",
    "kl_estimate": "logps reference_logps kind='k1'",
    "whiten": "values mask",
    "token_rewards": "kl scores last_index kl_coefficient * missing_eos_penalty=None has_eos=None",
    "LogProbs": "logps entropy=None lse=None mean_logit=None nll=None",
    "PolicyLoss": "losses ratios clipped",
    "ValueLoss": "losses clipped",
}


def listed(function):
    words, star = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return " ".join(words)


def test_signatures_are_fixed():
    functions = {n for n in losses.__all__ if not n.isupper()}
    assert functions == set(SIGNATURES)
    assert {n: listed(getattr(losses, n)) for n in functions} == SIGNATURES
