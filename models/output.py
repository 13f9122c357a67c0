"""Output heads: the vocabulary head returns log-probabilities, the score head values; logits never leave.

Shapes: S local tokens, M positions with a target, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from losses.logprobs import LogProbs, linear_logprobs
from losses.precision import at_least_float32
from models.arch import ModelConfig
from ulysses.memory.tiling import tiles

SCORE_ROWS = 8192


class VocabularyHead(nn.Module):
    """Project positions to the vocabulary in tiles and return the log-probabilities of their targets.

    `weight` [V, D] is the embedding's own parameter when embeddings are tied. forward(hidden [M, D], targets [M]) runs
    with M = 0 too, so that its collectives and zero gradients happen on every rank. Further keywords (entropy, lse,
    mean_logit, temperature, loss_weights) are those of linear_logprobs.
    """

    def __init__(self, config: ModelConfig, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        size = config.vocab_size, config.hidden_size
        self.weight = nn.Parameter(torch.empty(size)) if tied is None else tied

    def forward(self, hidden: Tensor, targets: Tensor, **options: Any) -> LogProbs:
        return linear_logprobs(hidden, self.weight, targets, **options)


class ScoreHead(nn.Module):
    """Return one float32 value per row of [S, D]; no bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return _Score.apply(hidden, self.weight)


class _Score(torch.autograd.Function):
    """Multiply by the score vector in float32, a tile of rows at a time, so that no float32 copy of all rows exists."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        vector = at_least_float32(weight[0])
        values = vector.new_empty(hidden.shape[0])
        for part in tiles(hidden.shape[0], SCORE_ROWS):
            values[part] = hidden[part].to(vector.dtype) @ vector
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        vector = weight[0].to(grad.dtype)
        grad_hidden, grad_vector = torch.empty_like(hidden), torch.zeros_like(vector)
        for part in tiles(hidden.shape[0], SCORE_ROWS):
            grad_hidden[part] = torch.outer(grad[part], vector)
            grad_vector += grad[part] @ hidden[part].to(grad.dtype)
        return grad_hidden, grad_vector[None].to(weight.dtype)
