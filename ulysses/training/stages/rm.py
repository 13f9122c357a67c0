"""RM: a score per sequence that ranks the chosen answer above the rejected one.

    packed pairs    [ prompt chosen | prompt rejected | ... ]
    values [S]  -- the last token of every sequence, by its length -->  scores [N]  -- even, odd -->  one loss per pair

loss = -log sigmoid(s_w - s_l - margin) + center_coefficient * (s_w + s_l)^2    (Bradley-Terry; losses.reward_model)
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from losses.reward_model import reward_loss
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.parallel.sums import sequence_last
from ulysses.training.config import RmConfig
from ulysses.training.metrics import MetricSums
from ulysses.training.stages.base import Stage, Term


class RmStage(Stage):
    """Reward modelling on pairs; `model` is an engine around models.decoder.RewardModel."""

    config: RmConfig

    def sequences(self, example: Any) -> list[Sequence]:
        margin = float(example.columns.get("margin", 0.0))
        return [replace(s, columns={**s.columns, "margin": margin}) for s in example.sequences]

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor]:
        return {"pairs": self.own(batch, batch.num_sequences // 2)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        scores = sequence_last(self.model(batch), batch)
        chosen, rejected = scores[0::2], scores[1::2]
        margins = batch.sequence_columns.get("margin", scores.detach())[
            0::2
        ]  # no sequences, no columns
        losses = reward_loss(chosen, rejected, margins, self.config.center_coefficient)
        self._metrics(metrics, scores.detach())
        return [Term(losses.sum(), "pairs", per_sequence=True)]

    def _metrics(self, metrics: MetricSums, scores: Tensor) -> None:
        difference = scores[0::2] - scores[1::2]
        pairs = float(self.once(float(len(difference))))
        metrics.add("accuracy", self.once((difference > 0).double().sum()), pairs)  # a tie is wrong
        metrics.add("margin", self.once(difference.double().sum()), pairs)
        metrics.add("mean_reward", self.once(scores.double().sum()), 2 * pairs)
        metrics.add("mean_square_reward", self.once(scores.double().square().sum()), 2 * pairs)
        metrics.add_max("max_reward", scores)
        metrics.add_max("-min_reward", -scores)

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        if "mean_reward" not in metrics:
            return metrics
        square, lowest = metrics.pop("mean_square_reward"), metrics.pop("-min_reward")
        deviation = max(0.0, square - metrics["mean_reward"] ** 2) ** 0.5
        return {**metrics, "min_reward": -lowest, "std_reward": deviation}
