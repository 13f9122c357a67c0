"""Distillation on the student's own answers (GKD's lambda, arXiv 2306.13649).

    rows of a step     [ p p p a a ]   [ p p a a a ]   [ p p p ]        of which distill.on_policy are drawn
                             |               |             |
    what is trained    [ p p p a a ]   [ p p s s ]     [ p p p s s s ]  s: sampled with the weights of this step

Of a conversation the last answer is sampled, and nothing else of it is trained.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Self

import numpy as np
import torch

from ulysses.config.stage_sections import NOT_OF_SAMPLING
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import Sequence
from ulysses.parallel.random_keys import keyed_generator
from ulysses.rl.engine_sampler import AnySampler
from ulysses.rl.samplers import build_sampler, check_sampling, unread_settings
from ulysses.stages.base import Metrics, PlannedRollout, Requirements, RunParts, StepBatches
from ulysses.stages.distill import DistillStage
from ulysses.stages.passes import packed_batches


@dataclass(eq=False)
class OnPolicyStage(DistillStage):
    """Learning from a teacher on rows some of which the student answers itself in every step.

    Args:
        sampler: decodes this rank's answers with the current weights, in this process or on servers.
        sampling: metrics of the answers of the current step, the same on every rank but for times.
    """

    sampler: AnySampler | None = None
    sampling: Metrics = field(default_factory=dict)

    @property
    def unread(self) -> dict[str, tuple[str, ...]]:
        others = "stage 'distill' reads only the settings of sampling of ppo; remove these"
        return {others: NOT_OF_SAMPLING} | unread_settings(self.config.ppo)

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.config.ppo.takes_rows:
            yield 'ppo.sampler is "rows" but the student samples (distill.on_policy); name servers, or leave it out'
        if self.config.data.train_on == "all" and self.table.on_policy < 1:
            yield (
                'data.train_on is "all" but the student samples last answers (distill.on_policy), which it does not '
                'tell apart; set it to "assistant"'
            )
        if self.table.nll_weight:
            yield (
                f"distill.nll_weight is {self.table.nll_weight:g} but answers that the student samples "
                "(distill.on_policy) are no examples to follow; set one of them to 0"
            )
        yield from check_sampling(self.config, self.requirements.longest_example)

    @property
    def requirements(self) -> Requirements:
        base, ppo = super().requirements, self.config.ppo
        rollout = PlannedRollout(
            answers=1,
            batch=0 if ppo.sampler else ppo.planned_batch,
            prompt_tokens=base.longest_example,
            new_tokens=ppo.max_new_tokens,
        )
        longest = base.longest_example + ppo.max_new_tokens
        return base._replace(longest_example=longest, rollout=rollout)

    @property
    def trained_type(self) -> str:
        return "prompt" if self.table.on_policy == 1 else ""

    def build(self, parts: RunParts) -> Self:
        longest = self.requirements.longest_example
        sampler = build_sampler(self.config, parts, longest=longest)
        return replace(super().build(parts), sampler=sampler)

    def read(self, source: StepLoader, step: int) -> StepBatches:
        """Return what a step reads, after the student has answered some of its rows; held-out rows keep their answers.

        Each row is drawn with the probability distill.on_policy, by a number that depends on seed, step and place
        alone. What is sampled depends on the weights, too, so that a resumed run repeats both.
        """
        if not torch.is_grad_enabled():
            return super().read(source, step)
        began, dataset = time.perf_counter(), source.dataset
        indices = source.indices_at(step)
        rows = [list(dataset[i].sequences) for i in indices]
        lengths = dataset.lengths[indices].tolist()
        key = keyed_generator("cpu", source.seed, "on policy", step)
        drawn = torch.rand(len(rows), generator=key) < self.table.on_policy
        prompts = {n: prompt_of(rows[n][0]) for n in np.flatnonzero(drawn).tolist()}
        self.sampling = {"on_policy/rows": len(prompts) / len(rows)}
        if prompts:
            self.sampler.synchronise(step)
            answers = self.sampler.sample_together(prompts, step)
            for n, answer in answers.items():
                # the weights of its answer in the data, if it has one
                own = rows[n][0].loss_weights[len(prompts[n]) :].tolist()
                rows[n] = [answer.after(prompts[n], *own[:1])]
                lengths[n] = len(rows[n][0].tokens)
            self.sampling |= {
                "response_length/mean": mean(len(a.tokens) for a in answers.values()),
                "response_length/clip_ratio": mean(not a.ended for a in answers.values()),
                "sampler/nll": -mean(logp for a in answers.values() for logp in a.logps),
                "time/sampling": time.perf_counter() - began,
            }
        packed = packed_batches(
            lengths,
            lambda numbers: [sequence for n in numbers for sequence in rows[n]],
            self.mesh,
            self.model.device,
            source.tokens_per_microbatch,
        )
        return StepBatches([batch for _, batch in packed])

    def finalise_metrics(self, metrics: Metrics) -> Metrics:
        if "tokens" not in metrics:  # of held-out rows
            return metrics
        return metrics | self.sampling


def prompt_of(last_turn: Sequence) -> list[int]:
    """Return the tokens before a sequence's last answer; all of them if it has none."""
    trained = np.sign(last_turn.loss_weights[1:])  # nothing predicts the first token
    begins = np.flatnonzero(np.diff(trained, prepend=0) > 0) + 1
    return last_turn.tokens[: max(begins, default=None)].tolist()
