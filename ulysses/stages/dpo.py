"""DPO and its family: move the policy so that chosen answers gain over rejected ones, measured against a reference.

    packed pairs    [ prompt chosen | prompt rejected | prompt chosen | ... ]
    logps [S]  -- segment sums over the sp group -->  [N]  -- even, odd -->  chosen, rejected [N/2]  -->  losses [N/2]

"We increase the log-probability of the preferred answers and decrease that of the others, each pair weighted by how
wrong the implicit reward is" (Rafailov et al. 2023, arXiv 2305.18290).

Two losses look beyond a pair, and both look at the whole optimizer step: bco_pair subtracts the mean reward of all
steps so far, and aot sorts the margins of the step's pairs, which a first pass without gradient finds.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from losses.dpo import REFERENCE_FREE, dpo_loss, ld_dpo_weights
from losses.preference import aot_margins
from ulysses.data.serve.dataset import Example, TokenizedDataset
from ulysses.disk import write_json
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.parallel.mesh import gather
from ulysses.stages.base import (
    Metrics,
    MetricSums,
    Normaliser,
    Requirements,
    RunParts,
    StepBatches,
    Term,
)
from ulysses.stages.cached_reference import cache_file, read_reference
from ulysses.stages.referenced import REFERENCE_LOGPS, ReferencedStage

STATE_FILE = "dpo.json"  # in a checkpoint
MEAN_REWARD = "rewards/mean"  # the metric that bco_pair averages over all steps


class DpoStage(ReferencedStage):
    """Preference optimisation on pairs; `reference` and `tolerance` as in ReferencedStage."""

    name, dataset_type = "dpo", "pair"
    sequences_per_example = 2
    reference_words = ("cached", "live")
    # bco_pair: the mean reward of all steps so far, and their number
    rewards: tuple[float, int] = (0.0, 0)

    @property
    def options(self) -> dict[str, object]:
        """The arguments of `losses.dpo_loss` that are settings."""
        return self.table.model_dump(exclude={"ld_alpha", "sft_weight", "reference"})

    @property
    def unread(self) -> dict[str, tuple[str, ...]]:
        """The settings that none of the losses reads."""
        table = self.table
        is_read = {
            "dpo.simpo_gamma": "simpo" in table.loss_types,
            "dpo.discopop_tau": "discopop" in table.loss_types,
            "dpo.f_alpha": table.f_divergence == "alpha",
            "dpo.reference": self.needs_reference,
        }
        unread = tuple(name for name, read in is_read.items() if not read)
        return {
            "dpo.loss_type and dpo.f_divergence ask for nothing that reads it; remove it": unread
        }

    def check(self) -> Iterator[str]:
        one = torch.ones(1)
        try:
            dpo_loss(
                -one, -one, -one, -one, chosen_lengths=one, rejected_lengths=one, **self.options
            )  # fmt: skip
        except ValueError as error:
            yield f"dpo: {error}"
        table = self.table
        if table.loss_weights and not any((*table.loss_weights, table.sft_weight)):
            yield "dpo.loss_weights are all 0; nothing would be trained, raise one"
        yield from super().check()

    @property
    def needs_reference(self) -> bool:
        return not {*self.table.loss_types} <= {*REFERENCE_FREE}

    @property
    def is_cached(self) -> bool:
        """Whether the data carry the reference's log-probabilities."""
        return self.needs_reference and self.table.reference == "cached"

    @property
    def looks_ahead(self) -> bool:
        return "aot" in self.table.loss_types

    @property
    def requirements(self) -> Requirements:
        requirements = super().requirements
        if not self.is_cached:
            return requirements
        # the trained model serves as the reference, before the first step
        (reference,) = requirements.models
        cached = reference._replace(passes=0.0, shares_weights=True)
        return requirements._replace(models=(cached,))

    def extend_data(self, parts: RunParts, data: TokenizedDataset) -> TokenizedDataset:
        """Let the data carry the initial policy's log-probabilities if they are to be cached.

        Unless data.cache holds them they are computed now, with the weights that training starts from. Those of a
        checkpoint are loaded later.
        """
        if not self.is_cached:
            return data
        path = cache_file(self.config, parts.weights, parts.kernel, data)
        logps = read_reference(data, path, self.reference, parts)
        return data.with_column(REFERENCE_LOGPS, logps)

    def reference_logps(self, batch: ShardedBatch) -> Tensor:
        return (
            batch.token_columns[REFERENCE_LOGPS]
            if self.is_cached
            else super().reference_logps(batch)
        )

    def sequences(self, example: Example) -> list[Sequence]:
        pair = super().sequences(example)
        alpha = self.table.ld_alpha
        if alpha == 1:
            return pair
        # the last position predicts nothing
        trained = [torch.tensor(np.append(s.loss_weights, 0)[1:]) != 0 for s in pair]
        shorter = min(mask.sum() for mask in trained)
        weights = (
            ld_dpo_weights(mask.cumsum(0) - 1, shorter.expand(len(mask)), alpha)
            for mask in trained
        )
        return [
            replace(s, token_columns={**s.token_columns, "ld_weights": w})
            for s, w in zip(pair, weights)
        ]

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        chosen = batch.loss_weights * (batch.sequence_ids % 2 == 0)
        return {
            "pairs": self.on_first_rank(batch.num_sequences // 2),
            "chosen_tokens": chosen.sum(dtype=torch.float64),
        }

    def before_step(self, batches: StepBatches) -> list[tuple[Tensor, ...]]:
        """Return for each micro-batch the reference's margins that aot compares the policy's with, [N/2] each."""
        if not self.looks_ahead:
            return super().before_step(batches)
        with self.model.inference():
            passes = [
                (b, self.model(b).logps, self.reference_logps(b)) for b in batches.trained
            ]
            local = [torch.stack(self.answer_sums(*each)[:2]).cpu() for each in passes]
        # [2, N] of every micro-batch of the step, group by group; every group has equally many micro-batches
        sums: list[Tensor] = sum(gather(local)[:: self.mesh.sequence_parallel_size], [])
        of_step = torch.cat(sums, dim=1)
        margins = aot_margins(*(of_step[:, 0::2] - of_step[:, 1::2]))
        by_microbatch = margins.split([each.shape[1] // 2 for each in sums])
        first = self.mesh.dp_rank * len(local)
        return [(m.to(self.model.device),) for m in by_microbatch[first : first + len(local)]]

    def losses(
        self, batch: ShardedBatch, metrics: MetricSums, reference_margins: Tensor | None = None
    ) -> list[Term]:
        table, weights = self.table, batch.loss_weights
        logps, reference = self.both_logps(batch, metrics)
        policy, base, lengths = self.answer_sums(batch, logps, reference)
        chosen, rejected = policy[0::2], policy[1::2]
        losses, chosen_rewards, rejected_rewards = dpo_loss(
            chosen,
            rejected,
            base[0::2],
            base[1::2],
            chosen_lengths=lengths[0::2],
            rejected_lengths=lengths[1::2],
            bco_delta=self.rewards[0],
            aot_reference_margins=reference_margins,
            **self.options,
        )
        margins = chosen_rewards - rejected_rewards
        means = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": margins,
            "rewards/accuracies": margins > 0,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        if "bco_pair" in table.loss_types:
            ratios = (chosen - base[0::2] + rejected - base[1::2]) / 2
            means[MEAN_REWARD] = table.beta * ratios
        terms = [Term(losses.sum(), "pairs", per_sequence=True)]
        if table.sft_weight:
            weights = weights * (batch.sequence_ids % 2 == 0)
            nll = -(logps * weights).sum()
            terms.append(Term(nll, "chosen_tokens", table.sft_weight))
            metrics.add("nll/chosen", nll, weights.sum(dtype=torch.float64))
            means["loss/preference"] = losses
        self.add_means(metrics, means, len(losses))
        return terms

    def after_step(self, metrics: Metrics) -> None:
        """Add the step's mean reward to the running mean, which bco_pair subtracts from the next step on."""
        if MEAN_REWARD in metrics:
            mean, steps = self.rewards
            self.rewards = mean + (metrics[MEAN_REWARD] - mean) / (steps + 1), steps + 1

    def save(self, folder: Path) -> None:
        write_json(folder / STATE_FILE, self.rewards)

    def load(self, folder: Path) -> None:
        # a run may continue another stage's checkpoint (run.resume_anyway)
        if (file := folder / STATE_FILE).exists():
            self.rewards = json.loads(file.read_text())
