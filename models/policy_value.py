"""A language model with a value of every prediction, as one module: what PPO trains with a value.

    tokens -> decoder -> norm -+-> lm_head -> log-probabilities
                               +-> value.score -> values

Shapes: S local tokens.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from models.decoder import CausalLM
from models.output import ScoreHead, scatter_rows
from ulysses.parallel.batch import ShardedBatch


class PolicyValueOutput(NamedTuple):
    """Hold per-position results [S] float32, zero where the loss weight is 0.

    logps: log-probability of the target. entropy: of the prediction, None if not asked for. values: expected return
    before the target is drawn.
    """

    logps: Tensor
    entropy: Tensor | None
    values: Tensor


class PolicyValue(CausalLM):
    """A language model whose last hidden states also give values; its exports leave `value.score.weight` out."""

    def add_head(self) -> None:
        super().add_head()
        self.value: Any = nn.ModuleDict({"score": ScoreHead(self.config)})

    def forward(self, batch: ShardedBatch, **options: Any) -> PolicyValueOutput:  # type: ignore[override]
        """Return log-probabilities and values at the batch's targets; all ranks of the group call together.

        `options` are those of linear_logprobs: `entropy` asks for entropies, `temperature` divides the logits.
        """
        index, S = batch.valid_index, len(batch.tokens)
        rows = self.model.norm(self.model(batch).index_select(0, index))
        out = self.lm_head(rows, batch.targets.index_select(0, index), **options)
        found = out.logps, out.entropy, self.value["score"](rows)
        return PolicyValueOutput._make(
            None if x is None else scatter_rows(x, index, S) for x in found
        )
