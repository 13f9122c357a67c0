"""PPO: a policy trained on its own answers with clipped losses (1707.06347), with a value model or without one.

    loss = mean_t max(-A rho, -A clip(rho))  +  value_coefficient * mean_t max((V - G)^2, (V_clip - G)^2) / 2
                                             +  kl_coefficient * mean_t KL (if it is not part of the reward)
                                             -  entropy_coefficient * mean_t H

ppo.advantage chooses how A is computed (ulysses.rl.advantages), ppo.ratio whether rho is that of a token or of its
answer. The means run over the answers' tokens of one optimizer step, with the weights that loss_aggregation gives them.
Steps read rollouts (ulysses.rl.rollout), and the losses their columns:

steps   | rollout 0: pass 0 (minibatch 0 .. m-1), pass 1 (...) | rollout 1: ... |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from losses.ppo import kl_estimate, ppo_policy_loss, ppo_value_loss
from ulysses.config.stage_sections import PpoSection, is_function
from ulysses.data.serve.dataset import Example, TokenizedDataset
from ulysses.data.serve.steps import StepLoader, shuffled
from ulysses.parallel.batch import ShardedBatch, pack_shard
from ulysses.parallel.sums import segment_sums
from ulysses.rl.advantages import OPPOSED
from ulysses.rl.rewards import Rewards
from ulysses.rl.rollout import SCORES, RolloutMaker, answer_metrics
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.samplers import build_sampler, check_sampling, unread_settings
from ulysses.rl.trajectory import Trajectory, episodes_of
from ulysses.stages.base import (
    AuxiliaryModel,
    Metrics,
    MetricSums,
    Normaliser,
    PlannedRollout,
    Requirements,
    RunParts,
    StepBatches,
    Term,
)
from ulysses.stages.referenced import REFERENCE_LOGPS, ReferencedStage

ROLLOUT_FILE = "rollout.safetensors"  # in a checkpoint
LOGP_CHANGE = "policy/logp_change"  # the metric: mean |log-probability now - in the rollout| per trained token
# evaluations draw with rollout numbers from here on, so that each has the same noise
EVALUATION = 1 << 40


def policy_options(ppo: PpoSection) -> dict[str, object]:
    """Return the arguments of `losses.ppo_policy_loss` that are settings of the [ppo] table."""
    bounds = {"clip_high": ppo.clip_high or None, "dual_clip": ppo.dual_clip or None}
    return {"clip": ppo.clip, "kind": ppo.policy_loss, **bounds}


class OverAnswers(torch.autograd.Function):
    """Return for every trained token the sum, or the mean, of the values [S] of its answer's trained tokens; else 0.

    An answer's tokens lie on several ranks, and each rank evaluates the losses of its own tokens: the adjoint is this
    same operation. All ranks of the group call it together, forward and backward.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, batch: ShardedBatch, mean: bool) -> Tensor:
        ctx.rest = batch, mean
        trained = batch.loss_weights != 0
        columns = torch.stack([values, trained], 1) * trained[:, None]
        sums, counts = segment_sums(columns, batch).T
        if mean:
            sums = sums / counts.clamp(min=1)
        by_sequence = torch.cat([sums, sums.new_zeros(1)])  # the last one is the tail's
        return by_sequence[batch.sequence_ids] * trained

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return OverAnswers.apply(gradient, *ctx.rest), None, None


@dataclass(eq=False)
class PpoStage(ReferencedStage):
    """Proximal policy optimisation; `model` is an engine around models.scored.PolicyValue, or CausalLM.

    `maker` makes the rollouts. The log-probabilities of a rollout and of the first step may differ by `tolerance`, too.
    """

    name, dataset_type = "ppo", "prompt"
    reference_words = ("live",)

    maker: RolloutMaker | None = None

    # ---------------------------------------------------------------- checks and requirements

    @property
    def unread(self) -> dict[str, tuple[str, ...]]:
        return unread_settings(self.table)

    def check(self) -> Iterator[str]:
        ppo = self.table
        functions = [*filter(is_function, ppo.reward)]
        if ppo.takes_rows and len(ppo.sampler) > 1:
            yield f'ppo.sampler is {ppo.sampler}; name servers, or "rows" alone'
        if not (ppo.takes_rows or ppo.reward or ppo.rollout) or "" in ppo.reward:
            yield "ppo.reward is missing; name a function as module:function, or a reward model's folder or hub id"
        if len(ppo.reward) - len(functions) > 1:
            yield (
                f"ppo.reward names several reward models ({', '.join(ppo.reward)}) but only one is computed; serve the "
                "others by http"
            )
        if ppo.compares_answers and ppo.answers_per_prompt < 2:
            yield (
                f'ppo.advantage = "{ppo.advantage}" compares the answers to a prompt but ppo.answers_per_prompt is 1; '
                "set it to at least 2 (commonly 8)"
            )
        requirements = self.requirements
        longest, prompts = requirements.longest_example, requirements.examples_per_load
        room = ppo.max_episode_tokens
        if prompts < ppo.minibatches:
            yield (
                f"ppo.minibatches is {ppo.minibatches} but a rollout has {prompts} prompts; lower it, or raise "
                f"batch.examples"
            )
        yield from check_sampling(self.config, longest)
        if 0 < room <= self.config.data.max_length:
            yield (
                f"ppo.max_episode_tokens is {room} but data.max_length (of a prompt) is {self.config.data.max_length}; "
                "raise it, or remove it"
            )
        try:
            ppo_policy_loss(*torch.zeros(3, 1), **policy_options(ppo))
        except ValueError as error:
            yield f"ppo: {error}"
        asks_servers = ppo.sampler and not ppo.takes_rows
        if asks_servers and ppo.importance_cap and (ppo.top_p < 1 or ppo.top_k):
            yield (
                "ppo.importance_cap needs the servers' probabilities among all tokens, but with ppo.top_p or ppo.top_k "
                "they are those among the tokens that are kept; leave ppo.importance_cap out, or top_p and top_k"
            )
        if ppo.rollouts_ahead and not ppo.importance_cap:
            yield (
                "ppo.rollouts_ahead trains on answers of earlier weights; set ppo.importance_cap (commonly 2), or "
                "ppo.rollouts_ahead = 0"
            )
        if ppo.kl_coefficient:
            yield from super().check()
            if (ppo.kl_in, ppo.kl_estimator) == ("loss", "k1"):
                yield (
                    'ppo.kl_in is "loss" but the gradient of ppo.kl_estimator = "k1" in a loss is zero on average; set '
                    'ppo.kl_estimator = "k3", or ppo.kl_in = "reward"'
                )

    @property
    def trained_type(self) -> str:
        return "trajectory" if self.table.takes_rows else ""

    def check_data(self, train: TokenizedDataset) -> Iterator[str]:
        if self.table.takes_rows:
            from ulysses.rl.rows import unfit_rows

            # a program's own loop may name a single row, for the plan alone
            groups = len({*train.columns["prompt_id"].tolist()}) if len(train) > 1 else 0
            yield from filter(None, [unfit_rows(groups, train.columns["given"], self.table)])

    def groups_of(self, data: TokenizedDataset) -> TokenizedDataset:
        if not self.table.takes_rows:
            return data
        from ulysses.rl.rows import TrajectoryGroups

        return TrajectoryGroups(data)

    @property
    def needs_reference(self) -> bool:
        return self.table.kl_coefficient > 0

    @property
    def requirements(self) -> Requirements:
        ppo, base = self.table, super().requirements
        prompts, answers = base.longest_example, ppo.answers_per_prompt
        models = base.models
        if ppo.reward_model:
            models += (AuxiliaryModel("reward", "ppo.reward", ppo.reward_model),)
        longest = ppo.max_episode_tokens or prompts + ppo.max_new_tokens
        longest = prompts if ppo.takes_rows else longest  # rows hold their answers already
        rollout = PlannedRollout(
            answers,
            batch=0 if ppo.sampler else ppo.planned_batch,
            prompt_tokens=prompts,
            new_tokens=longest - prompts,
            steps=ppo.steps_per_rollout,
        )
        return base._replace(
            longest_example=longest,
            examples_per_step=-(-self.config.batch.examples // ppo.minibatches) * answers,
            steps_per_load=ppo.steps_per_rollout,
            # every model reads a rollout once, and then `epochs` passes train on it
            extra_forwards=1 / ppo.epochs,
            # entropies take several more passes over the logits
            logit_bytes=base.logit_bytes + 32,
            value=ppo.needs_value,
            scopes={"policy": 1.0, "value": ppo.value_lr_factor} if ppo.needs_value else None,
            models=tuple(model._replace(passes=1 / ppo.epochs) for model in models),
            rollout=rollout,
        )

    def build(self, parts: RunParts) -> Self:
        ppo = self.table
        reward = None
        if functions := list(filter(is_function, ppo.reward)):
            reward = Rewards(
                functions, parts.tokenizer, ppo.reward_workers, ppo.reward_timeout, parts.renew
            )
            parts.resources.callback(reward.close)
        longest = self.requirements.longest_example
        sampler = build_sampler(self.config, parts, longest=longest)
        episodes = None
        if ppo.rollout:
            from ulysses.rl.episodes import EpisodeLoop

            episodes = EpisodeLoop(ppo, parts, longest)
            parts.resources.callback(episodes.close)
        stage = super().build(parts)
        maker = RolloutMaker(stage, parts, sampler, reward, episodes)
        parts.resources.callback(sampler.close)
        return replace(stage, maker=maker)

    def show_rollouts(self, show: Callable[[Rollout], None]) -> None:
        self.maker.show = show

    # ---------------------------------------------------------------- what the loop reads

    def read(self, source: StepLoader, step: int) -> StepBatches:
        trained = []
        for examples in self.micro_batches(source, step):
            packed = [sequence for example in examples for sequence in example.sequences]
            trained.append(pack_shard(packed, self.mesh, self.model.device))
        return StepBatches(trained)

    def micro_batches(self, source: StepLoader, step: int) -> list[list[Example]]:
        """Return the examples of a step's micro-batches; its rollout is made first, unless it is the current one."""
        maker, per_rollout = self.maker, self.table.steps_per_rollout
        number = step // per_rollout
        if maker.rollout is None or maker.rollout.number != number:
            is_last = (number + 1) * per_rollout >= self.total_steps(source)
            ahead = self.table.rollouts_ahead and not is_last
            following = source.indices_at(number + 1) if ahead else None
            maker.rollout = maker.make(
                number, source.dataset, source.indices_at(number), following
            )
        # examples of a checkpoint's rollout may be longer than these micro-batches, which then are as long as they are
        return source.micro_batches(maker.rollout, self.rollout_examples(source, step))

    def rollout_examples(self, source: StepLoader, step: int) -> list[int]:
        """Return the examples of a step of the current rollout; every pass takes its groups in a new order."""
        rollout, ppo = self.maker.rollout, self.table
        pass_number, minibatch = divmod(step % ppo.steps_per_rollout, ppo.minibatches)
        groups = int(rollout.groups[-1]) + 1
        order = shuffled(groups, source.seed, rollout.number, pass_number)
        return rollout.examples(np.array_split(order, ppo.minibatches)[minibatch].tolist())

    def trained_examples(self, source: StepLoader, step: int) -> str:
        numbers = self.rollout_examples(source, step)[:8]
        return f"examples {numbers} ... of rollout {self.maker.rollout.number}"

    # ---------------------------------------------------------------- the loss

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        most = self.table.max_episode_tokens or self.table.max_new_tokens
        per_answer = {"sequence": 1, "constant": most}
        if count := per_answer.get(self.table.loss_aggregation):
            return {"tokens": self.on_first_rank(batch.num_sequences * count)}
        return super().normalisers(batch)

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        ppo, weights = self.table, batch.loss_weights
        columns = batch.token_columns
        old, advantages = columns["old_logps"], columns["advantages"]
        out = self.model(batch, entropy=True, temperature=ppo.temperature)
        logps, gap = out.logps, out.logps.detach() - old
        if ppo.ratio != "token":
            logps = old + OverAnswers.apply(logps - old, batch, ppo.ratio == "mean")
        policy = ppo_policy_loss(logps, old, advantages, **policy_options(ppo))
        importance = columns["importance"] if ppo.importance_cap else 1.0
        policy_losses = policy.losses * importance
        if OPPOSED in columns:
            opposed = ppo_policy_loss(logps, old, columns[OPPOSED], **policy_options(ppo))
            policy_losses = policy_losses + opposed.losses * importance
        means = {
            "policy/approxkl_avg": 0.5 * gap.square(),
            "policy/clipfrac_avg": policy.clipped,
            LOGP_CHANGE: gap.abs(),
            "val/ratio": policy.ratios,
            "policy/entropy_avg": out.entropy,
            "loss/policy_avg": policy_losses,
        }
        trained = [(policy_losses, 1.0)]
        if ppo.needs_value:
            value = ppo_value_loss(
                out.values, columns["old_values"], columns["returns"], ppo.value_clip
            )
            means |= {"val/clipfrac_avg": value.clipped, "loss/value_avg": value.losses}
            trained.append((value.losses, ppo.value_coefficient))
        if ppo.kl_in != "reward" and ppo.kl_coefficient:
            kl = kl_estimate(out.logps, columns[REFERENCE_LOGPS], ppo.kl_estimator)
            if ppo.kl_in == "loss_with_ratio":
                kl = kl * (logps - old).exp()
            means["loss/kl_avg"] = kl
            trained.append((kl, ppo.kl_coefficient))
        if ppo.entropy_coefficient:
            trained.append((out.entropy, -ppo.entropy_coefficient))
        # the parts of the loss have its weights, and in all else each token counts once
        counts = columns.get("counts", weights)
        for name, values in means.items():
            each = weights if name.startswith("loss/") else counts
            total = (values.detach() * each).sum(dtype=torch.float64)
            metrics.add(name, total, each.sum(dtype=torch.float64))
        return [Term((losses * weights).sum(), "tokens", factor) for losses, factor in trained]

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        return {**metrics, **self.maker.rollout.metrics}

    def check_first_step(self, metrics: Metrics) -> None:
        super().check_first_step(metrics)
        # a step may train nothing: all of its answers were cut
        change = metrics.get(LOGP_CHANGE, 0.0)
        if not change <= self.tolerance:
            raise RuntimeError(
                "at step 0 the policy is the one that made the rollout, but its log-probabilities differ "
                f"by {change:.3g} per token (at most {self.tolerance:g} is rounding): the model is not deterministic; "
                "look for dropout"
            )

    # ---------------------------------------------------------------- held-out prompts

    def evaluate(self, source: StepLoader) -> Metrics:
        """Answer the held-out prompts and return the metrics of their answers; the loss is minus the mean score."""
        maker = self.maker
        maker.synchronise()
        all_answers: list[list[Trajectory]] = []
        of_sets: Metrics = {}
        numbers = count(EVALUATION)
        for name, loader in source.sets().items():
            answers: list[list[Trajectory]] = []
            for k in range(loader.steps_per_epoch):
                prompts = loader.indices(0, k)
                maker.parts.phase("sampling")
                number = next(numbers)
                local = maker.draw(number, loader.dataset, prompts)
                if made := maker.scored(number, loader.dataset, local, len(prompts)):
                    answers += episodes_of(made.trajectories)
            all_answers += answers
            if name:
                of_sets |= {f"{name}/{key}": x for key, x in _scores(answers).items()}
        return _scores(all_answers) | of_sets

    # ---------------------------------------------------------------- state

    def save(self, folder: Path) -> None:
        """Write the current rollout, whose steps may not all be done."""
        self.maker.rollout.save(folder / ROLLOUT_FILE)

    def load(self, folder: Path) -> None:
        """Restore the rollout; the next one is made with the restored weights."""
        # a run may continue another stage's checkpoint (run.resume_anyway)
        if (file := folder / ROLLOUT_FILE).exists():
            self.maker.rollout = Rollout.load(file)


def _scores(answers: list[list[Trajectory]]) -> Metrics:
    if not answers:  # no episode had a turn, which has been said
        return {}
    metrics = {name: float(x) for name, x in answer_metrics(answers).items()}
    return {"loss": -metrics[SCORES], **metrics}
