"""KTO: learn from single answers marked good or bad, measured against a reference and a step-wide baseline.

    r_i = log pi(y_i | x_i) - log pi_ref(y_i | x_i)                                   this example's reward / beta
    z0  = max(0, mean_i [log pi(y_j | x_i) - log pi_ref(y_j | x_i)])                  over the whole optimizer step
          j = the next example of the step (cyclic) with a different prompt
    good: weight * (1 - sigmoid(beta (r - z0)))       bad: weight * (1 - sigmoid(beta (z0 - r)))

Mismatched sequences (x_i, y_j) are packed by themselves (`side_batches`) and only looked at, before the first backward;
z0 carries no gradient. Source: Ethayarajh et al. 2024 (2402.01306); apo_zero_unpaired (2408.06266) has no baseline.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from losses.kto import kto_loss
from ulysses.data.steps import pack_step
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.sums import segment_sums
from ulysses.training.config import KtoConfig
from ulysses.training.metrics import MetricSums
from ulysses.training.reference import mismatched_lengths
from ulysses.training.stages.base import Term
from ulysses.training.stages.referenced import ReferencedStage


class KtoStage(ReferencedStage):
    """Preference optimisation on unpaired, labelled answers.

    Args:
        max_length: mismatched sequences are cut there.
        budget: tokens per packed micro-batch.
        cached: sequences carry `reference_logps`, mismatched ones `reference_sum` (ulysses.training.reference).
    """

    config: KtoConfig

    def __init__(
        self,
        model: Any,
        mesh: Any,
        config: KtoConfig,
        *,
        max_length: int,
        budget: int,
        **reference: Any,
    ) -> None:
        super().__init__(model, mesh, config, **reference)
        self.max_length = max_length
        self.budget = budget
        self.baseline: Tensor | None = None  # z0 of the running step

    def sequences(self, example: Any) -> list[Sequence]:
        return [
            replace(s, columns={**s.columns, "label": example.columns["label"]})
            for s in example.sequences
        ]

    def side_batches(self, loader: Any, indices: list[int]) -> list[ShardedBatch]:
        if self.config.loss_type != "kto":
            return []
        pairs = loader.mismatched_pairs(indices)
        lengths = mismatched_lengths(loader.dataset, pairs, self.max_length)
        mine = pack_step(lengths, max([self.budget, *lengths]), self.mesh.data_parallel_size)[
            self.mesh.dp_rank
        ]
        return [
            pack_shard(
                [loader.dataset.mismatch(*pairs[p], self.max_length) for p in part],
                self.mesh,
                self.model.device,
            )
            for part in mine
        ]

    def prepare_step(self, batches: list[ShardedBatch], side_batches: list[ShardedBatch]) -> None:
        if self.config.loss_type != "kto":
            return
        total = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        with self.model.inference():
            for batch in side_batches:
                policy = segment_sums(self.model(batch).logps.double() * batch.loss_weights, batch)
                reference = self._mismatched_reference(batch)
                total[0] += self.once((policy - reference).sum())
                total[1] += self.once(float(batch.num_sequences))
        if dist.is_initialized():
            dist.all_reduce(total)
        self.baseline = (total[0] / total[1].clamp(min=1)).clamp(
            min=0
        )  # a step without any mismatch: 0

    def _mismatched_reference(self, batch: ShardedBatch) -> Tensor:
        if self.cached:
            return batch.sequence_columns.get(
                "reference_sum", torch.zeros((), device=self.model.device)
            ).double()
        logps = self.reference_logps(batch)
        assert logps is not None
        return segment_sums(logps.double() * batch.loss_weights, batch)

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor]:
        return {"examples": self.own(batch, batch.num_sequences)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        config, weights = self.config, batch.loss_weights
        reference = self.reference_logps(
            batch
        )  # first: it may be this very model with its adapters off
        logps = self.model(batch).logps
        assert reference is not None
        sums = segment_sums(torch.stack([logps * weights, reference * weights], dim=-1), batch)
        policy, base = sums[:, 0], sums[:, 1].detach()
        desirable = batch.sequence_columns.get("label", base) > 0.5
        # Both losses of every example, of which its label takes one: no index that the host would have to wait for.
        both, rewards, _, _ = kto_loss(
            policy, policy, None, base, base, None, config.beta, config.desirable_weight, config.undesirable_weight,
            kl=self.baseline if config.loss_type == "kto" else None, loss_type=config.loss_type,
        )  # fmt: skip
        count = batch.num_sequences
        losses = torch.where(desirable, both[:count], both[count:])
        for side, chosen in (("chosen", desirable), ("rejected", ~desirable)):
            number = self.once(chosen.double().sum())
            metrics.add(f"rewards/{side}", self.once((rewards * chosen).double().sum()), number)
            metrics.add(
                f"logps/{side}", self.once((policy.detach() * chosen).double().sum()), number
            )
        if self.baseline is not None:
            metrics.add("kl", self.baseline * self.once(float(count)), self.once(float(count)))
        self.add_reference_gap(metrics, batch, logps, reference)
        return [Term(losses.sum(), "examples", per_sequence=True)]

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        if "rewards/chosen" not in metrics or "rewards/rejected" not in metrics:
            return metrics
        return {
            **metrics,
            "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"],
        }
