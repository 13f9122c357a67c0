"""KTO: learn from single answers marked good or bad, measured against a reference and a step-wide baseline.

    r_i = log pi(y_i | x_i) - log pi_ref(y_i | x_i)                                   this example's reward / beta
    z0  = max(0, mean_i [log pi(y_j | x_i) - log pi_ref(y_j | x_i)])                  over the whole optimizer step
          j = the next example of the step (cyclic) with a different prompt
    good: weight * (1 - sigmoid(beta (r - z0)))       bad: weight * (1 - sigmoid(beta (z0 - r)))

Mismatched sequences (x_i, y_j) are packed by themselves (`side_batches`) and only looked at, before the first backward;
z0 carries no gradient. Source: Ethayarajh et al. 2024 (2402.01306); apo_zero_unpaired (2408.06266) has no baseline.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from losses.kto import kto_loss
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.parallel.sums import segment_sums
from ulysses.training.metrics import MetricSums
from ulysses.training.passes import packed_batches
from ulysses.training.reference import Pairs, mismatched_lengths, pairs_of_run
from ulysses.training.section import Section
from ulysses.training.stages.base import Term
from ulysses.training.stages.referenced import ReferencedStage

if TYPE_CHECKING:
    from ulysses.training.build import StageParts
    from ulysses.training.config import Config


class KtoSection(Section):
    beta: float = Field(0.1, gt=0)
    """Strength of the implicit KL constraint."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """"kto", or "apo_zero_unpaired", which has no KL baseline and costs no pass for it."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of good answers; keep desirable_weight * good / (undesirable_weight * bad) within 1 and 4/3."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of bad answers."""
    reference: str = "cached"
    """"cached" (the initial policy's log-probabilities, computed once), "live" (a frozen copy) or a model's path."""


@dataclass(eq=False)
class KtoStage(ReferencedStage):
    """Preference optimisation on unpaired, labelled answers.

    Args:
        max_length: mismatched sequences are cut there.
        budget: tokens per packed micro-batch.
        cached: sequences, mismatched ones too, carry `reference_logps` (ulysses.training.reference).
    """

    name, kind = "kto", "unpaired"
    config: KtoSection
    _: KW_ONLY
    max_length: int
    budget: int
    baseline: Tensor | None = field(default=None, init=False)  # z0 of the running step

    @classmethod
    def check(cls, config: "Config") -> Iterator[str]:
        if config.kto.loss_type == "kto" and config.batch.examples < 2:
            yield (
                f"batch.examples is {config.batch.examples} but kto's baseline pairs each example with another one "
                f"of its "
                'step; set it to at least 2, or kto.loss_type to "apo_zero_unpaired"'
            )
        if not config.kto.desirable_weight and not config.kto.undesirable_weight:
            yield "kto.desirable_weight and kto.undesirable_weight are both 0; nothing would be trained, raise one"
        yield from super().check(config)

    @classmethod
    def check_data(cls, config: "Config", train: Any) -> Iterator[str]:
        if config.kto.loss_type == "kto" and len(train) < 2:
            yield "data.train has one example but kto's baseline pairs each example with another; give it more"

    @classmethod
    def extra_forwards(cls, config: "Config") -> float:
        passes = super().extra_forwards(config)
        if config.kto.loss_type == "kto":  # the mismatched answers, by the policy and the reference
            passes += 1 + passes
        return passes

    @classmethod
    def mismatched_pairs(cls, parts: "StageParts", data: Any, evaluation: bool) -> Pairs | None:
        if parts.config.kto.loss_type != "kto":
            return None
        loader = parts.loader(data, evaluation=evaluation)
        steps = loader.steps_per_epoch if evaluation else cls.total_steps(parts.config, loader)
        return pairs_of_run(loader, steps)

    @classmethod
    def build(cls, parts: "StageParts", **_: Any) -> "ReferencedStage":
        config, labels = parts.config, parts.train_data.columns["label"]
        good, bad = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
        hint = weight_hint(good, bad, config.kto.desirable_weight, config.kto.undesirable_weight)
        if hint:
            parts.say(hint)
        return super().build(parts, max_length=config.data.max_length, budget=cls.budget(config))

    def sequences(self, example: Any) -> list[Sequence]:
        return [
            replace(s, columns={**s.columns, "label": example.columns["label"]})
            for s in example.sequences
        ]

    def side_batches(self, loader: Any, indices: list[int]) -> list[ShardedBatch]:
        if self.config.loss_type != "kto":
            return []
        pairs = loader.mismatched_pairs(indices)
        batches = packed_batches(
            mismatched_lengths(loader.dataset, pairs, self.max_length),
            lambda p: [loader.dataset.mismatch(*pairs[p], self.max_length)],
            self.mesh,
            self.model.device,
            self.budget,
        )
        return [batch for _, batch in batches]

    def prepare_step(self, batches: list[ShardedBatch], side_batches: list[ShardedBatch]) -> None:
        if self.config.loss_type != "kto":
            return
        total = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        with self.model.inference():
            for batch in side_batches:
                gap = self.model(batch).logps.double() - self.reference_logps(batch).double()
                total[0] += (gap * batch.loss_weights).sum()
                total[1] += self.once(float(batch.num_sequences))
        if dist.is_initialized():
            dist.all_reduce(total)
        # 0 in a step without any mismatch
        self.baseline = (total[0] / total[1].clamp(min=1)).clamp(min=0)

    def counts(self, batch: ShardedBatch) -> dict[str, Tensor]:
        return {"examples": self.own(batch, batch.num_sequences)}

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        config, weights = self.config, batch.loss_weights
        # first: it may be this very model with its adapters off
        reference = self.reference_logps(batch)
        logps = self.model(batch).logps
        sums = segment_sums(torch.stack([logps * weights, reference * weights], dim=-1), batch)
        policy, base = sums[:, 0], sums[:, 1].detach()
        desirable = batch.sequence_columns.get("label", base) > 0.5
        # Both losses of every example, of which its label takes one: no index that the host would have to wait for.
        both, rewards, _, _ = kto_loss(
            policy, policy, None, base, base, None, config.beta, config.desirable_weight, config.undesirable_weight,
            kl=self.baseline if config.loss_type == "kto" else None, loss_type=config.loss_type,
        )  # fmt: skip
        count = batch.num_sequences
        losses = torch.where(desirable, both[:count], both[count:])
        for side, chosen in (("chosen", desirable), ("rejected", ~desirable)):
            means = {f"rewards/{side}": rewards * chosen, f"logps/{side}": policy * chosen}
            self.add_means(metrics, means, chosen.sum())
        if self.baseline is not None:
            self.add_means(metrics, {"kl": self.baseline * count}, count)
        self.add_reference_gap(metrics, batch, logps, reference)
        return [Term(losses.sum(), "examples", per_sequence=True)]

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        if "rewards/chosen" not in metrics or "rewards/rejected" not in metrics:
            return metrics
        margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return {**metrics, "rewards/margins": margin}


def weight_hint(good: int, bad: int, desirable_weight: float, undesirable_weight: float) -> str:
    """Return what to say about KTO's weights, or nothing if good and bad answers weigh alike (2402.01306, eq. 8)."""
    if not good or not bad:
        return f"hint: the training data has {good} good and {bad} bad answers; KTO learns most from both"
    left, right = desirable_weight * good, undesirable_weight * bad
    if right <= left <= right * 4 / 3:
        return ""
    advice = (
        f"kto.undesirable_weight = {left / bad:.3g}"
        if left > right
        else f"kto.desirable_weight = {right / good:.3g}"
    )
    return (
        f"hint: desirable_weight * {good} good / (undesirable_weight * {bad} bad answers) is "
        f"{left / right if right else float('inf'):.3g} but 1 to 4/3 works best; for example {advice}"
    )
