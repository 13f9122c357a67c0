"""SFT: the negative log-likelihood of the trained tokens, as one mean over the whole optimizer step.

nll   sum_t w_t (-log p_t) / sum_t w_t                        (with label smoothing: losses.label_smoothed_nll)
dft   sum_t w_t (-p_t log p_t) / sum_t w_t, p_t constant      dynamic fine-tuning, arXiv 2508.05629
[+ z_loss * mean lse^2]                                       PaLM, arXiv 2204.02311

Evaluation also reports nll by position octave: the mean over the trained tokens that stand at the places [0, 1024) of
their sequences, [1024, 2048), [2048, 4096) and so on, which shows how much a model gains from a long context.
"""

import math
from collections.abc import Iterator

import torch

from losses.token_nll import dft_nll, label_smoothed_nll, weighted_sum, z_loss
from ulysses.parallel.batch import ShardedBatch
from ulysses.stages.base import Metrics, MetricSums, Stage, Term

LARGEST_EXPONENT = 700.0  # e^700 is still finite
# ranges of positions, each of which ends at twice its start
OCTAVES = ["0-1k", *(f"{2**i}k-{2 ** (i + 1)}k" for i in range(13))]


class SftStage(Stage):
    """Supervised fine-tuning on the tokens with nonzero weight; reports perplexity = exp(nll)."""

    name, dataset_type = "sft", "sequence"

    def check(self) -> Iterator[str]:
        if self.table.loss_type == "dft" and self.table.label_smoothing:
            yield (
                f'sft.label_smoothing is {self.table.label_smoothing:g} but sft.loss_type "dft" has none; set it to 0 '
                'or use "nll"'
            )

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        table, weights = self.table, batch.loss_weights
        smoothing = table.label_smoothing
        needs_lse = bool(smoothing or table.z_loss)
        # the loss needs nothing of the head but its nll
        plain = table.loss_type == "nll" and not needs_lse
        out = self.model(batch, nll=plain, lse=needs_lse, mean_logit=bool(smoothing))
        loss, count = weighted_sum(-out.logps, weights)
        metrics.add("nll", loss, count)
        if not torch.is_grad_enabled():
            nll = -out.logps.double()
            # a row predicts the token after it; exponent e means 2^(e - 1) <= thousands < 2^e, and 0 means none
            octaves = ((batch.positions + 1) // 1024).float().frexp().exponent
            # every rank adds the same names; octaves without a trained token are left out of the means
            for i, name in enumerate(OCTAVES):
                inside = weights.double() * (octaves == i)
                metrics.add(f"nll/{name}", *weighted_sum(nll, inside))
                metrics.add(f"nll_se/{name}", *weighted_sum(nll.square(), inside))
                metrics.add(f"weights/{name}", inside.sum())
        if plain:
            loss = out.nll
        elif table.loss_type == "dft":
            loss, _ = weighted_sum(dft_nll(out.logps), weights)
        elif smoothing:
            each = label_smoothed_nll(out.logps, out.lse, out.mean_logit, smoothing)
            loss, _ = weighted_sum(each, weights)
        terms = [Term(loss, "tokens")]
        if table.z_loss:
            penalty, _ = weighted_sum(z_loss(out.lse, table.z_loss), weights)
            metrics.add("z_loss", penalty, count)
            terms.append(Term(penalty, "tokens"))
        return terms

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        if "nll" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["nll"], LARGEST_EXPONENT))
        for name in OCTAVES:
            if count := metrics.pop(f"weights/{name}", 0):
                variance = metrics[f"nll_se/{name}"] - metrics[f"nll/{name}"] ** 2
                metrics[f"nll_se/{name}"] = math.sqrt(max(0, variance) / count)
        return metrics
