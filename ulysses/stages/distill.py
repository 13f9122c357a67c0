"""Distillation: the student learns a teacher's whole distribution at every trained token (GKD, arXiv 2306.13649).

teacher's layers -> rows [M, D_t] --+
                                    +--> one tile of both models' logits at a time --> sum_t w_t (divergence + nll)
student's layers -> rows [M, D] ----+

Both models read the same rows: conversations or, with distill.on_policy, prompts with answers that the student samples
in every step (ulysses/rl/on_policy.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from losses.distill import distillation
from losses.token_nll import weighted_sum
from models.folders import folder_with, resolve_model
from ulysses.data.read.tokenizer import PreTrainedTokenizerFast, load_tokenizer
from ulysses.parallel.batch import ShardedBatch
from ulysses.stages.base import AuxiliaryModel, MetricSums, Requirements, RunParts, Stage, Term
from ulysses.zero.engine import ZeroEngine


@dataclass(eq=False)
class DistillStage(Stage):
    """Learning from a teacher.

    Args:
        teacher: a frozen engine around models.decoder.CausalLM.
    """

    name, dataset_type = "distill", "sequence"

    teacher: ZeroEngine | None = None

    def check(self) -> Iterator[str]:
        if not self.table.teacher:
            yield "distill.teacher is missing; set it to the folder or hub id of the model to learn from"

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
        path = self.table.teacher
        folder = resolve_model(path, need_weights=False, key="distill.teacher")
        teachers = load_tokenizer(folder_with(folder, "tokenizer*")).get_vocab()
        for token, number in tokenizer.get_vocab().items():
            if teachers.get(token) != number:
                yield (
                    f"distill.teacher {path} has another tokenizer: {token!r} is token {number} of the student and "
                    f"{teachers.get(token)} of the teacher; use a teacher with the student's tokenizer"
                )
                return

    @property
    def requirements(self) -> Requirements:
        teacher = AuxiliaryModel("teacher", "distill.teacher", self.table.teacher)
        return super().requirements._replace(models=(teacher,))

    def build(self, parts: RunParts) -> Self:
        return replace(super().build(parts), teacher=parts.frozen["teacher"])

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        table = self.table
        with self.teacher.inference():
            rows = self.teacher(batch, project=False)
        matrix = self.teacher.module.lm_head.weight
        with self.teacher.weights.whole([matrix]):
            loss = distillation(
                rows,
                matrix,
                beta=table.jsd_beta,
                temperature=table.temperature,
                nll_weight=table.nll_weight,
            )
            out = self.model(batch, nll=True, tile_loss=loss)
        nll, count = weighted_sum(-out.logps, batch.loss_weights)
        metrics.add("nll", nll, count)
        metrics.add("divergence", out.nll - table.nll_weight * nll, count)
        return [Term(out.nll, "tokens")]
