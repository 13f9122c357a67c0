"""KTO: learn from single answers marked good or bad, measured against a reference and a step-wide baseline.

    r_i = log pi(y_i | x_i) - log pi_ref(y_i | x_i)                                   this example's reward / beta
    z0  = max(0, mean_i [log pi(y_j | x_i) - log pi_ref(y_j | x_i)])                  over the whole optimizer step
          j = the next example of the step (cyclic) with a different prompt
    good: weight * (1 - sigmoid(beta (r - z0)))       bad: weight * (1 - sigmoid(beta (z0 - r)))

Mismatched sequences (x_i, y_j) are packed by themselves and are only read without gradient, before the first backward
pass; z0 is a constant. Source: Ethayarajh et al. 2024 (2402.01306); apo_zero_unpaired (2408.06266) has no baseline.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from losses.kto import kto_loss
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import ShardedBatch
from ulysses.stages.base import Metrics, MetricSums, Normaliser, StepBatches, Term
from ulysses.stages.passes import packed_batches
from ulysses.stages.referenced import ReferencedStage


@dataclass(eq=False)
class KtoStage(ReferencedStage):
    """Preference optimisation on unpaired answers."""

    name, dataset_type = "kto", "unpaired"

    def check(self) -> Iterator[str]:
        examples = self.config.batch.examples
        if self.looks_ahead and examples < 2:
            yield (
                f"batch.examples is {examples} but kto's baseline pairs each example with another one "
                'of its step; set it to at least 2, or kto.loss_type to "apo_zero_unpaired"'
            )
        if not self.table.desirable_weight and not self.table.undesirable_weight:
            yield "kto.desirable_weight and kto.undesirable_weight are both 0; nothing would be trained, raise one"
        yield from super().check()

    @property
    def looks_ahead(self) -> bool:
        return self.table.loss_type == "kto"

    def check_data(self, train: TokenizedDataset) -> Iterator[str]:
        if self.looks_ahead and len(train) < 2:
            yield "data.train has one example but kto's baseline pairs each example with another; give it more"

    def read(self, source: StepLoader, step: int) -> StepBatches:
        """Return the step's micro-batches, and those of the mismatched sequences."""
        batches = super().read(source, step)
        dataset = source.dataset
        indices = source.indices_at(step)
        pairs = self.looks_ahead and mismatched_pairs(dataset.columns["prompt_id"], indices)
        if not pairs:
            return batches
        mismatched = packed_batches(
            mismatched_lengths(dataset, pairs),
            lambda numbers: [dataset.mismatch(*pairs[number]) for number in numbers],
            self.mesh,
            self.model.device,
            source.tokens_per_microbatch,
        )
        return batches._replace(looked_at=[batch for _, batch in mismatched])

    def before_step(self, batches: StepBatches) -> list[tuple[Tensor, ...]]:
        """Return z0, which is the same for every micro-batch."""
        if not self.looks_ahead:
            return super().before_step(batches)
        gaps = MetricSums(self.model.device)
        gaps.add("gap", 0.0, 0.0)  # of a step without any mismatch
        with self.model.inference():
            for batch in batches.looked_at:
                gap = self.model(batch).logps.double() - self.reference_logps(batch).double()
                count = self.on_first_rank(batch.num_sequences)
                gaps.add("gap", (gap * batch.loss_weights).sum(), count)
        total, count = gaps.totals()
        baseline = (total / count.clamp(min=1)).clamp(min=0)
        return [(baseline,)] * len(batches.trained)

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        return {"examples": self.on_first_rank(batch.num_sequences)}

    def losses(
        self, batch: ShardedBatch, metrics: MetricSums, baseline: Tensor | None = None
    ) -> list[Term]:
        table = self.table
        policy, base, _ = self.answer_sums(batch, *self.both_logps(batch, metrics))
        desirable = batch.sequence_columns["label"] > 0.5
        # Each example has both losses, and its label chooses one: an index would make the host wait for the device.
        both, rewards, _, _ = kto_loss(
            policy, policy, None, base, base, None, table.beta, table.desirable_weight, table.undesirable_weight,
            kl=baseline, loss_type=table.loss_type,
        )  # fmt: skip
        count = batch.num_sequences
        losses = torch.where(desirable, both[:count], both[count:])
        for side, chosen in (("chosen", desirable), ("rejected", ~desirable)):
            means = {f"rewards/{side}": rewards * chosen, f"logps/{side}": policy * chosen}
            self.add_means(metrics, means, chosen.sum())
        if baseline is not None:
            self.add_means(metrics, {"kl": baseline * count}, count)
        return [Term(losses.sum(), "examples", per_sequence=True)]

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


def mismatched_pairs(prompts: np.ndarray, indices: list[int]) -> list[tuple[int, int]]:
    """Return (example, partner) for each example of a step; KTO's baseline takes the partner's completion.

    The partner is the next example of the step, cyclically, that has another prompt. Examples without one are left out.
    `prompts` are the ids of the dataset's prompts.
    """
    pairs = []
    for position, i in enumerate(indices):
        following = indices[position + 1 :] + indices[:position]
        partner = next((j for j in following if prompts[j] != prompts[i]), None)
        if partner is not None:
            pairs.append((i, partner))
    return pairs


def mismatched_lengths(dataset: TokenizedDataset, pairs: list[tuple[int, int]]) -> list[int]:
    """Return the tokens of each `dataset.mismatch(i, j)` without reading one."""
    prompts, lengths = dataset.columns["prompt_length"], dataset.sequence_lengths
    uncut = (int(prompts[i] + lengths[j, 0] - prompts[j]) for i, j in pairs)
    return [min(dataset.max_length, length) for length in uncut]
