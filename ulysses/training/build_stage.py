"""From configuration to the stage: which one, and where its reference's log-probabilities come from.

reference = "cached"   the initial policy's values, computed before the first update and memory-mapped
            "live"     a frozen copy of the initial policy beside the trained one
            a path     another frozen model
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from losses.dpo import REFERENCE_FREE
from models.arch import ModelConfig as Shape
from models.sampler import SamplingOptions
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import FileWeights, build_engine, weights_fingerprint, weights_of
from ulysses.training.checks import Plan, reference_shape, reward_shape, stop_tokens
from ulysses.training.reference import ReferenceCache, pairs_of_run
from ulysses.training.rewards import is_function, load_function
from ulysses.training.rollout import RolloutMaker
from ulysses.training.section import ConfigError
from ulysses.training.stages.base import Stage
from ulysses.training.stages.dpo import DpoStage
from ulysses.training.stages.kto import KtoStage
from ulysses.training.stages.ppo import PpoStage
from ulysses.training.stages.pt import PtStage
from ulysses.training.stages.rm import RmStage
from ulysses.training.stages.sft import SftStage
from ulysses.zero.engine import ZeroEngine

STEP0_TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 2e-2,
}  # mean |policy - reference| per token: rounding only


@dataclass
class StageBuilder:
    """Builds the stage of a plan around its engine; all ranks call it together.

    `train_data` and `eval_data` are replaced by views that carry the reference's values if these are cached.
    """

    plan: Plan
    engine: ZeroEngine
    mesh: ParallelMesh
    device: torch.device
    train_data: Any
    eval_data: Any
    fresh: bool  # not resumed: the engine still holds the initial policy
    say: Callable[[str], None]
    resources: ExitStack  # takes the frozen engines

    def __post_init__(self) -> None:
        self.initial: Any = (
            self.engine
        )  # computes the initial policy: the fresh engine, or its base at any time

    def build(self) -> Stage:
        config, engine, mesh = self.plan.config, self.engine, self.mesh
        match config.stage:
            case "pt":
                return PtStage(engine, mesh, config.pt)
            case "sft":
                return SftStage(engine, mesh, config.sft, config.run.seed)
            case "rm":
                return RmStage(engine, mesh, config.rm)
            case "dpo":
                if config.dpo.loss_type in REFERENCE_FREE:
                    return DpoStage(engine, mesh, config.dpo)
                cached, reference, tolerance = self._reference(config.dpo.reference)
                return DpoStage(
                    engine,
                    mesh,
                    config.dpo,
                    cached=cached,
                    reference=reference,
                    tolerance=tolerance,
                )
            case "kto":
                self._hint_kto_weights()
                cached, reference, tolerance = self._reference(config.kto.reference)
                return KtoStage(
                    engine, mesh, config.kto, max_length=config.data.max_length, budget=self.plan.budget,
                    cached=cached, reference=reference, tolerance=tolerance,
                )  # fmt: skip
            case "ppo":
                return self._ppo()

    def _ppo(self) -> PpoStage:
        plan, config, shape = self.plan, self.plan.config, self.plan.shape
        ppo, reference, tolerance = (
            config.ppo,
            None,
            STEP0_TOLERANCE[config.model.dtype] if self.fresh else None,
        )
        if ppo.kl_coefficient:
            _, reference, _ = self._reference(ppo.reference)
        reward: Any
        if is_function(ppo.reward):
            reward = load_function(ppo.reward)
        else:
            scorer, folder = reward_shape(config, shape)
            weights = FileWeights(folder, scorer, config.run.seed)
            reward = self._frozen(scorer, weights, reward=True)
        options = SamplingOptions(
            ppo.max_new_tokens,
            ppo.temperature,
            ppo.top_p,
            ppo.top_k,
            stop_tokens(config, plan.tokenizer, shape),
        )
        maker = RolloutMaker(
            self.engine, reference, reward, shape=shape, tokenizer=plan.tokenizer, mesh=self.mesh, config=ppo,
            options=options, budget=plan.budget, seed=config.run.seed, lora=config.model.lora,
        )  # fmt: skip
        return PpoStage(
            self.engine,
            self.mesh,
            ppo,
            temperature=ppo.temperature,
            maker=maker,
            tolerance=tolerance,
        )

    def _reference(self, kind: str) -> tuple[bool, Any, float | None]:
        """Return (values are cached, an engine that computes them instead, tolerance of the check at step 0)."""
        plan, config = self.plan, self.plan.config
        tolerance = STEP0_TOLERANCE[config.model.dtype] if self.fresh else None
        if kind in ("cached", "live") and config.model.lora.rank:
            from ulysses.training.lora import BasePolicy  # peft is an optional dependency

            self.initial = BasePolicy(self.engine)
        if kind == "cached":
            self._cache_reference()
            return True, None, tolerance
        if kind == "live" and self.initial is not self.engine:
            return False, self.initial, tolerance
        if kind == "live":
            shape, source = plan.shape, weights_of(config, plan.shape, plan.folder)
        else:
            shape, folder = reference_shape(config, plan.shape, plan.tokenizer)
            source, tolerance = FileWeights(folder, shape, config.run.seed), None
        return False, self._frozen(shape, source), tolerance

    def _frozen(self, shape: Shape, source: Any, *, reward: bool = False) -> ZeroEngine:
        plan = self.plan
        engine = build_engine(
            plan.config,
            shape,
            source,
            self.mesh,
            plan.config.model.attention,
            reward=reward,
            trainable=False,
        )
        self.resources.callback(engine.destroy)
        return engine

    def _cache_reference(self) -> None:
        """Fill (or find) the reference log-probabilities of all data and read the data through them from here on."""
        config, plan = self.plan.config, self.plan
        weights = weights_fingerprint(config, plan.shape, plan.folder)

        def through(data: Any, evaluation: bool) -> ReferenceCache:
            key = hashlib.sha256(
                f"{weights} {config.model.dtype} {plan.kernel} {data.fingerprint}".encode()
            )
            pairs = None
            if config.stage == "kto" and config.kto.loss_type == "kto":
                loader = plan.loader(data, 1, 0, evaluation=evaluation)
                pairs = pairs_of_run(
                    loader, loader.steps_per_epoch if evaluation else plan.total_steps(loader)
                )
            folder = Path(config.data.cache).expanduser() / f"reference-{key.hexdigest()[:24]}"
            cache = ReferenceCache(folder, data, pairs, config.data.max_length)
            self._check_cache(cache)
            cache.fill(self._reference_logps, self.mesh, self.device, plan.budget, self.say)
            return cache

        self.train_data = through(self.train_data, False)
        self.eval_data = through(self.eval_data, True) if self.eval_data is not None else None

    def _hint_kto_weights(self) -> None:
        kto, labels = self.plan.config.kto, self.train_data.columns["label"]
        good, bad = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
        hint = weight_hint(good, bad, kto.desirable_weight, kto.undesirable_weight)
        if hint:
            self.say(hint)

    def _check_cache(self, cache: ReferenceCache) -> None:
        if self.initial is self.engine and not self.fresh and not cache.complete():
            raise ConfigError(
                f"the reference log-probabilities of this run are gone from {cache.folder}, and resuming no longer has the initial policy; "
                f"restore data.cache, or set {self.plan.config.stage}.reference to the initial model's path"
            )

    def _reference_logps(self, batch: Any) -> torch.Tensor:
        with self.initial.inference():
            return self.initial(batch).logps


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
