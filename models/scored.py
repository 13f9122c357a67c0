"""Models that give values: reward models, and PPO's policy with a value of every prediction as one module.

    tokens [S] -> embed_tokens -> layers -> norm -+-> lm_head -> log-probabilities [S]      PolicyValue
                                                  +-> value.score -> values [S]
                                                  +-> score -> values [S]                   RewardModel

Shapes: S local tokens, D width.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from losses.logprobs import HeadOptions
from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.decoder import CausalLM, HeadedDecoder, placed
from models.ops.linear import GradientSums, Saved, recorded
from ulysses.memory.levels import tiles
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.layout import Tensors

SCORE_ROWS = 8192


class ScoreHead(nn.Module):
    """Return one float32 value per row of [S, D]; no bias.

    An Operation that multiplies a tile of rows at a time, so that no float32 copy of all rows exists.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return recorded(self, hidden)[0]

    @property
    def tensors(self) -> Tensors:
        return [self.weight]

    def run(self, inputs: Tensors) -> tuple[Tensors, Saved]:
        (hidden,) = inputs
        vector = at_least_float32(self.weight[0])
        values = vector.new_empty(len(hidden))
        for part in tiles(len(hidden), SCORE_ROWS):
            values[part] = hidden[part].to(vector.dtype) @ vector
        return [values], [hidden]

    def run_back(self, saved: Saved, grads: Tensors, sums: GradientSums) -> Tensors:
        (hidden,), (grad,) = saved, grads
        vector = self.weight[0].to(grad.dtype)
        to_hidden, to_vector = torch.empty_like(hidden), torch.zeros_like(vector)
        for part in tiles(len(hidden), SCORE_ROWS):
            to_hidden[part] = torch.outer(grad[part], vector)
            to_vector += grad[part] @ hidden[part].to(grad.dtype)
        sums.add(self.weight, to_vector[None])
        return [to_hidden]


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
