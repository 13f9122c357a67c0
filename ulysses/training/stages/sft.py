"""SFT: the negative log-likelihood of the trained tokens, as one mean over the whole optimizer step.

loss = sum_t w_t (-log p(y_t)) / sum_t w_t   [+ z_loss * mean lse^2]   (z-loss: PaLM, arXiv 2204.02311)
"""

from typing import Any

import torch
from torch import Tensor

from ulysses.parallel.batch import ShardedBatch
from ulysses.training.config import SftConfig
from ulysses.training.metrics import MetricSums
from ulysses.training.stages.base import Stage, Term


class SftStage(Stage):
    """Supervised fine-tuning on the tokens with nonzero weight."""

    kind = "sequence"

    def __init__(self, model: Any, mesh: Any, config: SftConfig) -> None:
        super().__init__(model, mesh)
        self.config = config

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor]:
        return {"tokens": batch.loss_weights.sum(dtype=torch.float64)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        smoothing, z_loss = self.config.label_smoothing, self.config.z_loss
        out = self.model(batch, lse=bool(smoothing or z_loss), mean_logit=bool(smoothing))
        weights = batch.loss_weights
        nll = -(out.logps * weights).sum()
        metrics.add("nll", nll, weights.sum(dtype=torch.float64))
        terms = [Term(nll, "tokens", 1.0 - smoothing)]
        if smoothing:  # the uniform target's cross-entropy: lse - mean logit
            terms.append(Term(((out.lse - out.mean_logit) * weights).sum(), "tokens", smoothing))
        if z_loss:
            terms.append(Term((out.lse.square() * weights).sum(), "tokens", z_loss))
        return terms
