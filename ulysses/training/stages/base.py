"""What the loop asks of a stage. The loop knows no algorithm; a stage knows no loop.

side_batches(loader, indices)      more sequences that a step needs but does not train on
prepare_step(batches, side)        once per optimizer step, without gradient: step-wide statistics
counts(batch)                      what this rank contributes to each global count
losses(batch)                      terms (local sums) and metrics of one micro-batch
derive(metrics)                    what follows from the reduced metrics
loader, may_prepare, accepts, evaluate, save, load: for a stage that makes its own data
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.training.metrics import MetricSums


class Term(NamedTuple):
    """One part of the loss: weight * (global sum of `value`) / (global `count`).

    `per_sequence` terms are evaluated by every sequence-parallel rank and therefore counted once per group.
    """

    value: Tensor
    count: str
    weight: float = 1.0
    per_sequence: bool = False


class Stage:
    """Base of all stages; `model` is the trained engine, called like the module it wraps, `config` the stage's own section."""

    def __init__(self, model: Any, mesh: Any, config: Any) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config
        self.step = 0  # the optimizer step being computed; the loop sets it

    def sequences(self, example: Any) -> list[Sequence]:
        """Return the example's sequences as they are packed, with the columns that `losses` needs."""
        return list(example.sequences)

    def side_batches(self, loader: Any, indices: list[int]) -> list[ShardedBatch]:
        """Return further packed sequences for `prepare_step`, as many batches on every rank.

        Args:
            loader: the step's StepLoader.
            indices: dataset indices of the whole step, on every rank.
        """
        return []

    def prepare_step(self, batches: list[ShardedBatch], side_batches: list[ShardedBatch]) -> None:
        """Gather step-wide statistics over all micro-batches of one optimizer step."""

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor]:
        """Return this rank's own share of every count (a sequence counts on sequence-parallel rank 0 only); by default tokens."""
        return {"tokens": batch.loss_weights.sum(dtype=torch.float64)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        """Return the loss terms of one micro-batch and add its metrics."""
        raise NotImplementedError

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the reduced means with those that are functions of them; the same on every rank."""
        return metrics

    def check_first_step(self, metrics: dict[str, float]) -> None:
        """Refuse to go on if identities that must hold before the first update do not.

        Raises RuntimeError with an explanation.
        """

    def once(self, value: float | Tensor) -> float | Tensor:
        """Return the value on sequence-parallel rank 0 and zero elsewhere: a sequence counts once per group."""
        return (
            value
            if self.mesh.sp_rank == 0
            else (torch.zeros_like(value) if isinstance(value, Tensor) else 0.0)
        )

    def own(self, batch: ShardedBatch, number: float) -> Tensor:
        """Return a number of sequences as this rank's share of a count."""
        return torch.full(
            (), float(self.once(float(number))), dtype=torch.float64, device=batch.tokens.device
        )

    def loader(self, prompts: Any) -> Any:
        """Return what the loop reads its steps from; by default the data itself."""
        return prompts

    def may_prepare(self, step: int) -> bool:
        """Say whether the batches of `step` may be prepared while the step before it still computes."""
        return True

    def accepts(self, metrics: dict[str, float]) -> bool:
        """Say, from reduced metrics alone, whether the step's update is applied (alike on every rank)."""
        return True

    def evaluate(self, loader: Any) -> dict[str, float] | None:
        """Return `eval/...` metrics (eval/loss among them), or None to have the loop evaluate the losses."""
        return None

    def save(self, folder: Path) -> None:
        """Write the stage's own state into a checkpoint; rank 0 only."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; on every rank, after the weights."""
