"""PPO: a policy trained on its own answers with clipped losses (1707.06347), with a value model or without one.

    loss = mean_t max(-A rho, -A clip(rho))  +  value_coefficient * mean_t max((V - G)^2, (V_clip - G)^2) / 2
                                             +  kl_coefficient * mean_t KL (if it is not part of the reward)
                                             -  entropy_coefficient * mean_t H

ppo.advantage chooses how A is computed (ulysses.rl.advantages), ppo.ratio whether rho is that of a token or of its
answer. The means run over the answers' tokens of one optimizer step, with the weights that loss_aggregation gives them.
Rollouts (ulysses.rl.rollout) come through the loader; the stage sees their columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from losses.ppo import kl_estimate, ppo_policy_loss, ppo_value_loss
from ulysses.config.stage_sections import PpoSection, is_function
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.sums import segment_sums
from ulysses.rl.advantages import ADVANTAGES
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.rewards import Rewards
from ulysses.rl.rollout import SCORES, Rollout, RolloutMaker, RolloutSteps, answer_metrics
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.stages.base import (
    AuxiliaryModel,
    Metrics,
    MetricSums,
    Normaliser,
    PlannedRollout,
    Requirements,
    Run,
    Term,
)
from ulysses.stages.referenced import COLUMN, ReferencedStage

ROLLOUT = "rollout.safetensors"
CHANGE = "policy/logp_change"  # the metric: mean |log-probability - what the rollout holds| per trained token
HELD_OUT = 1 << 40  # evaluations draw with rollout numbers from here on: always the same noise


def policy_options(config: PpoSection) -> dict[str, object]:
    """Return the arguments that the [ppo] table fixes in `losses.ppo_policy_loss`."""
    bounds = {name: getattr(config, name) or None for name in ("clip_high", "dual_clip")}
    return {"clip": config.clip, "kind": config.policy_loss, **bounds}


class OverAnswers(torch.autograd.Function):
    """Give every trained token of values [S] the sum over its answer, or the mean; zeros elsewhere.

    An answer's tokens lie on several ranks, each of which evaluates its own tokens' losses: the adjoint is this same
    operation. All ranks of the group call it together, forward and backward.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, batch: ShardedBatch, mean: bool) -> Tensor:
        ctx.rest, trained = (batch, mean), batch.loss_weights != 0
        sums, counts = segment_sums(
            torch.stack([values, trained], 1) * trained[:, None], batch
        ).T
        if mean:
            sums = sums / counts.clamp(min=1)
        own = torch.cat([sums, sums.new_zeros(1)])  # the last one is the tail's
        return own[batch.sequence_ids] * trained

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return OverAnswers.apply(gradient, *ctx.rest), None, None


@dataclass(eq=False)
class PpoStage(ReferencedStage):
    """Proximal policy optimisation; `model` is an engine around models.scored.PolicyValue, or CausalLM.

    Args:
        maker: makes the rollouts.
        tolerance: largest mean |log-probability difference| per token allowed at step 0.
    """

    name, dataset_type = "ppo", "prompt"
    reference_words = ("live",)

    maker: RolloutMaker | None = None

    # ---------------------------------------------------------------- checks and facts

    def check(self) -> Iterator[str]:
        ppo, budget = self.table, self.config.batch.tokens_per_microbatch
        functions = [*filter(is_function, ppo.reward)]
        if not ppo.reward or "" in ppo.reward:
            yield "ppo.reward is missing; name a function as module:function, or a reward model's folder or hub id"
        if len(ppo.reward) - len(functions) > 1:
            yield (
                f"ppo.reward names several reward models ({', '.join(ppo.reward)}) but only one is computed; serve the "
                "others by http"
            )
        if ADVANTAGES[ppo.advantage].needs_group and ppo.answers_per_prompt < 2:
            yield (
                f'ppo.advantage = "{ppo.advantage}" compares the answers to a prompt but ppo.answers_per_prompt is 1; '
                "set it to at least 2 (commonly 8)"
            )
        requirements = self.requirements
        longest, prompts = requirements.longest_example, requirements.examples_per_load
        if prompts < ppo.minibatches:
            yield (
                f"ppo.minibatches is {ppo.minibatches} but a rollout has {prompts} prompts; lower it, or raise "
                f"batch.examples"
            )
        if budget != "auto" and budget < longest:
            yield (
                f"batch.tokens_per_microbatch is {budget} but data.max_length (prompts) + ppo.max_new_tokens is "
                f"{longest}; raise it to at least {longest}, or lower one of them"
            )
        try:
            ppo_policy_loss(*torch.zeros(3, 1), **policy_options(ppo))
        except ValueError as error:
            yield f"ppo: {error}"
        if ppo.kl_coefficient:
            yield from super().check()

    @property
    def needs_reference(self) -> bool:
        return self.table.kl_coefficient > 0

    @property
    def requirements(self) -> Requirements:
        ppo, base = self.table, super().requirements
        prompts, answers = base.longest_example, ppo.answers_per_prompt
        needs_value = ADVANTAGES[ppo.advantage].needs_value
        models = base.models
        if ppo.reward_model:
            models += (AuxiliaryModel("reward", "ppo.reward", ppo.reward_model),)
        sampled = PlannedRollout(
            answers,
            0 if ppo.sampler else ppo.planned_batch,
            prompts,
            ppo.max_new_tokens,
            ppo.epochs * ppo.minibatches,
            merged=self.config.model.lora.rank > 0,
        )
        return base._replace(
            longest_example=prompts + ppo.max_new_tokens,
            examples_per_step=-(-self.config.batch.examples // ppo.minibatches) * answers,
            steps_per_load=ppo.epochs * ppo.minibatches,
            # every model reads a rollout once, which is trained on `epochs` times
            extra_forwards=1 / ppo.epochs,
            # entropies take several passes over the logits more
            logit_bytes=base.logit_bytes + 32,
            value=needs_value,
            scopes={"policy": 1.0, "value": ppo.value_lr_factor} if needs_value else None,
            models=tuple(model._replace(passes=1 / ppo.epochs) for model in models),
            rollout=sampled,
        )

    def arguments(self, run: Run) -> dict[str, object]:
        found = super().arguments(run)
        ppo, memory = self.table, run.memory
        reward, scorer = None, found.pop("reward", None)
        if functions := list(filter(is_function, ppo.reward)):
            reward = Rewards(
                functions,
                run.inputs.tokenizer,
                ppo.reward_workers,
                ppo.reward_timeout,
                run.watch.renew,
            )
            run.resources.callback(reward.close)
        options = SamplingOptions(
            ppo.max_new_tokens,
            ppo.temperature,
            ppo.top_p,
            ppo.top_k,
            run.inputs.shape.eos_token_id,
            self.config.run.seed,
            ppo.planned_batch,
        )
        found["maker"] = RolloutMaker(
            engine=run.engine,
            mesh=run.mesh,
            config=ppo,
            sampler=(OutsideSampler if ppo.sampler else EngineSampler).of(
                run, self.config, options
            ),
            tokens_per_microbatch=memory.tokens_per_microbatch,
            share_prompts=self.config.batch.share_prompts and not memory.graphs,
            reference=found.get("reference"),
            reward=reward,
            scorer=scorer,
            phase=run.watch.phase,
            show=run.show,
        )
        return found

    # ---------------------------------------------------------------- what the loop reads

    def loader(self, data: StepLoader) -> RolloutSteps:
        return RolloutSteps(self.maker, data)

    def may_prepare(self, step: int) -> bool:
        """A rollout needs the weights of its moment."""
        return step % self.requirements.steps_per_load != 0

    # ---------------------------------------------------------------- the loss

    def normalisers(self, batch: ShardedBatch) -> dict[Normaliser, Tensor | float]:
        per_answer = {"sequence": 1, "constant": self.table.max_new_tokens}
        if count := per_answer.get(self.table.loss_aggregation):
            return {"tokens": self.on_first_rank(batch.num_sequences * count)}
        return super().normalisers(batch)

    def losses(self, batch: ShardedBatch, metrics: MetricSums) -> list[Term]:
        config, weights = self.table, batch.loss_weights
        columns = batch.token_columns
        old, advantages = columns["old_logps"], columns["advantages"]
        out = self.model(batch, entropy=True, temperature=config.temperature)
        logps, gap = out.logps, out.logps.detach() - old
        if config.ratio != "token":
            logps = old + OverAnswers.apply(logps - old, batch, config.ratio == "mean")
        policy = ppo_policy_loss(logps, old, advantages, **policy_options(config))
        importance = columns["importance"] if config.importance_cap else 1.0
        policy_losses = policy.losses * importance
        means = {
            "policy/approxkl_avg": 0.5 * gap.square(),
            "policy/clipfrac_avg": policy.clipped,
            CHANGE: gap.abs(),
            "val/ratio": policy.ratios,
            "policy/entropy_avg": out.entropy,
            "loss/policy_avg": policy_losses,
        }
        trained = [(policy_losses, 1.0)]
        if ADVANTAGES[config.advantage].needs_value:
            value = ppo_value_loss(
                out.values, columns["old_values"], columns["returns"], config.value_clip
            )
            means |= {"val/clipfrac_avg": value.clipped, "loss/value_avg": value.losses}
            trained.append((value.losses, config.value_coefficient))
        if config.kl_in != "reward" and config.kl_coefficient:
            kl = kl_estimate(out.logps, columns[COLUMN], config.kl_estimator)
            if config.kl_in == "loss_with_ratio":
                kl = kl * (logps - old).exp()
            means["loss/kl_avg"] = kl
            trained.append((kl, config.kl_coefficient))
        if config.entropy_coefficient:
            trained.append((out.entropy, -config.entropy_coefficient))
        count = weights.sum(dtype=torch.float64)
        for name, values in means.items():
            metrics.add(name, (values.detach() * weights).sum(dtype=torch.float64), count)
        return [Term((losses * weights).sum(), "tokens", factor) for losses, factor in trained]

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        return {**metrics, **self.maker.rollout.metrics}

    def check_first_step(self, metrics: Metrics) -> None:
        super().check_first_step(metrics)
        # a step may train nothing: all of its answers were cut
        change, allowed = metrics.get(CHANGE, 0.0), self.tolerance
        if not change <= allowed:
            raise RuntimeError(
                f"at step 0 the policy is the one that made the rollout, but its log-probabilities differ by "
                f"{change:.3g} per token (at most {allowed:g} is rounding): the model is not deterministic; look for "
                "dropout"
            )

    # ---------------------------------------------------------------- held-out prompts

    def evaluate(self, source: StepLoader) -> Metrics:
        """Answer the held-out prompts and return the mean of their scores; the loss is its negative."""
        self.maker.sampler.synchronise()
        everything: list[Completion] = []
        numbers, found = count(HELD_OUT), {}
        for name, own in source.sets().items():
            answers: list[Completion] = []
            for k in range(own.steps_per_epoch):
                asked = own.dataset, own.indices(0, k)
                answers += self.maker.answer(next(numbers), *asked).answers
            everything += answers
            if name:
                found |= {f"{name}/{key}": x for key, x in _scores(answers).items()}
        return _scores(everything) | found

    # ---------------------------------------------------------------- state

    def save(self, folder: Path) -> None:
        """Write the last rollout, of which steps may be left."""
        self.maker.rollout.save(folder / ROLLOUT)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the next rollout is made with the restored weights."""
        self.maker.rollout = Rollout.load(folder / ROLLOUT)


def _scores(answers: list[Completion]) -> Metrics:
    metrics = {name: float(x) for name, x in answer_metrics(answers).items()}
    return {"loss": -metrics[SCORES], **metrics}
