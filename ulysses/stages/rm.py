"""RM: a score per sequence that ranks better answers above worse ones.

    packed lists    [ prompt answer | answer | answer | prompt answer | answer | ... ]
    values [S]  -- the last token of every sequence -->  scores [N]  -- every pair of a list -->  one loss per pair

loss = -log sigmoid(s_w - s_l - margin) + center_coefficient * (s_w + s_l)^2    (Bradley-Terry; losses.reward_model)
"""

from dataclasses import replace

import torch
from torch import Tensor

from losses.reward_model import reward_loss
from models.arch import ModelConfig
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast
from ulysses.data.serve.dataset import Example
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.parallel.sums import sequence_last
from ulysses.stages.base import Metrics, MetricSums, Normaliser, Stage, Term


class RmStage(Stage):
    """Reward modelling on ranked lists of two or more answers; `model` trains a models.scored.RewardModel."""

    name, dataset_type = "rm", "ranked"
    reward = True
    sequences_per_example = 2

    def exported_config(
        self, model_config: ModelConfig, tokenizer: PreTrainedTokenizerFast
    ) -> ModelConfig:
        """Name a padding token that ends no sequence, or none.

        transformers reads the score at the last token that is not padding, so a padding token that also ends sequences
        would move it; without one, transformers scores one sequence at a time, at its last token as here.
        """
        pad = tokenizer.pad_token_id
        ends = pad in (*model_config.eos_token_id, tokenizer.eos_token_id)
        return replace(model_config, pad_token_id=None if ends else pad)

    def sequences(self, example: Example) -> list[Sequence]:
        # answers without a rank are ranked in the order of their list
        return [
            replace(s, columns={"rank": i, "margin": 0.0, **s.columns, "first": i == 0})
            for i, s in enumerate(super().sequences(example))
        ]

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        return {"pairs": self.on_first_rank(better(batch).sum())}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        scores = sequence_last(self.model(batch), batch)
        pairs = better(batch)
        margins = batch.sequence_columns["margin"]
        good, bad, margins = torch.broadcast_tensors(scores[:, None], scores, margins[:, None])
        losses = reward_loss(good, bad, margins, self.table.center_coefficient) * pairs
        difference = (good - bad) * pairs  # a tie is wrong
        means = {"accuracy": difference > 0, "margin": difference}
        self.add_means(metrics, means, pairs.sum())
        means = {"mean_reward": scores, "mean_square_reward": scores.detach().double().square()}
        self.add_means(metrics, means, len(scores))
        return [Term(losses.sum(), "pairs", per_sequence=True)]

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        if "mean_reward" in metrics:
            variance = metrics.pop("mean_square_reward") - metrics["mean_reward"] ** 2
            metrics["std_reward"] = max(0.0, variance) ** 0.5
        return metrics


def better(batch: ShardedBatch) -> Tensor:
    """Return [N, N]: whether sequence i is ranked above sequence j of the same list."""
    first, ranks = (batch.sequence_columns[name] for name in ("first", "rank"))
    lists = first.cumsum(0)
    return (lists[:, None] == lists) & (ranks[:, None] < ranks)
