"""PT: every token of every document is predicted, as one mean over the whole optimizer step.

    loss = mean_t (-log p_t)  [+ z_loss * mean_t lse_t^2]      z-loss: PaLM (2204.02311, section 5), 1e-4 there

Documents are packed with their own boundaries: no token attends to another document. A document longer than
data.max_length is cut into pieces that overlap by one token, so that every token but its first is predicted once.
"""

from pydantic import Field

from losses.token_nll import token_nll, weighted_sum, z_loss
from ulysses.parallel.batch import ShardedBatch
from ulysses.training.metrics import MetricSums
from ulysses.training.section import Section
from ulysses.training.stages.base import Stage, Term
from ulysses.training.stages.sft import with_perplexity


class PtSection(Section):
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of mean log-sum-exp squared, which keeps logits small (PaLM uses 1e-4); 0 is off."""


class PtStage(Stage):
    """Pre-training on plain text; reports perplexity = exp(nll), held out as eval/perplexity."""

    name, kind = "pt", "text"
    config: PtSection

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        out = self.model(batch, lse=bool(self.config.z_loss))
        nll, count = token_nll(out.logps, batch.loss_weights)
        metrics.add("nll", nll, count)
        terms = [Term(nll, "tokens")]
        if self.config.z_loss:
            penalty, _ = weighted_sum(z_loss(out.lse, self.config.z_loss), batch.loss_weights)
            metrics.add("z_loss", penalty, count)
            terms.append(Term(penalty, "tokens"))
        return terms

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        return with_perplexity(metrics)
