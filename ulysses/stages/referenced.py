"""What DPO, KTO and PPO share: a reference policy that the trained one is measured against.

reference = "live"     a frozen copy of the initial policy, or the trained model with its adapters off
            a path     another frozen model
            "cached"   what the initial policy says of DPO's data, computed at the start (cached_reference.py)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.sums import segment_sums
from ulysses.stages.base import (
    AuxiliaryModel,
    Metrics,
    MetricSums,
    Requirements,
    RunParts,
    Stage,
)
from ulysses.zero.engine import ZeroEngine

REFERENCE_LOGPS = "reference_logps"  # the column of the sequences
REFERENCE_GAP = "reference_gap"  # the metric: mean |policy - reference| per trained token
# The largest mean |policy - reference| per token that rounding alone explains. Between two ways of computing the same
# 30 layers of a pretrained model of 135M parameters it was 0.028 in bfloat16.
STEP0_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(eq=False)
class ReferencedStage(Stage):
    """A stage that compares the policy with a reference, token by token.

    Args:
        reference: computes the reference's log-probabilities [S] of a batch's targets; None for a reference-free loss.
        tolerance: largest mean |policy - reference| per token allowed at step 0, where policy and reference are equal
            unless the reference is another model.
    """

    reference_words: ClassVar[tuple[str, ...]] = ("live",)

    reference: Callable[..., Tensor] | None = None
    tolerance: float = math.inf

    # ---------------------------------------------------------------- checks and requirements

    def check(self) -> Iterator[str]:
        reference = self.table.reference
        is_word = reference in self.reference_words
        if not (is_word or "/" in reference or Path(reference).exists()):
            words = ", ".join(f'"{word}"' for word in self.reference_words)
            yield f"{self.name}.reference is {reference!r} but must be {words} or a model's folder or hub id"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference at all."""
        return True

    @property
    def looks_ahead(self) -> bool:
        """Whether policy and reference read the step once more, before its first backward pass."""
        return False

    @property
    def requirements(self) -> Requirements:
        reference, ahead = self.table.reference, self.looks_ahead
        lora = self.config.model.lora
        model = AuxiliaryModel(
            "reference",
            f"{self.name}.reference",
            path="" if reference in self.reference_words else reference,
            passes=2.0 if ahead else 1.0,
            shares_weights=reference == "live" and lora.rank > 0 and not lora.train,
        )
        models = (model,) if self.needs_reference else ()
        # backward computes the logits again, for the gradient of the log-probabilities
        return super().requirements._replace(
            extra_forwards=1.0 if ahead else 0.0, models=models, logit_bytes=12
        )

    # ---------------------------------------------------------------- construction

    def build(self, parts: RunParts) -> Self:
        engine = parts.frozen.get("reference")
        return replace(
            super().build(parts),
            reference=engine and logps_of(engine),
            tolerance=STEP0_TOLERANCE[self.config.model.dtype],
        )

    # ---------------------------------------------------------------- every step

    def reference_logps(self, batch: ShardedBatch) -> Tensor:
        """Return the reference's log-probabilities [S] of a batch's targets."""
        return self.reference(batch)

    def both_logps(self, batch: ShardedBatch, metrics: MetricSums) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [S] of policy and reference, and add their mean gap per trained token.

        Without a reference its log-probabilities are zeros.
        """
        if not self.needs_reference:
            return self.model(batch).logps, torch.zeros_like(batch.loss_weights)
        # the reference comes first: it may be the policy itself, with its adapters off
        reference, logps = self.reference_logps(batch), self.model(batch).logps
        trained = batch.loss_weights != 0
        gap = (logps.detach() - reference).abs() * trained
        metrics.add(REFERENCE_GAP, gap.sum(), trained.sum())
        return logps, reference

    def answer_sums(
        self, batch: ShardedBatch, logps: Tensor, reference: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each answer's log-probability by the policy and by the reference, and its length, [N] each.

        Only the first carries a gradient. A column `ld_weights` weighs the tokens' log-probabilities (LD-DPO).
        """
        weights = batch.loss_weights
        decayed = weights * batch.token_columns.get("ld_weights", 1.0)
        columns = torch.stack([logps * decayed, reference * decayed, weights], dim=-1)
        policy, base, lengths = segment_sums(columns, batch).unbind(-1)
        return policy, base.detach(), lengths.detach()

    def check_first_step(self, metrics: Metrics) -> None:
        gap = metrics.get(REFERENCE_GAP, 0.0)
        if self.table.reference in self.reference_words and not gap <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the reference, but their log-probabilities differ by {gap:.3g} per token "
                f"(at most {self.tolerance:g} is rounding): the reference belongs to other weights or the model is not "
                "deterministic; delete data.cache if it is a cached one, and look for dropout"
            )


def logps_of(engine: ZeroEngine) -> Callable[..., Tensor]:
    """Return a function that computes an engine's log-probabilities [S] of a batch's targets, without gradient."""

    def logps(batch: ShardedBatch, **options: object) -> Tensor:
        with engine.inference():
            return engine(batch, **options).logps

    return logps
