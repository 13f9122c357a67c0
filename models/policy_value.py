"""A language model and a value of every prediction, as one module: what PPO trains.

    shared     tokens -> policy's decoder -> norm -+-> lm_head -> log-probabilities
                                                   +-> value.score -> values
    separate   tokens -> policy (decoder, lm_head) -> log-probabilities
               tokens -> value (decoder, score)    -> values

Parameters: `policy.` and transformers' names of the language model; `value.score.weight` and, separate, `value.model.`.
Shapes: S local tokens, M positions with a target, D width.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from models.arch import ModelConfig
from models.decoder import CausalLM, RewardModel
from models.output import ScoreHead, scatter_rows
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import ParallelMesh


class PolicyValueOutput(NamedTuple):
    """Hold per-position results [S] float32, zero where the loss weight is 0.

    logps: log-probability of the target. entropy: of the prediction, None if not asked for. values: expected return
    before the target is drawn.
    """

    logps: Tensor
    entropy: Tensor | None
    values: Tensor


class ValueHead(nn.Module):
    """Score the policy's own normalised hidden states [M, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.score = ScoreHead(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.score(hidden)


class PolicyValue(nn.Module):
    """Build both models from CausalLM's keyword arguments; `separate` gives the values a decoder of their own."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh | None = None,
        *,
        separate: bool = False,
        logits_tile: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.separate = separate
        self.policy = CausalLM(config, mesh, logits_tile=logits_tile, **options)
        self.value: nn.Module = (
            RewardModel(config, mesh, **options) if separate else ValueHead(config)
        )

    def forward(
        self, batch: ShardedBatch, *, entropy: bool = False, temperature: float = 1.0
    ) -> PolicyValueOutput:
        """Return log-probabilities and values at the batch's targets; all ranks of the group call together."""
        if self.separate:
            out = self.policy(batch, entropy=entropy, temperature=temperature)
            values = self.value(batch)
            return PolicyValueOutput(
                out.logps, out.entropy, values.masked_fill(batch.loss_weights == 0, 0)
            )
        index, S = batch.valid_index, batch.tokens.shape[0]
        rows = self.policy.model.norm(self.policy.model(batch).index_select(0, index))
        targets = batch.targets.index_select(0, index)
        out = self.policy.lm_head(rows, targets, entropy=entropy, temperature=temperature)
        logps, entropies, values = (
            None if value is None else scatter_rows(value, index, S)
            for value in (out.logps, out.entropy, self.value(rows))
        )
        assert logps is not None and values is not None
        return PolicyValueOutput(logps, entropies, values)
