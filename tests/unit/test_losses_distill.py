"""Distillation's divergence and its gradient: the definition on whole logits in float64, TRL's loss, and tiles."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad
from torch.testing import assert_close

from losses.distill import distillation, divergence
from losses.logprobs import linear_logprobs

BETAS = [0.0, 0.3, 0.5, 1.0]


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


def naive(student, teacher, beta):
    """The definition, in probabilities."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    mixed = beta * q + (1 - beta) * p
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    return beta * kl(q, mixed) + (1 - beta) * kl(p, mixed)


def logits(rows, words, seed=5):
    draw = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, words, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_the_definitions(beta):
    student, teacher = logits(7, 13).requires_grad_(), logits(7, 13, 6)
    expected = naive(student, teacher, beta)
    (gradient,) = grad(expected.sum(), student)
    found = divergence(student.detach().log_softmax(-1), teacher.log_softmax(-1), beta)
    assert_close(found[0], expected.detach(), rtol=1e-12, atol=1e-14)
    assert_close(found[1], gradient, rtol=1e-10, atol=1e-14)


# loss, norm of its gradient by the logits and one entry of it, from TRL 1.16.0's GKDTrainer.generalized_jsd_loss
TRL = {
    0.0: (1.0545837241427949, 0.15227071634857736, -0.02662663387595444),
    0.3: (0.17705476888581978, 0.024290601133346666, -0.005914597367233832),
    1.0: (1.1464742617415205, 0.2060391654551356, -0.04648065217854021),
}


@pytest.mark.parametrize("beta", TRL)
def test_trl(beta):
    """On the same logits at temperature 1.5, with two of six positions ignored."""
    draw = torch.Generator().manual_seed(5)
    student, teacher = (
        2 * torch.randn(6, 11, generator=draw, dtype=torch.float64) / 1.5 for _ in range(2)
    )
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]) / 4
    values, gradient = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    gradient = gradient * weights[:, None] / 1.5
    *sizes, entry = TRL[beta]
    found = float((values * weights).sum()), float(gradient.norm())
    assert found == pytest.approx(tuple(sizes), rel=1e-12)
    assert float(gradient[3, 2]) == pytest.approx(entry, rel=1e-10)


@pytest.mark.parametrize("words", [11, 9, 14], ids=["same", "fewer", "more"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tile_rows", [3, "auto"])
def test_the_head_adds_it_to_the_nll_tile_by_tile(tile_rows, beta, words):
    """`words` of the teacher, which may pad its vocabulary otherwise."""
    hidden, weight = (logits(*size).requires_grad_() for size in ((8, 4), (11, 4)))
    rows, matrix = logits(8, 5, 1), logits(words, 5, 2)
    targets = torch.tensor([1, 3, -100, 8, 0, 5, 2, 7])
    loss_weights = torch.linspace(0.1, 1, 8, dtype=torch.float64)
    own, both = hidden @ weight.T, min(words, 11)
    gap = naive(own[:, :both] / 1.3, (rows @ matrix.T)[:, :both] / 1.3, beta)
    nll = F.cross_entropy(own, targets.clamp(min=0), reduction="none")
    used = loss_weights.masked_fill(targets < 0, 0)
    expected = ((gap + 0.4 * nll) * used).sum()
    loss = distillation(rows, matrix, beta=beta, temperature=1.3, nll_weight=0.4)
    options = {"loss_weights": loss_weights, "tile_loss": loss, "tile_rows": tile_rows}
    found = linear_logprobs(hidden, weight, targets, **options)
    assert_close(found.nll, expected, rtol=1e-12, atol=1e-12)
    ours, exact = (grad(2 * x, (hidden, weight)) for x in (found.nll, expected))
    assert_close(ours, exact, rtol=1e-10, atol=1e-12)
    assert_close(found.logps, -nll.masked_fill(targets < 0, 0).detach())


def test_a_student_like_its_teacher_learns_nothing_and_extreme_logits_stay_finite():
    same = logits(4, 9).log_softmax(-1)
    far = (1e4 * logits(4, 9).float()).log_softmax(-1)
    for beta in BETAS:
        value, gradient = divergence(same, same, beta)
        assert value.abs().max() < 1e-14 and gradient.abs().max() < 1e-14
        for found in divergence(far, far.flip(-1), beta):
            assert found.isfinite().all()


def test_tile_losses_need_weights_and_no_temperature():
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long()
    options = {"tile_loss": lambda tile: (tile.logps, tile.logits)}
    with pytest.raises(ValueError, match="tile_loss needs loss_weights"):
        linear_logprobs(hidden, weight, targets, **options)
    with pytest.raises(ValueError, match="temperature 1"):
        options |= {"loss_weights": torch.ones(2), "temperature": 2.0}
        linear_logprobs(hidden, weight, targets, **options)
