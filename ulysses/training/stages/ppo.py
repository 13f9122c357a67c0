"""PPO: policy and value trained on rollouts of the policy, with clipped losses (1707.06347).

    loss = mean_t max(-A rho, -A clip(rho))  +  value_coefficient * mean_t max((V - G)^2, (V_clip - G)^2) / 2
                                             -  entropy_coefficient * mean_t H

All means run over the answers' tokens of one optimizer step. Rollouts (ulysses.training.rollout) come through the
loader; the stage sees their columns old_logps, old_values, advantages and returns.
"""

import json
from pathlib import Path
from typing import Any

import torch

from losses.ppo import ppo_policy_loss, ppo_value_loss
from ulysses.parallel.batch import ShardedBatch
from ulysses.training.config import PpoConfig
from ulysses.training.metrics import MetricSums
from ulysses.training.rollout import Rollout, RolloutMaker
from ulysses.training.rollout_loader import RolloutLoader
from ulysses.training.stages.base import Stage, Term

STATE, ROLLOUT = "ppo.json", "rollout.safetensors"
HELD_OUT = 1 << 40  # evaluations draw with rollout numbers from here on: always the same noise


class PpoStage(Stage):
    """Proximal policy optimisation; `model` is an engine around models.policy_value.PolicyValue.

    Args:
        maker: makes the rollouts; without one (tests) the caller gives the loop a loader of its own.
        tolerance: largest mean |log-probability difference| per token allowed at step 0; None skips the check.
    """

    def __init__(
        self, model: Any, mesh: Any, config: PpoConfig, *, temperature: float = 1.0, maker: RolloutMaker | None = None,
        tolerance: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, mesh, config)
        self.temperature = temperature
        self.maker = maker
        self.tolerance = tolerance
        self.rollouts: RolloutLoader | None = None

    # ---------------------------------------------------------------- what the loop reads

    def loader(self, prompts: Any) -> RolloutLoader:
        assert self.maker is not None
        config = self.config
        self.rollouts = RolloutLoader(
            prompts,
            self.maker.make,
            passes=config.epochs,
            minibatches=config.minibatches,
            budget=self.maker.budget,
        )
        return self.rollouts

    def may_prepare(self, step: int) -> bool:
        """A rollout needs the weights of its moment, and an early stop empties the steps that follow."""
        return self.rollouts is None or (
            step % self.rollouts.steps_per_rollout != 0 and not self.config.target_kl
        )

    def accepts(self, metrics: dict[str, float]) -> bool:
        """Drop the update of a step whose KL to the rollout's policy is too large, and the rest of its rollout."""
        if self.rollouts is None:
            return True
        if "loss/policy_avg" not in metrics:  # an empty step
            return False
        self.rollouts.stopped = metrics["policy/stopped"] > 0
        return not self.rollouts.stopped

    # ---------------------------------------------------------------- the loss

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        config, weights = self.config, batch.loss_weights
        nothing = weights.new_zeros(weights.shape)  # a batch without sequences has no columns
        old, old_values, advantages, returns = (
            batch.token_columns.get(name, nothing)
            for name in ("old_logps", "old_values", "advantages", "returns")
        )
        out = self.model(batch, entropy=True, temperature=self.temperature)
        policy = ppo_policy_loss(
            out.logps,
            old,
            advantages,
            config.clip,
            clip_high=config.clip_high or None,
            dual_clip=config.dual_clip or None,
        )
        value = ppo_value_loss(out.values, old_values, returns, config.value_clip or None)
        policy_sum, value_sum, entropy = (
            (x * weights).sum() for x in (policy.losses, value.losses, out.entropy)
        )
        count = weights.sum(dtype=torch.float64)
        gap = out.logps.detach() - old
        for name, values in (
            ("policy/approxkl_avg", 0.5 * gap.square()),
            ("policy/clipfrac_avg", policy.clipped),
            ("policy/logp_change", gap.abs()),
            ("val/clipfrac_avg", value.clipped),
            ("val/ratio", policy.ratios),
            ("val/ratio_square", policy.ratios.square()),
        ):
            metrics.add(name, (values * weights).sum(dtype=torch.float64), count)
        metrics.add("policy/entropy_avg", entropy, count)
        metrics.add("loss/policy_avg", policy_sum, count)
        metrics.add("loss/value_avg", value_sum, count)
        terms = [Term(policy_sum, "tokens"), Term(value_sum, "tokens", config.value_coefficient)]
        if config.entropy_coefficient:
            terms.append(Term(entropy, "tokens", -config.entropy_coefficient))
        return terms

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        if "val/ratio" in metrics:
            square = metrics.pop("val/ratio_square")
            metrics = {**metrics, "val/ratio_var": max(0.0, square - metrics["val/ratio"] ** 2)}
        if self.rollouts is None or self.rollouts.current is None:
            return metrics
        limit = self.config.target_kl
        stopped = self.rollouts.stopped or bool(
            limit and metrics.get("policy/approxkl_avg", 0.0) > limit
        )
        return {**metrics, **self.rollouts.current.metrics, "policy/stopped": float(stopped)}

    def check_first_step(self, metrics: dict[str, float]) -> None:
        if self.tolerance is None:
            return
        change = metrics.get("policy/logp_change", 0.0)
        if not change <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the one that made the rollout, but its log-probabilities differ by {change:.3g} "
                f"per token (at most {self.tolerance:g} is rounding): the model is not deterministic; look for dropout"
            )
        if self.maker is None or self.maker.reference is None:
            return
        kl = abs(metrics["objective/kl"]) / max(1.0, metrics["response_length/mean"])
        if self.config.reference == "live" and not kl <= self.tolerance:
            raise RuntimeError(
                f"at step 0 the policy is the reference, but their KL is {kl:.3g} per token (at most {self.tolerance:g} "
                "is rounding): the reference has other weights than the policy"
            )

    # ---------------------------------------------------------------- held-out prompts

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Answer the held-out prompts and return their mean score; eval/loss is its negative."""
        assert self.maker is not None
        total, squares, count, tokens, ended = 0.0, 0.0, 0, 0, 0
        for k in range(loader.steps_per_epoch):
            answers = self.maker.answer(HELD_OUT + k, loader.dataset, loader.indices(0, k))
            total += float(answers.scores.sum())
            squares += float(answers.scores.square().sum())
            count += len(answers)
            tokens += int((answers.lengths - answers.prompt_lengths).sum())
            ended += int(answers.ended.sum())
        return {
            "eval/loss": -total / count,
            "eval/objective/scores": total / count,
            "eval/objective/scores_std": max(0.0, squares / count - (total / count) ** 2) ** 0.5,
            "eval/response_length/mean": tokens / count,
            "eval/val/num_eos_tokens": float(ended),
        }

    # ---------------------------------------------------------------- state

    def save(self, folder: Path) -> None:
        """Write the KL controller and, in the middle of a rollout, the rollout itself, so that no part of it is lost."""
        if self.maker is None or self.rollouts is None:
            return
        rollout = self.rollouts.current
        state: dict[str, Any] = {"controller": self.maker.controller.state_dict(), "rollout": None}
        if rollout is not None and (self.step + 1) % self.rollouts.steps_per_rollout:
            state["rollout"] = {
                "number": rollout.number,
                "metrics": rollout.metrics,
                "stopped": self.rollouts.stopped,
            }
            rollout.save(folder / ROLLOUT)
        (folder / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; between two rollouts the next one is made with the restored weights."""
        assert self.maker is not None and self.rollouts is not None
        state = json.loads((folder / STATE).read_text())
        self.maker.controller.load_state_dict(state["controller"])
        saved = state["rollout"]
        self.rollouts.current = (
            None
            if saved is None
            else Rollout.load(folder / ROLLOUT, saved["number"], saved["metrics"])
        )
        self.rollouts.stopped = bool(saved and saved["stopped"])
