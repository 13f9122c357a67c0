"""PPO's data: prompts -> answers of the current policy -> rewards and advantages, the same on every rank.

    step r of the prompts, dealt to all ranks
      -> every rank decodes its share       the weights are gathered once, and no rank waits for another
      -> all ranks get all answers          so that packing does not depend on which rank decoded what
      -> one packed pass of each model      log-probabilities and values of the policy, the reference's, reward scores
      -> rewards and advantages             of GAE with its returns, or of each answer among the others to its prompt

    answers to prompt 0          to prompt 1
    [ p p p a a ]                [ p a a t a a ]    the trajectories of a group lie one after the other; those that fit
          [ p a a a ]            [ p a ]            into a micro-batch together form one example: what one has in
          [ p a ]                      [ t a a ]    common with the one before it, a prompt or more, is computed once

All columns are in prediction coordinates: row i of a sequence belongs to the prediction of its token i + 1.
Letters: N trajectories, T tokens that are held of them, A tokens that they have drawn, each counted in every one of
them.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.ppo import MAX_LOG_RATIO, kl_estimate, token_rewards
from ulysses.config.section import LARGEST, UserCodeError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import gather
from ulysses.rl.advantages import OPPOSED, advantages_of
from ulysses.rl.engine_sampler import AnySampler
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.servers import in_thread
from ulysses.rl.trajectory import Trajectory, episodes_of
from ulysses.stages.base import RunParts
from ulysses.stages.passes import token_values
from ulysses.stages.referenced import REFERENCE_GAP, REFERENCE_LOGPS, ReferencedStage

SCORES = "objective/scores"  # the metric that an evaluation is judged by


def answer_metrics(episodes: list[list[Trajectory]]) -> dict[str, Tensor]:
    """Return the metrics of answers, with the mean score by each reward, in training and in evaluation.

    Args:
        episodes: their branches, of which an answer has one. There are more metrics where episodes have several turns.
    """
    rows, by_name = [], defaultdict[str, list[float]](list)
    for branches in episodes:
        last, masks = branches[-1], [one.sampled for one in branches]
        turns = sum(is_said for mask in masks for is_said, _ in groupby(mask))
        longest = max(len(one.whole) for one in branches)
        rows.append((sum(chain(*masks)), last.score, last.ended, turns, len(masks), longest))
        for name, score in last.scores.items():
            by_name[name].append(score)
    table = torch.tensor(rows, dtype=torch.float64)
    drawn, scores, ended, turn_counts, branch_counts, lengths = table.T
    metrics = {
        SCORES: scores.mean(),
        f"{SCORES}_std": scores.std(correction=0),
        "val/num_eos_tokens": ended.sum(),
        "response_length/mean": drawn.mean(),
        "response_length/clip_ratio": 1 - ended.mean(),
    }
    for name, each in by_name.items():
        metrics[f"{SCORES}/{name}"] = torch.tensor(each, dtype=torch.float64).mean()
    if turn_counts.sum() > len(rows):
        metrics["episode/turns"] = turn_counts.mean()
        metrics["episode/branches"] = branch_counts.mean()
        metrics["episode/length"] = lengths.mean()
    return metrics


@dataclass(eq=False)
class RolloutMaker:
    """Make rollouts with the current weights; all ranks call every method together.

    Args:
        stage: trains models.scored.PolicyValue, or CausalLM without a value.
        parts: of the run.
        sampler: decodes this rank's answers with the current weights, in this process or on servers.
        reward: scores answers by functions and servers (ulysses.rl.rewards.Rewards); None if there are none.
        episodes: runs episodes of rows (an EpisodeLoop); None if prompts are answered.
        show: is called with every finished rollout.
        rollout: the current one, whose steps are being trained.

    Attributes:
        ahead: this rank's part of the next rollout, which servers answer while the current one is trained.
        collected: when the last rollout's answers had come.
        calls: how often a program has sampled after a step (ulysses/run/own_loop.py).
    """

    stage: ReferencedStage
    parts: RunParts
    sampler: AnySampler
    reward: Callable[..., None] | None = None
    episodes: Any = None
    show: Callable[[Rollout], None] = lambda rollout: None
    rollout: Rollout | None = None
    ahead: Future[list[Trajectory]] | None = None
    collected: float | None = None
    calls: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ppo, self.mesh = self.stage.table, self.stage.mesh

    # ---------------------------------------------------------------- answers

    def make(
        self,
        number: int,
        dataset: TokenizedDataset,
        indices: list[int],
        following: list[int] | None = None,
    ) -> Rollout:
        """Answer the prompts `indices`, or take their rows, and turn scores into advantages.

        Args:
            following: the prompts of the next rollout. Servers begin to answer them, with the weights of now.
        """
        if self.ppo.takes_rows:
            rows: Any = dataset  # rows.py
            stop_tokens = self.sampler.options.stop_tokens
            return self.made_of(number, rows.trajectories(indices, stop_tokens))
        began, K = time.perf_counter(), self.ppo.answers_per_prompt
        self.parts.phase("sampling")
        is_new = self.ahead is None
        if is_new:
            self.synchronise(number)
            local = self.draw(number, dataset, indices, K)
        else:
            local, self.ahead = self.ahead.result(), None
        came = time.perf_counter()
        if following:
            if not is_new:  # else the weights are still the same
                self.synchronise(number + 1)
            self.ahead = in_thread(self.draw, number + 1, dataset, following, K)
        rollout = self.scored(number, dataset, local, K * len(indices))
        if not rollout:
            raise UserCodeError(
                f"no episode of rollout {number} has a turn to train on; raise ppo.max_episode_tokens, remove rows "
                "that are too long, or give the model more time"
            )
        sampled = time.perf_counter()
        self.complete(rollout)
        rollout.metrics |= {
            "time/waiting": (came - began) / (came - (self.collected or began)),
            "time/sampling": sampled - began,
            "time/rollout": time.perf_counter() - began,
        }
        self.collected = came
        if is_new:  # what was answered ahead has earlier weights
            self.sampler.check_gap(rollout.metrics["sampler/logp_gap"])
        return rollout

    def synchronise(self, rollout: int = 0) -> None:
        """Bring the sampler the current weights, when the answers that are being drawn have come to all ranks."""
        if self.ahead:
            wait([self.ahead])
        gather(None)  # rank 0 may pause the servers of the others
        self.sampler.synchronise(rollout)

    def draw(
        self, number: int, dataset: TokenizedDataset, indices: list[int], each: int = 1
    ) -> list[Trajectory]:
        """Return this rank's share of `each` answers to a prompt; token t of answer n has the key (seed, number, n, t).

        With servers it calls no collective, so that a thread may do it.
        """
        local_groups = range(self.mesh.rank, len(indices), self.mesh.world_size)
        rows = {g * each + k: indices[g] for g in local_groups for k in range(each)}
        if self.episodes is not None:
            given = {n: (row, dataset.row(row)) for n, row in rows.items()}
            drawn = self.episodes.draw(given, self.sampler, number)
        else:
            prompts = {
                row: dataset[row].sequences[0].tokens.tolist() for row in {*rows.values()}
            }
            answers = self.sampler.sample({n: prompts[row] for n, row in rows.items()}, number)
            drawn = [
                Trajectory(
                    prompts[rows[n]],
                    answer.tokens,
                    answer.logps,
                    [True] * len(answer.tokens),
                    answer.ended,
                    episode=n,
                    row=rows[n],
                )
                for n, answer in answers.items()
            ]
        for one in drawn:
            one.group = one.episode // each
        return drawn

    def scored(
        self, number: int, dataset: TokenizedDataset, local: list[Trajectory], asked: int = 0
    ) -> Rollout | None:
        """Score this rank's answers, and lay out those of all ranks, or return None if none has come.

        Args:
            asked: how many answers or episodes were wanted of all ranks; of those that have no turn a line tells.
        """
        self.parts.phase("reward")
        # the last branch stands for an episode, whose function may have scored it
        lasts = [last for *_, last in episodes_of(local) if not last.scores]
        if self.reward is not None:
            self.reward(lasts, dataset.row)
        self.parts.phase("rollout")
        trajectories = sorted(chain(*gather(local)), key=lambda one: one.episode)
        episodes = episodes_of(trajectories)
        if (lost := asked - len(episodes)) > 0:
            self.parts.say(
                f"dropped {lost} of {asked} episodes without a turn: a first prompt left no room for one in "
                "ppo.max_episode_tokens, or the function gave up on its calls of the model"
            )
        if not trajectories:
            return None
        rollout = self.laid_out(number, trajectories)
        if scorer := self.parts.frozen.get("reward"):
            with scorer.inference():
                values = self._values(rollout, scorer)
            scores_by_model = values[rollout.ends - 1].tolist()
            for one, score in zip(rollout.trajectories, scores_by_model, strict=True):
                if self.ppo.rollout not in one.scores:
                    one.scores[self.ppo.reward_model] = score
        factors = {**self.ppo.reward, self.ppo.rollout: 1.0}
        for branches in episodes:
            scores = branches[-1].scores
            score = sum(factors[name] * x for name, x in scores.items())
            if not abs(score) <= LARGEST:
                raise FloatingPointError(
                    f"the weighted sum of the rewards {scores} is {score}, which is beyond 2^53 or no number; lower "
                    "the weights in ppo.reward, or train another reward model"
                )
            for one in branches:
                one.score, one.scores = score, scores
        return rollout

    def made_of(self, number: int, trajectories: list[Trajectory]) -> Rollout:
        """Make a rollout of trajectories that were drawn and scored elsewhere, all of which every rank has."""
        self.parts.phase("rollout")
        began, rollout = time.perf_counter(), self.laid_out(number, trajectories)
        self.complete(rollout)
        rollout.metrics["time/rollout"] = time.perf_counter() - began
        return rollout

    def laid_out(self, number: int, trajectories: list[Trajectory]) -> Rollout:
        parts = self.parts
        return Rollout.of(
            number,
            trajectories,
            tokens_per_microbatch=parts.tokens_per_microbatch if parts.share_prompts else 0,
            by_length=self.ppo.loss_aggregation == "sequence",
            share_drawn=self.ppo.ratio == "token" and not self.ppo.needs_value,
        )

    def complete(self, rollout: Rollout) -> None:
        """Give a rollout whose trajectories are scored all that training needs, and show it."""
        self.finish(rollout, *self._values(rollout, self._policy_and_reference, 3).unbind(-1))
        self.show(rollout)

    # ---------------------------------------------------------------- passes without gradient

    def _policy_and_reference(self, batch: ShardedBatch) -> Tensor:
        """Return the policy's log-probabilities and values and the reference's log-probabilities, [S, 3]."""
        temperature = self.ppo.temperature
        model, reference = self.stage.model, self.stage.reference
        with model.inference():
            out = model(batch, temperature=temperature)
        values = out.values if self.ppo.needs_value else torch.zeros_like(out.logps)
        base = reference(batch, temperature=temperature) if reference else out.logps
        return torch.stack([out.logps, values, base], dim=-1)

    def _values(
        self, rollout: Rollout, compute: Callable[[ShardedBatch], Tensor], *columns: int
    ) -> Tensor:
        """Return the values that `compute` returns for a batch, of all tokens of the rollout, [T, *columns]."""
        examples = np.unique(rollout.example_ids).tolist()
        return token_values(
            compute,
            rollout.sequence_lengths[examples].sum(axis=1).tolist(),
            lambda i: rollout[examples[i]].sequences,
            self.parts,
            *columns,
        )

    # ---------------------------------------------------------------- rewards and advantages

    def finish(self, rollout: Rollout, old: Tensor, values: Tensor, reference: Tensor) -> None:
        """Give the rollout its columns and metrics, the same on every rank.

        Args:
            old, values, reference: the policy's log-probabilities and values (zeros without a value model) and the
                reference's log-probabilities at all tokens, [T].
        """
        ppo, at = self.ppo, rollout.predicted_at
        old, values, reference = (x[at].double() for x in (old, values, reference))
        rows = [(sum(one.sampled), one.score, one.ended) for one in rollout.trajectories]
        lengths, scores, ended = torch.tensor(rows, dtype=torch.float64).T
        cu_seqlens = F.pad(lengths.long().cumsum(0), (1, 0))
        kept = (ended.bool() | (not ppo.mask_truncated)).repeat_interleave(lengths.long())
        kl = kl_estimate(old, reference, ppo.kl_estimator) * kept
        kl_coefficient = ppo.kl_coefficient if ppo.kl_in == "reward" else 0.0
        rewards = token_rewards(
            kl,
            scores,
            cu_seqlens[1:] - 1,
            kl_coefficient,
            missing_eos_penalty=ppo.missing_eos_penalty,
            has_eos=ended,
        )
        columns, of_advantages = advantages_of(
            rewards, values, cu_seqlens, rollout.trajectories, ppo
        )
        if rollout.trajectories[0].advantages:  # then all have them
            given = [np.array(one.advantages)[one.sampled] for one in rollout.trajectories]
            columns["advantages"] = torch.from_numpy(np.concatenate(given)).double()
            of_advantages = {}  # which are of the rewards
        columns["old_logps"] = old
        if ppo.kl_in != "reward":
            columns[REFERENCE_LOGPS] = reference
        sampled = [np.array(one.logps)[one.sampled] for one in rollout.trajectories]
        gap = old - np.concatenate(sampled)
        N = len(rollout.trajectories)
        metrics = {
            **answer_metrics(episodes_of(rollout.trajectories)),
            "rollout": rollout.number,
            "objective/entropy": -old.sum() / N,
            "objective/non_score_reward": -kl_coefficient * kl.sum() / N,
            "objective/rlhf_reward": rewards.sum() / N,
            "sampler/logp_gap": gap.abs().mean(),
            "sampler/logp_gap_max": gap.abs().max(),
            **of_advantages,
        }
        if self.stage.needs_reference:
            away = old - reference
            metrics |= {"objective/kl": away.sum() / N, REFERENCE_GAP: away.abs().mean()}
        if ppo.importance_cap:
            ratio = gap.clamp(max=MAX_LOG_RATIO).exp()
            columns["importance"] = ratio.clamp(max=ppo.importance_cap)
            capped = ratio > ppo.importance_cap
            metrics["sampler/importance_capped"] = capped.double().mean()
        if scores.isnan().any():  # rows that have advantages may have no reward
            for name in (SCORES, f"{SCORES}_std", "objective/rlhf_reward"):
                del metrics[name]
        rollout.metrics = {name: float(value) for name, value in metrics.items()}
        weights = rollout.weights * kept

        def shares(values: Tensor) -> Tensor:
            """Return what each token has of the sum of the values at its row; 0 where that is 0."""
            return (values / rollout.sums_at_rows(values)[at]).nan_to_num()

        share = shares(weights)
        # A loss is the same for all advantages of one sign but for a factor, so that those of one sign are added.
        strengths = shares(weights * columns.get("importance", 1.0)) * columns.pop("advantages")
        above = rollout.sums_at_rows(strengths.clamp(min=0))
        below = rollout.sums_at_rows(strengths.clamp(max=0))
        by_row = {name: rollout.sums_at_rows(share * x) for name, x in columns.items()}
        by_row["advantages"] = above.where(above > 0, below)
        opposed = below * (above > 0)
        if opposed.any():
            by_row[OPPOSED] = opposed
        by_row["weights"] = rollout.sums_at_rows(weights).roll(1)
        by_row["counts"] = rollout.sums_at_rows(kept.double())
        rollout.columns |= {name: column.float() for name, column in by_row.items()}
