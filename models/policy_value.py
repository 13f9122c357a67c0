"""A language model and, if asked for, a value of every prediction, as one module: what PPO trains.

    tokens -> policy's decoder -> norm -+-> lm_head -> log-probabilities
                                        +-> value.score -> values

Parameters: `policy.` and transformers' names of the language model; `value.score.weight`.
Shapes: S local tokens, M positions with a target, D width.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.output import ScoreHead, scatter_rows
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import ParallelMesh


class PolicyValueOutput(NamedTuple):
    """Hold per-position results [S] float32, zero where the loss weight is 0.

    logps: log-probability of the target. entropy: of the prediction, None if not asked for. values: expected return
    before the target is drawn, None without a value.
    """

    logps: Tensor
    entropy: Tensor | None
    values: Tensor | None


class PolicyValue(nn.Module):
    """Build CausalLM from its keyword arguments and, with `value`, a score head on its last hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh | None = None,
        *,
        value: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.policy = CausalLM(config, mesh, **options)
        self.value: Any = nn.ModuleDict({"score": ScoreHead(config)}) if value else None

    def forward(
        self, batch: ShardedBatch, *, entropy: bool = False, temperature: float = 1.0
    ) -> PolicyValueOutput:
        """Return log-probabilities and values at the batch's targets; all ranks of the group call together."""
        policy, index, S = self.policy, batch.valid_index, batch.tokens.shape[0]
        rows = policy.model.norm(policy.model(batch).index_select(0, index))
        targets = batch.targets.index_select(0, index)
        out = policy.lm_head(rows, targets, entropy=entropy, temperature=temperature)
        values = scatter_rows(self.value["score"](rows), index, S) if self.value else None
        entropies = scatter_rows(out.entropy, index, S) if entropy else None
        return PolicyValueOutput(scatter_rows(out.logps, index, S), entropies, values)
