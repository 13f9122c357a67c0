"""What DPO, KTO and PPO share: a reference policy that the trained one is measured against.

reference = "live"     a frozen copy of the initial policy, or the trained model with its adapters off
            a path     another frozen model
            "cached"   what the initial policy says of DPO's data, computed at the start (cached_reference.py)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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

COLUMN = "reference_logps"  # of the sequences
GAP = "reference_gap"  # the metric: mean |policy - reference| per trained token
# mean |policy - reference| per token that rounding alone explains: between two ways through 30 layers of a pretrained
# model of 135M parameters it was 0.028 in bfloat16
STEP0_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(eq=False)
class ReferencedStage(Stage):
    """A stage that compares the policy with a reference, token by token.

    Args:
        reference: computes the reference's log-probabilities [S] of a batch's targets; None for a reference-free loss.
        tolerance: largest mean |policy - reference| per token allowed at step 0, where a reference that is no other
            model equals the policy.
    """

    reference_words: ClassVar[tuple[str, ...]] = ("live",)

    reference: Callable[..., Tensor] | None = None
    tolerance: float = math.inf

    # ---------------------------------------------------------------- checks and requirements

    def check(self) -> Iterator[str]:
        reference = self.table.reference
        known = ", ".join(f'"{word}"' for word in self.reference_words)
        named = (
            reference in self.reference_words or "/" in reference or Path(reference).exists()
        )
        if not named:
            yield f"{self.name}.reference is {reference!r} but must be {known} or a model's folder or hub id"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference at all."""
        return True

    @property
    def looks_ahead(self) -> bool:
        """Whether policy and reference read as much once more before the step's first backward."""
        return False

    @property
    def requirements(self) -> Requirements:
        given, ahead = self.table.reference, self.looks_ahead
        lora = self.config.model.lora
        model = AuxiliaryModel(
            "reference",
            f"{self.name}.reference",
            path="" if given in self.reference_words else given,
            passes=1.0 + ahead,
            shares_weights=given == "live" and lora.rank > 0 and not lora.train,
        )
        models = (model,) if self.needs_reference else ()
        # log-probabilities are found forward, and their gradient from other logits backward
        return super().requirements._replace(
            extra_forwards=float(ahead), models=models, logit_bytes=12
        )

    # ---------------------------------------------------------------- construction

    def arguments(self, parts: RunParts) -> dict[str, object]:
        found = super().arguments(parts)
        if engine := found.get("reference"):
            found["reference"] = logps_of(engine)
        return {**found, "tolerance": STEP0_TOLERANCE[self.config.model.dtype]}

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
        # the reference comes first: it may be this very model with its adapters off
        reference, logps = self.reference_logps(batch), self.model(batch).logps
        trained = batch.loss_weights != 0
        gap = (logps.detach() - reference).abs() * trained
        metrics.add(GAP, gap.sum(), trained.sum())
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
        gap = metrics.get(GAP, 0.0)
        if self.table.reference in self.reference_words and not gap <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the reference, but their log-probabilities differ by {gap:.3g} per token "
                f"(at most {self.tolerance:g} is rounding): the reference belongs to other weights or the model is not "
                "deterministic; delete data.cache if it is a cached one, and look for dropout"
            )


def logps_of(engine: ZeroEngine) -> Callable[..., Tensor]:
    """Return what computes an engine's log-probabilities [S] of a batch's targets, without gradient."""

    def logps(batch: ShardedBatch, **options: object) -> Tensor:
        with engine.inference():
            return engine(batch, **options).logps

    return logps
