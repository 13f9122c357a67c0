"""Models that give values: reward models, and PPO's policy with a value of every prediction as one module.

    tokens [S] -> embed_tokens -> layers -> norm -+-> lm_head -> log-probabilities [S]      PolicyValue
                                                  +-> value.score -> values [S]
                                                  +-> score -> values [S]                   RewardModel

Shapes: S local tokens, D width.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from losses.logprobs import HeadOptions
from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.decoder import CausalLM, HeadedDecoder, placed
from ulysses.memory.tiling import tiles
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.layout import Context

SCORE_ROWS = 8192


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
    def forward(ctx: Context, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        vector = at_least_float32(weight[0])
        values = vector.new_empty(hidden.shape[0])
        for part in tiles(hidden.shape[0], SCORE_ROWS):
            values[part] = hidden[part].to(vector.dtype) @ vector
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        vector = weight[0].to(grad.dtype)
        grad_hidden, grad_vector = torch.empty_like(hidden), torch.zeros_like(vector)
        for part in tiles(hidden.shape[0], SCORE_ROWS):
            grad_hidden[part] = torch.outer(grad[part], vector)
            grad_vector += grad[part] @ hidden[part].to(grad.dtype)
        return grad_hidden, grad_vector[None].to(weight.dtype)


class PolicyValueOutput(NamedTuple):
    """Hold per-position results [S] float32, zero where the loss weight is 0.

    logps: log-probability of the target. entropy: of the prediction, None if not asked for. values: expected return
    before the target is drawn.
    """

    logps: Tensor
    entropy: Tensor | None
    values: Tensor


class PolicyValue(CausalLM):
    """A language model whose last hidden states also give values; its exports leave these (`VALUE`) out."""

    def add_head(self) -> None:
        super().add_head()
        self.value = nn.ModuleDict({"score": ScoreHead(self.config)})

    def forward(self, batch: ShardedBatch, **options: Unpack[HeadOptions]) -> PolicyValueOutput:  # type: ignore[override]
        """Return log-probabilities and values at the batch's targets; all ranks of the group call together.

        `options` are those of linear_logprobs: `entropy` asks for entropies, `temperature` divides the logits.
        """
        rows = self.rows(batch)
        logps, entropy, *_ = self.log_probs(rows, batch, options)
        return PolicyValueOutput(logps, entropy, placed(self.value["score"](rows), batch))


class RewardModel(HeadedDecoder):
    """A score per token: a reward model reads the last token's, a value model every one."""

    def add_head(self) -> None:
        self.score = ScoreHead(self.config)

    def forward(self, batch: ShardedBatch) -> Tensor:
        """Return values [S] float32, one per local token. All ranks of the sequence-parallel group call together."""
        return self.score(self.model.norm(self.model(batch)))
