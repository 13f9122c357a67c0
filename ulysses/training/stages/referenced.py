"""What DPO, KTO and PPO share: a reference policy that the trained one is measured against.

reference = "cached"   the initial policy's log-probabilities, computed before the first update and memory-mapped
            "live"     a frozen copy of the initial policy, or the trained model with its adapters off
            a path     another frozen model
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from models.arch import ModelConfig as Shape
from ulysses.parallel.batch import ShardedBatch
from ulysses.training.metrics import MetricSums
from ulysses.training.reference import Pairs, ReferenceCache
from ulysses.training.section import ConfigError
from ulysses.training.stages.base import OtherModel, Stage

if TYPE_CHECKING:
    from ulysses.training.build import StageParts
    from ulysses.training.config import Config

STEP0_TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 2e-2,
}  # mean |policy - reference| per token that rounding alone explains


@dataclass(eq=False)
class ReferencedStage(Stage):
    """A stage that compares the policy with a reference, token by token.

    Args:
        cached: the batches carry the reference's log-probabilities as the token column `reference_logps`.
        reference: an engine that computes them instead; neither for a reference-free loss.
        tolerance: largest mean |policy - reference| per token allowed at step 0; None skips the check.
    """

    reference_words: ClassVar[tuple[str, ...]] = ("cached", "live")

    _: KW_ONLY
    cached: bool = False
    reference: Any = None
    tolerance: float | None = None

    # ---------------------------------------------------------------- checks and facts

    @classmethod
    def reference_of(cls, config: "Config") -> str:
        """Return "cached", "live", another model's path, or "" if the settings need no reference."""
        return cls.table(config).reference

    @classmethod
    def check(cls, config: "Config") -> Iterator[str]:
        reference = cls.table(config).reference
        known = ", ".join(f'"{word}"' for word in cls.reference_words)
        named = reference in cls.reference_words or "/" in reference or Path(reference).exists()
        if not named:
            yield f"{cls.name}.reference is {reference!r} but must be {known} or a model's folder or hub id"

    @classmethod
    def reference_tokens(cls, shape: Shape, tokenizer: Any) -> int:
        """Return how many tokens a reference must know."""
        return len(tokenizer)

    @classmethod
    def check_model(
        cls, config: "Config", shape: Shape, tokenizer: Any, others: Mapping[str, Shape]
    ) -> Iterator[str]:
        setting, needed = f"{cls.name}.reference", cls.reference_tokens(shape, tokenizer)
        if setting in others and others[setting].vocab_size < needed:
            yield (
                f"{setting} {cls.reference_of(config)} has {others[setting].vocab_size} tokens but the policy "
                f"{needed}; use a model with the policy's tokenizer"
            )

    @classmethod
    def other_models(cls, config: "Config") -> tuple[OtherModel, ...]:
        reference = cls.reference_of(config)
        if reference in ("", *cls.reference_words):
            return ()
        return (OtherModel(f"{cls.name}.reference", reference),)

    @classmethod
    def keeps_initial(cls, config: "Config") -> bool:
        return cls.reference_of(config) == "live" and not config.model.lora.rank

    @classmethod
    def extra_forwards(cls, config: "Config") -> float:
        return float(cls.reference_of(config) not in ("", "cached"))

    # ---------------------------------------------------------------- construction

    @classmethod
    def build(cls, parts: "StageParts", **more: Any) -> "ReferencedStage":
        arguments = {**cls.reference_arguments(parts), **more}
        return cls(parts.engine, parts.mesh, cls.table(parts.config), **arguments)

    @classmethod
    def first_step_tolerance(cls, parts: "StageParts") -> float | None:
        """Return how far policy and reference may differ at step 0; None if the run does not start there."""
        return STEP0_TOLERANCE[parts.config.model.dtype] if parts.fresh else None

    @classmethod
    def reference_arguments(cls, parts: "StageParts") -> dict[str, Any]:
        """Return the constructor's `cached`, `reference` and `tolerance` as the configuration asks for them."""
        config, reference = parts.config, cls.reference_of(parts.config)
        if reference not in ("", *cls.reference_words):
            return {"reference": parts.frozen(cls.other_models(config)[0])}
        found: dict[str, Any] = {"tolerance": cls.first_step_tolerance(parts)}
        if reference == "cached":
            cls._read_through_cache(parts)
            found["cached"] = True
        elif reference == "live":
            found["reference"] = (
                parts.initial_policy() if config.model.lora.rank else parts.frozen()
            )
        return found

    @classmethod
    def mismatched_pairs(cls, parts: "StageParts", data: Any, evaluation: bool) -> Pairs | None:
        """Return the (example, other) pairs whose mismatched sequences the run will ask for; None for none."""
        return None

    @classmethod
    def _read_through_cache(cls, parts: "StageParts") -> None:
        """Fill (or find) the reference's log-probabilities of all data; the data carries them from here on."""
        config, initial = parts.config, parts.initial_policy()
        weights = parts.initial_weights().fingerprint()

        def logps(batch: ShardedBatch) -> Tensor:
            with initial.inference():
                return initial(batch).logps

        def through(data: Any, evaluation: bool) -> ReferenceCache:
            key = f"{weights} {config.model.dtype} {parts.prepared.kernel} {data.fingerprint}"
            name = f"reference-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
            folder = Path(config.data.cache).expanduser() / name
            pairs = cls.mismatched_pairs(parts, data, evaluation)
            cache = ReferenceCache(folder, data, pairs, config.data.max_length)
            if not (parts.fresh or config.model.lora.rank or cache.complete()):
                raise ConfigError(
                    f"the reference log-probabilities of this run are gone from {folder}, and resuming no "
                    f"longer has the initial policy; restore data.cache, or set {cls.name}.reference to the "
                    "initial model's path"
                )
            cache.fill(logps, parts.mesh, parts.engine.device, cls.budget(config), parts.say)
            return cache

        parts.train_data = through(parts.train_data, False)
        if parts.eval_data is not None:
            parts.eval_data = through(parts.eval_data, True)

    # ---------------------------------------------------------------- every step

    def reference_logps(self, batch: ShardedBatch) -> Tensor | None:
        """Return the reference's log-probabilities [S] of the batch's targets, or None without a reference."""
        if self.cached:  # a batch without sequences has no columns
            nothing = torch.zeros_like(batch.loss_weights)
            return batch.token_columns.get("reference_logps", nothing)
        if self.reference is None:
            return None
        with self.reference.inference():
            return self.reference(batch).logps

    def add_reference_gap(
        self, metrics: MetricSums, batch: ShardedBatch, logps: Tensor, reference: Tensor
    ) -> None:
        """Add the mean |policy - reference| per trained token."""
        trained = batch.loss_weights != 0
        gap = (logps.detach() - reference).abs() * trained
        metrics.add("reference_gap", gap.sum(), trained.sum())

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
