"""Distillation: a student learns a teacher's distribution over the whole vocabulary (GKD, arXiv 2306.13649).

beta = 0       KL(teacher || student)                                 forward
0 < beta < 1   beta KL(teacher || M) + (1 - beta) KL(student || M)    generalised Jensen-Shannon divergence,
               with M = beta teacher + (1 - beta) student
beta = 1       KL(student || teacher)                                 reverse

Shapes: M positions, R rows of one tile, V vocabulary, D_t the teacher's width.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from .logprobs import Tile, TileLoss, one_hot_difference, operand, tile_logits
from .precision import check_shapes, takes_tensors


@takes_tensors()
def divergence(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence [R] of two log-distributions [R, V], and its gradient [R, V] by the student's logits.

    With p = exp(student), a gradient g by p is p * (g - sum_v p_v g_v) by the logits. Of the forward divergence g is
    -exp(teacher) / p; of the others it is (1 - beta) (student - log M), and student - teacher at beta = 1.
    """
    check_shapes("student and teacher: both must be [R, V]", 2, student, teacher)
    p = student.exp()
    if beta == 0:
        q = teacher.exp()
        return (q * (teacher - student)).sum(-1), p.sub_(q)
    if beta == 1:
        ratio = student - teacher
        value = (p * ratio).sum(-1)
        return value, p.mul_(ratio.sub_(value[:, None]))
    mixture = (teacher + math.log(beta)).logaddexp(student + math.log1p(-beta))
    teacher_kl = (teacher.exp() * (teacher - mixture)).sum(-1)
    ratio = mixture.neg_().add_(student)
    student_kl = (p * ratio).sum(-1)
    gradient = p.mul_(ratio.sub_(student_kl[:, None])).mul_(1 - beta)
    return beta * teacher_kl + (1 - beta) * student_kl, gradient


def distillation(
    hidden: Tensor, weight: Tensor, *, beta: float, temperature: float, nll_weight: float
) -> TileLoss:
    """Return the `tile_loss` of linear_logprobs that adds the divergence from a teacher to nll_weight * -log p.

    Both distributions are softmax(logits / temperature) over the tokens that both vocabularies have; the negative
    log-likelihood is that of temperature 1.

    Args:
        hidden: [M, D_t], the inputs of the teacher's head, in the order of the student's.
        weight: [V_t, D_t], the weight of the teacher's head.
    """
    hidden, teacher_weight = hidden.detach(), operand(weight)

    def loss(tile: Tile) -> tuple[Tensor, Tensor]:
        width, dtype = tile.logits.shape[-1], tile.logits.dtype
        common = min(width, len(teacher_weight))
        teacher_logits = tile_logits(
            hidden[tile.rows], teacher_weight[:common], temperature, dtype
        )
        student = (tile.logits[:, :common] / temperature).log_softmax(-1)
        values, gradient = divergence(student, teacher_logits.log_softmax(-1), beta)
        gradient = F.pad(gradient.div_(temperature), (0, width - common))
        if nll_weight:
            values = values - nll_weight * tile.logps
            difference = one_hot_difference(tile, dtype)
            gradient.add_(difference, alpha=nll_weight)
        return values, gradient

    return loss
