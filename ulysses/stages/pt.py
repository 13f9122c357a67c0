"""PT: every token of every document is predicted, as one mean over the whole optimizer step.

    loss = mean_t (-log p_t)  [+ z_loss * mean_t lse_t^2]      z-loss: PaLM (2204.02311, section 5), 1e-4 there

Documents are packed with their own boundaries: no token attends to another document. A document longer than
data.max_length is cut into pieces that overlap by one token, so that every token but its first is predicted once.
"""

from functools import cached_property

from ulysses.config.stage_sections import SftSection
from ulysses.stages.sft import SftStage


class PtStage(SftStage):
    """Pre-training on plain text, which is fine-tuning with every token trained."""

    name, dataset_type = "pt", "text"

    @cached_property
    def table(self) -> SftSection:
        return SftSection(z_loss=self.config.pt.z_loss)
