"""What the routers of experts choose in a step: metrics of every layer, and the balance loss over the whole step.

    balance loss   N * sum_n f_n P_n     f_n: choices of expert n per row, P_n: mean probability; over all layers' rows

This is transformers' load_balancing_loss_func (Fedus et al. 2021, 2101.03961) of one batch that holds the whole step.
f is a constant for the gradient, so that only P, a sum over rows, is differentiated. But f must be known before the
first backward pass. One micro-batch tells it when it has run forward; several run forward once more before the step.

The loss is no Term of the stage, because the routers' probabilities stay inside the layers, which backward runs again.
`_balance` computes what the loss adds to the gradient of a row's probabilities, and RouterRecord (models/moe.py) adds
it when backward comes to them. The loop calls `begin` before the step's forward passes, and after its backward passes
`add`, which adds the value of the loss to the metrics.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.parallel.batch import ShardedBatch
from ulysses.stages.base import MetricSums
from ulysses.zero.engine import ZeroEngine


class Routers:
    """Follow the routers of an engine's model through its steps; all ranks call every method together.

    Args:
        coefficient: of the balance loss; 0 has none.
    """

    def __init__(self, engine: ZeroEngine, coefficient: float) -> None:
        self.engine, self.coefficient = engine, coefficient
        self.record, self.config = engine.module.model.record, engine.module.config
        self.shares: Tensor | None = None  # N f_n, divided by the number of rows

    def begin(self, batches: list[ShardedBatch]) -> None:
        """Forget the last step; for the balance loss, count how often the coming step's rows choose each expert."""
        record = self.record
        record.restart(with_probabilities=bool(self.coefficient))
        if self.coefficient and len(batches) == 1:
            record.on_close = self._balance
        elif self.coefficient:
            record.counts_all = True
            with self.engine.inference():
                for batch in batches:
                    self.engine(batch)
            record.counts_all = False
            self._balance()
            record.restart(with_probabilities=True, balance=record.balance)

    def _balance(self) -> None:
        """Let backward add the balance loss, with the experts that all ranks have chosen so far."""
        record, moe = self.record, self.config.moe
        counts = record.counts.double()
        dist.all_reduce(counts)
        rows = counts.sum() / moe.num_experts_per_tok  # of all layers
        self.shares = moe.num_experts * counts.sum(0) / rows.square().clamp(min=1)
        record.balance = (dist.get_world_size() * self.coefficient * self.shares).float()
        record.on_close = None

    def add(self, metrics: MetricSums) -> None:
        """Add the metrics of the step: for each layer the busiest expert's rows over the mean, and idle experts."""
        counts = self.record.counts.double()
        dist.all_reduce(counts)
        busiest = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
        idle = (counts == 0).sum(1)
        # all ranks know these numbers, which count once
        share = 1 if dist.get_rank() == 0 else 0
        layers = enumerate(self.config.layers)
        numbers = [number for number, kind in layers if kind.feed_forward == "experts"]
        for i, number in enumerate(numbers):
            metrics.add(f"experts/busiest/{number}", busiest[i] * share)
            metrics.add(f"experts/idle/{number}", idle[i] * share)
        if self.shares is not None and self.coefficient:
            loss = torch.dot(self.shares, self.record.probabilities)
            metrics.add("aux_loss", loss)
            metrics.add("loss", self.coefficient * loss)
