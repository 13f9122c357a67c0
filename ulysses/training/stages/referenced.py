"""What DPO and KTO share: log-probabilities of a reference policy beside those of the trained one."""

from typing import Any

from torch import Tensor

from ulysses.parallel.batch import ShardedBatch
from ulysses.training.metrics import MetricSums
from ulysses.training.stages.base import Stage


class ReferencedStage(Stage):
    """A stage that compares the policy with a reference, token by token.

    Args:
        cached: the batches carry the reference's log-probabilities as the token column `reference_logps`.
        reference: an engine that computes them instead; neither for a reference-free loss.
        tolerance: largest mean |policy - reference| per token allowed at step 0; None skips the check.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any,
        config: Any,
        *,
        cached: bool = False,
        reference: Any = None,
        tolerance: float | None = None,
    ) -> None:
        super().__init__(model, mesh, config)
        self.cached = cached
        self.reference = reference
        self.tolerance = tolerance

    def reference_logps(self, batch: ShardedBatch) -> Tensor | None:
        """Return the reference's log-probabilities [S] of the batch's targets, or None without a reference."""
        if self.cached:  # a batch without sequences has no columns
            return batch.token_columns.get(
                "reference_logps", batch.loss_weights.new_zeros(batch.tokens.shape)
            )
        if self.reference is not None:
            with self.reference.inference():
                return self.reference(batch).logps
        return None

    def add_reference_gap(
        self, metrics: MetricSums, batch: ShardedBatch, logps: Tensor, reference: Tensor
    ) -> None:
        """Add the mean |policy - reference| per trained token."""
        trained = batch.loss_weights != 0
        metrics.add(
            "reference_gap", ((logps.detach() - reference).abs() * trained).sum(), trained.sum()
        )

    def check_first_step(self, metrics: dict[str, float]) -> None:
        gap = metrics.get("reference_gap")
        if self.tolerance is None or gap is None:
            return
        if not gap <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the reference, but their log-probabilities differ by {gap:.3g} per token "
                f"(at most {self.tolerance:g} is rounding): the reference cache belongs to other weights or the model "
                "is not deterministic; delete data.cache and look for dropout"
            )
