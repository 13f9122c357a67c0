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

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from losses.ppo import MAX_LOG_RATIO, kl_estimate, token_rewards
from ulysses.config.section import LARGEST
from ulysses.config.stage_sections import PpoSection
from ulysses.data.serve.dataset import Example, TokenizedDataset
from ulysses.data.serve.steps import StepLoader, shuffled
from ulysses.disk import write_tensors
from ulysses.parallel.batch import Sequence, ShardedBatch
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.rl.advantages import ADVANTAGES, OPPOSED
from ulysses.rl.episodes import Episodes
from ulysses.rl.samplers import AnySampler
from ulysses.rl.trajectory import Trajectory, depth_first, episodes_of
from ulysses.stages.passes import token_values
from ulysses.stages.referenced import REFERENCE_GAP, REFERENCE_LOGPS
from ulysses.zero.engine import ZeroEngine

SCORES = "objective/scores"  # the metric that an evaluation is judged by


@dataclass
class Rollout:
    """Trajectories and what training on them needs, as a dataset whose examples are trees of sequences.

    Each trajectory leaves out what it has in common with the one before it in its example; a token that several share
    has the sum of their weights. An example has the number of its first trajectory, which is held whole.

    Args:
        layout: four rows [N] for the trajectories: `lengths`, the tokens that are held of their sequences; `prefixes`,
            those that they leave out; `example_ids`, the numbers of their examples; `groups`, the places of their
            groups.
        columns: flat [T]: the tokens, their weights in the loss (0 where nothing is drawn) and, once the rollout is
            finished, float32 columns for the loss.
        trajectories: [N] in the order of the layout. A checkpoint leaves them out.

    Attributes:
        predicted_at: for each token that a trajectory has drawn, one trajectory after the other, the row of the columns
            that predicts it, [A]. Several trajectories may have the same rows.
        weights: those of the same tokens, float64 [A]. A checkpoint leaves out both.
        ends: where each trajectory's tokens end in the columns, [N].
        sequence_lengths, prefix_lengths: `lengths` and `prefixes` by example, [N, the most of one]; 0 where there is no
            sequence.
    """

    number: int
    layout: Tensor
    columns: dict[str, Tensor]
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    predicted_at: Tensor = field(init=False)
    weights: Tensor = field(init=False)

    @classmethod
    def of(
        cls,
        number: int,
        trajectories: list[Trajectory],
        *,
        tokens_per_microbatch: int = 0,
        by_length: bool = False,
        share_drawn: bool = True,
    ) -> "Rollout":
        """Lay out trajectories, one group after the other, those of a group depth first.

        Args:
            tokens_per_microbatch: the most tokens of an example, where what is shared counts once; 0 shares nothing.
            by_length: every trajectory weighs 1 in the loss, and not each of its tokens.
            share_drawn: trajectories may share tokens that each of them trains.
        """
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        ordered: list[Trajectory] = []
        tokens, predicted_at, weights, layout = [], [], [], []
        rows, example, room, held = np.empty(0, np.int64), 0, 0, 0
        for place, group in enumerate(groups.values()):
            for trajectory, in_common in zip(*depth_first(group, share_drawn)):
                whole, drawn = trajectory.whole, trajectory.drawn
                # the last token in common predicts the first that differs
                prefix = max(0, in_common - 1)
                room -= len(whole) - prefix
                if in_common == 0 or room < 0:
                    example, prefix = len(ordered), 0
                    room = tokens_per_microbatch - len(whole)
                own = len(whole) - prefix
                # where the columns have the rows of the whole sequence
                rows = np.append(rows[:prefix], np.arange(held, held + own))
                held += own
                ordered.append(trajectory)
                layout.append((own, prefix, example, place))
                tokens.append(whole[prefix:])
                predicted_at.append(rows[drawn - 1])
                weights.append(np.full(len(drawn), 1 / len(drawn) if by_length else 1.0))
        columns = {"tokens": torch.from_numpy(np.concatenate(tokens))}
        rollout = cls(number, torch.tensor(layout).T.contiguous(), columns, ordered)
        rollout.predicted_at, rollout.weights = (
            torch.from_numpy(np.concatenate(x)) for x in (predicted_at, weights)
        )
        rollout.columns["weights"] = rollout.held(rollout.weights).roll(1).float()
        return rollout

    def __post_init__(self) -> None:
        self.lengths, self.prefixes, self.example_ids, self.groups = self.layout.numpy()
        self.ends = self.lengths.cumsum()
        within_example = np.arange(len(self.ends)) - self.example_ids
        tables = np.zeros((2, len(self.ends), within_example.max() + 1), np.int64)
        tables[:, self.example_ids, within_example] = self.lengths, self.prefixes
        self.sequence_lengths, self.prefix_lengths = tables

    def held(self, values: Tensor) -> Tensor:
        """Return the sums of drawn tokens' values [A], float64, at the rows that predict them, [T]."""
        rows = values.new_zeros(len(self.columns["tokens"]))
        return rows.index_add_(0, self.predicted_at, values)

    def examples(self, groups: list[int]) -> list[int]:
        """Return the numbers of the examples that hold these groups, by their places."""
        ids = (self.example_ids[self.groups == place].tolist() for place in groups)
        return [*dict.fromkeys(chain(*ids))]

    def __getitem__(self, i: int) -> Example:
        arrays = {name: column.numpy() for name, column in self.columns.items()}
        lengths, prefixes = self.sequence_lengths[i].tolist(), self.prefix_lengths[i].tolist()
        end = int(self.ends[i]) - lengths[0]
        sequences, before = [], arrays  # of which the first sequence takes nothing
        for length, prefix in zip(filter(None, lengths), prefixes):
            begin, end = end, end + length
            before = {
                name: np.concatenate([before[name][:prefix], column[begin:end]])
                for name, column in arrays.items()
            }
            per_token = dict(before)
            tokens, weights = per_token.pop("tokens"), per_token.pop("weights")
            sequences.append(Sequence(tokens, weights, per_token, {}, i, prefix + 1))
        return Example(i, tuple(sequences))

    def save(self, path: Path) -> None:
        """Write a finished rollout as safetensors."""
        fields = {"number": self.number, "metrics": self.metrics}
        write_tensors(path, {"layout": self.layout, **self.columns}, rollout=json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> "Rollout":
        """Read what `save` wrote."""
        with safe_open(path, "pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}
            fields = json.loads(file.metadata()["rollout"])
        return cls(layout=columns.pop("layout"), columns=columns, **fields)


def answer_table(trajectories: list[Trajectory]) -> Tensor:
    """Return every answer's drawn tokens, score and whether a stop token ended it, [3, N] float64."""
    rows = [(sum(one.sampled), one.score, one.ended) for one in trajectories]
    return torch.tensor(rows, dtype=torch.float64).T


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
    lengths, scores, ended, *of_episodes = torch.tensor(rows, dtype=torch.float64).T
    names = ("turns", "branches", "length") if of_episodes[0].sum() > len(rows) else ()
    return {
        SCORES: scores.mean(),
        f"{SCORES}_std": scores.std(correction=0),
        "val/num_eos_tokens": ended.sum(),
        "response_length/mean": lengths.mean(),
        "response_length/clip_ratio": 1 - ended.mean(),
        **{f"{SCORES}/{name}": torch.tensor(each).mean() for name, each in by_name.items()},
        **{f"episode/{name}": x.mean() for name, x in zip(names, of_episodes)},
    }


@dataclass(eq=False, kw_only=True)
class RolloutMaker:
    """Make rollouts with the current weights; all ranks call every method together.

    Args:
        engine: trains models.scored.PolicyValue, or CausalLM without a value.
        ppo: the [ppo] table.
        episodes: returns the Episodes of rows; None if prompts are answered.
        sampler: decodes this rank's answers with the current weights, in this process or on servers.
        tokens_per_microbatch: the most tokens of a packed micro-batch.
        share_prompts: whether answers to one prompt that fit into a micro-batch share it.
        reference: (batch, temperature) -> the reference's log-probabilities [S]; None without a KL penalty.
        reward: scores answers by functions and servers (ulysses.rl.rewards.Rewards); None if there are none.
        scorer: a frozen engine around models.scored.RewardModel, which gives one more score; or None.
        phase: is called with the name of every phase of the work.
        show: is called with every finished rollout.
        rollout: the current one, whose steps are being trained.
    """

    engine: ZeroEngine
    mesh: ParallelMesh
    ppo: PpoSection
    sampler: AnySampler
    tokens_per_microbatch: int
    share_prompts: bool = False
    reference: Callable[..., Tensor] | None = None
    reward: Callable[..., list[dict[str, float]]] | None = None
    episodes: Callable[..., Episodes] | None = None
    scorer: ZeroEngine | None = None
    phase: Callable[..., None] = lambda *_, **__: None
    show: Callable[[Rollout], None] = lambda rollout: None
    rollout: Rollout | None = None

    # ---------------------------------------------------------------- answers

    def make(self, number: int, dataset: TokenizedDataset, indices: list[int]) -> Rollout:
        """Answer the prompts `indices` and turn scores into advantages."""
        began = time.perf_counter()
        self.sampler.synchronise(number)
        rollout = self.answer(number, dataset, indices, self.ppo.answers_per_prompt)
        sampled = time.perf_counter()
        self.finish(rollout, *self._values(rollout, self._policy_and_reference, 3).unbind(-1))
        rollout.metrics["time/sampling"] = sampled - began
        rollout.metrics["time/rollout"] = time.perf_counter() - began
        self.show(rollout)
        self.sampler.check_gap(rollout.metrics["sampler/logp_gap"])
        return rollout

    def answer(
        self,
        number: int,
        dataset: TokenizedDataset,
        indices: list[int],
        answers_per_prompt: int = 1,
    ) -> Rollout:
        """Decode and score answers to every prompt; token t of answer n is drawn by the key (seed, number, n, t)."""
        self.phase("sampling")
        local = self.draw(number, dataset, indices, answers_per_prompt)
        return self.scored(number, dataset, local)

    def draw(
        self,
        number: int,
        dataset: TokenizedDataset,
        indices: list[int],
        answers_per_prompt: int,
    ) -> list[Trajectory]:
        """Return this rank's share of the answers."""
        K = answers_per_prompt
        local_groups = range(self.mesh.rank, len(indices), self.mesh.world_size)
        rows = {g * K + k: indices[g] for g in local_groups for k in range(K)}
        if self.episodes is not None:
            given = {n: (row, dataset.row(row)) for n, row in rows.items()}
            drawn = self.episodes(given).run(self.sampler, number)
            return [replace(one, group=one.episode // K) for one in drawn]
        prompts = {row: dataset[row].sequences[0].tokens.tolist() for row in {*rows.values()}}
        to_answer = {n: torch.tensor(prompts[row]) for n, row in rows.items()}
        completions = self.sampler.sample(to_answer, number)
        return [
            Trajectory.of(prompts[rows[n]], completion, group=n // K, episode=n, row=rows[n])
            for n, completion in completions.items()
        ]

    def scored(
        self, number: int, dataset: TokenizedDataset, local: list[Trajectory]
    ) -> Rollout:
        """Score this rank's answers, and lay out those of all ranks."""
        self.phase("reward")
        # the last branch stands for an episode, whose function may have scored it
        lasts = [last for *_, last in episodes_of(local) if not last.scores]
        if self.reward is not None:
            rows = [one.row for one in lasts]
            scores = self.reward(
                [one.prompt for one in lasts],
                [one.tokens for one in lasts],
                [dataset.row(row) for row in rows],
                rows,
            )
            for one, by_reward in zip(lasts, scores, strict=True):
                one.scores = by_reward
        self.phase("rollout")
        trajectories = sorted(chain(*gather(local)), key=lambda one: one.episode)
        rollout = Rollout.of(
            number,
            trajectories,
            tokens_per_microbatch=self.tokens_per_microbatch * self.share_prompts,
            by_length=self.ppo.loss_aggregation == "sequence",
            share_drawn=self.ppo.ratio == "token"
            and not ADVANTAGES[self.ppo.advantage].needs_value,
        )
        if self.scorer is not None:
            with self.scorer.inference():
                values = self._values(rollout, self.scorer)
            scores_by_model = values[rollout.ends - 1].tolist()
            for one, score in zip(rollout.trajectories, scores_by_model, strict=True):
                if self.ppo.rollout not in one.scores:
                    one.scores[self.ppo.reward_model] = score
        factors = {**self.ppo.reward, self.ppo.rollout: 1.0}
        for branches in episodes_of(trajectories):
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

    # ---------------------------------------------------------------- passes without gradient

    def _policy_and_reference(self, batch: ShardedBatch) -> Tensor:
        """Return the policy's log-probabilities and values and the reference's log-probabilities, [S, 3]."""
        temperature = self.ppo.temperature
        with self.engine.inference():
            out = self.engine(batch, temperature=temperature)
        needs_value = ADVANTAGES[self.ppo.advantage].needs_value
        values = out.values if needs_value else torch.zeros_like(out.logps)
        reference = out.logps
        if self.reference is not None:
            reference = self.reference(batch, temperature=temperature)
        return torch.stack([out.logps, values, reference], dim=-1)

    def _values(
        self, rollout: Rollout, compute: Callable[[ShardedBatch], Tensor], *columns: int
    ) -> Tensor:
        """Return the values that `compute` returns for a batch, of all tokens of the rollout, [T, *columns]."""
        examples = np.unique(rollout.example_ids).tolist()
        return token_values(
            compute,
            rollout.sequence_lengths[examples].sum(axis=1).tolist(),
            lambda i: rollout[examples[i]].sequences,
            self.mesh,
            self.engine.device,
            self.tokens_per_microbatch,
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
        lengths, scores, ended = answer_table(rollout.trajectories)
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
        compute = ADVANTAGES[ppo.advantage].compute
        columns, of_advantages = compute(rewards, values, cu_seqlens, rollout.trajectories, ppo)
        columns["old_logps"] = old
        if ppo.kl_in != "reward":
            columns[REFERENCE_LOGPS] = reference
        sampled = [np.array(one.logps)[one.sampled] for one in rollout.trajectories]
        gap = old - np.concatenate(sampled)
        N = len(rollout.trajectories)
        metrics = {
            **answer_metrics(episodes_of(rollout.trajectories)),
            "rollout": rollout.number,
            "objective/kl": (old - reference).sum() / N,
            "objective/entropy": -old.sum() / N,
            "objective/non_score_reward": -kl_coefficient * kl.sum() / N,
            "objective/rlhf_reward": rewards.sum() / N,
            REFERENCE_GAP: (old - reference).abs().mean(),
            "sampler/logp_gap": gap.abs().mean(),
            "sampler/logp_gap_max": gap.abs().max(),
            **of_advantages,
        }
        if ppo.importance_cap:
            ratio = gap.clamp(max=MAX_LOG_RATIO).exp()
            columns["importance"] = ratio.clamp(max=ppo.importance_cap)
            capped = ratio > ppo.importance_cap
            metrics["sampler/importance_capped"] = capped.double().mean()
        rollout.metrics = {name: float(value) for name, value in metrics.items()}
        weights = rollout.weights * kept

        def share(weights: Tensor) -> Tensor:
            """Return each token's share of the weights at its row, of which a row may have none."""
            return (weights / rollout.held(weights)[at]).nan_to_num()

        # A loss is the same for all advantages of one sign but for a factor, so that those of one sign are added.
        strength = share(weights * columns.get("importance", 1.0))
        strengths = strength * columns.pop("advantages")
        above, below = (
            rollout.held(x) for x in (strengths.clamp(min=0), strengths.clamp(max=0))
        )
        held = {name: rollout.held(share(weights) * x) for name, x in columns.items()}
        held["advantages"] = above.where(above > 0, below)
        if (opposed := below * (above > 0)).any():
            held[OPPOSED] = opposed
        held["weights"] = rollout.held(weights).roll(1)
        rollout.columns |= {name: column.float() for name, column in held.items()}


@dataclass(eq=False)
class RolloutSteps:
    """Serve the optimizer steps of rollouts, with the methods of a StepLoader that the loop calls.

    steps of an epoch   | rollout 0: pass 0 (minibatch 0 .. m-1), pass 1 (...) | rollout 1: ... |

    A rollout is made when `step` is first called for one of its steps. Each of `ppo.epochs` passes takes its prompts in
    a new order, in `ppo.minibatches` steps. All ranks call every method together.

    Args:
        prompts: the loader whose step k holds the prompts of rollout k of the epoch.
    """

    maker: RolloutMaker
    prompts: StepLoader
    holds = "the rollout"

    @property
    def steps_per_epoch(self) -> int:
        return self.prompts.steps_per_epoch * self.maker.ppo.steps_per_rollout

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k; its rollout is made first, unless it is the current one."""
        prompts, maker = self.prompts, self.maker
        of_epoch = k // maker.ppo.steps_per_rollout
        number = epoch * prompts.steps_per_epoch + of_epoch
        if maker.rollout is None or maker.rollout.number != number:
            indices = prompts.indices(epoch, of_epoch)
            maker.rollout = maker.make(number, prompts.dataset, indices)
        return prompts.micro_batches(maker.rollout, self.indices(epoch, k))

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the examples of step k of the current rollout, in a fixed order."""
        rollout, ppo = self.maker.rollout, self.maker.ppo
        pass_number, minibatch = divmod(k % ppo.steps_per_rollout, ppo.minibatches)
        order = shuffled(
            int(rollout.groups[-1]) + 1, self.prompts.seed, rollout.number, pass_number
        )
        return rollout.examples(np.array_split(order, ppo.minibatches)[minibatch].tolist())
