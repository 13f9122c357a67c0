"""PPO's data: prompts -> answers of the current policy -> rewards and advantages, the same on every rank.

    step r of the prompts, dealt to all ranks
      -> every rank decodes its own        (weights gathered once, no lockstep)
      -> exchange: all answers everywhere   so that packing does not depend on who decoded what
      -> one packed pass each of policy with value, reference and reward model: log-probabilities, values, scores
      -> rewards, advantages (of GAE with its returns, or of each answer among the others of its prompt)

    answers to prompt 0          to prompt 1
    [ p p p a a ]                [ p a a a ]        the answers of a prompt lie one after the other; those that fit
          [ p a a a ]            [ p a ]            into a micro-batch together share its prompt, which then is
          [ p a ]                      [ p a a ]    computed once, and form one example

All columns are in prediction coordinates: row i of a sequence belongs to the prediction of its token i + 1.
Letters: N sequences (answers with their prompts), T tokens of all sequences, K answers to each prompt.
"""

import json
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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
from ulysses.rl.advantages import ADVANTAGES
from ulysses.rl.sampler import Completion
from ulysses.stages.passes import token_values
from ulysses.stages.referenced import COLUMN, GAP
from ulysses.zero.engine import ZeroEngine

SCORES = "objective/scores"  # the metric that an evaluation is judged by


@dataclass
class Rollout:
    """Prompts with their answers and what training on them needs, as a dataset whose examples may share prompts.

    layout [3, N]: lengths, the tokens that each answer's sequence holds; owners, the first of the answers that share a
    prompt with this one (an example has its owner's number); prefixes, the tokens of the prompt that only the owner
    holds, 0 for owners. columns, flat [T]: the tokens, their weights in the loss (0 in prompts) and, once the rollout
    is finished, float32 columns for the loss. answers [N] and prompts: a checkpoint leaves them out.
    answers_per_prompt: K.

    sequence_lengths, prefix_lengths: of each sequence of an example, [N, K]; 0 where there is none.
    """

    number: int
    layout: Tensor
    columns: dict[str, Tensor]
    answers: list[Completion] = field(default_factory=list)
    prompts: list[Tensor] = field(default_factory=list)
    answers_per_prompt: int = 1
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        prompts: list[Tensor],
        answers: list[Completion],
        *,
        tokens_per_microbatch: int = 0,
        by_length: bool = False,
    ) -> "Rollout":
        """Lay out the answers, K to each prompt one after the other.

        Args:
            tokens_per_microbatch: the most of the answers that share a prompt, which is in them once; 0 shares nothing.
            by_length: every answer weighs 1 in the loss, and not each of its tokens.
        """
        K = len(answers) // len(prompts)
        parts, runs, weights, layout = [], [], [], []
        owner, room = 0, 0
        for n, answer in enumerate(answers):
            prompt, count = prompts[n // K], len(answer.tokens)
            # the last token of a prompt predicts, so that every sequence keeps it
            room -= 1 + count
            if n % K == 0 or room < 0:
                owner, room = n, tokens_per_microbatch - len(prompt) - count
            prefix = len(prompt) - 1 if owner < n else 0
            held = len(prompt) - prefix
            parts += [prompt[prefix:], answer.tokens]
            runs += [held, count]
            weights += [0.0, 1 / count if by_length else 1.0]
            layout.append((held + count, owner, prefix))
        columns = {
            "tokens": torch.from_numpy(np.concatenate(parts).astype(np.int32)),
            "weights": torch.tensor(weights).repeat_interleave(torch.tensor(runs)),
        }
        return cls(number, torch.tensor([*zip(*layout)]), columns, answers, prompts, K)

    def __post_init__(self) -> None:
        self.lengths, self.owners, self.prefixes = self.layout.numpy()
        self.ends = self.lengths.cumsum()
        tables = np.zeros((2, len(self.ends), self.answers_per_prompt), np.int64)
        places = np.arange(len(self.ends)) - self.owners
        tables[:, self.owners, places] = self.lengths, self.prefixes
        self.sequence_lengths, self.prefix_lengths = tables

    def examples(self, prompts: list[int]) -> list[int]:
        """Return the numbers of the examples that hold all answers to these prompts."""
        owners = self.owners.reshape(-1, self.answers_per_prompt)[prompts]
        return [*dict.fromkeys(owners.ravel().tolist())]

    def __getitem__(self, i: int) -> Example:
        columns = {name: column.numpy() for name, column in self.columns.items()}
        lengths, prefixes = self.sequence_lengths[i].tolist(), self.prefix_lengths[i].tolist()
        head = max(prefixes) + 1  # of the prompt, if it is shared
        start = end = int(self.ends[i]) - lengths[0]
        sequences = []
        for length, prefix in zip(filter(None, lengths), prefixes):
            begin, end = end, end + length
            own = {
                name: np.concatenate([column[start : start + prefix], column[begin:end]])
                for name, column in columns.items()
            }
            both = own.pop("tokens"), own.pop("weights")
            sequences.append(Sequence(*both, own, {}, i, head))
        return Example(i, tuple(sequences))

    def save(self, path: Path) -> None:
        """Write a finished rollout as safetensors."""
        numbers = {
            "number": self.number,
            "answers_per_prompt": self.answers_per_prompt,
            "metrics": self.metrics,
        }
        write_tensors(
            path, {"layout": self.layout, **self.columns}, rollout=json.dumps(numbers)
        )

    @classmethod
    def load(cls, path: Path) -> "Rollout":
        """Read what `save` wrote."""
        with safe_open(path, "pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}
            numbers = json.loads(file.metadata()["rollout"])
        return cls(layout=columns.pop("layout"), columns=columns, **numbers)


def answer_table(answers: list[Completion]) -> Tensor:
    """Return every answer's length, score and whether a stop token ended it, [3, N] float64."""
    rows = [(len(answer.tokens), answer.score, answer.ended) for answer in answers]
    return torch.tensor(rows, dtype=torch.float64).T


def answer_metrics(answers: list[Completion]) -> dict[str, Tensor]:
    """Return the metrics of answers and of each reward; held-out prompts have them too."""
    lengths, scores, ended = answer_table(answers)
    parts = {
        f"{SCORES}/{name}": torch.tensor([a.scores[name] for a in answers]).mean()
        for name in answers[0].scores
    }
    return {
        SCORES: scores.mean(),
        f"{SCORES}_std": scores.std(correction=0),
        "val/num_eos_tokens": ended.sum(),
        "response_length/mean": lengths.mean(),
        "response_length/clip_ratio": 1 - ended.mean(),
        **parts,
    }


class AnswerSampler(Protocol):
    """What decodes answers: ulysses/rl/ppo.py chooses one."""

    def synchronise(self, rollout: int = 0) -> None: ...

    def sample(
        self, prompts: Mapping[int, Tensor], rollout: int = 0
    ) -> dict[int, Completion]: ...


@dataclass(eq=False, kw_only=True)
class RolloutMaker:
    """Make rollouts with the weights of the moment; all ranks call every method together.

    Args:
        engine: trains models.scored.PolicyValue, or CausalLM without a value.
        config: the [ppo] table.
        sampler: decodes this rank's answers, with these weights here or on servers.
        tokens_per_microbatch: the most of a packed one.
        share_prompts: answers to one prompt that fit into a micro-batch share it.
        reference: (batch, temperature) -> the reference's log-probabilities [S]; None without a KL penalty.
        reward: scores answers by each function's name (ulysses.rl.rewards.Rewards); None without functions.
        scorer: gives one more score, a frozen engine around models.scored.RewardModel, or None.
        phase: is told of every phase of the work by name.
        show: is given every finished rollout.

    Attributes:
        rollout: the one that was asked for last.
    """

    engine: ZeroEngine
    mesh: ParallelMesh
    config: PpoSection
    sampler: AnswerSampler
    tokens_per_microbatch: int
    share_prompts: bool = False
    reference: Callable[..., Tensor] | None = None
    reward: Callable[..., list[dict[str, float]]] | None = None
    scorer: ZeroEngine | None = None
    phase: Callable[..., None] = lambda *_, **__: None
    show: Callable[[Rollout], None] = lambda rollout: None
    rollout: Rollout | None = None

    # ---------------------------------------------------------------- answers

    def make(self, number: int, dataset: TokenizedDataset, indices: list[int]) -> Rollout:
        """Answer the prompts `indices` and turn scores into advantages."""
        began = time.perf_counter()
        self.sampler.synchronise(number)
        rollout = self.answer(number, dataset, indices, self.config.answers_per_prompt)
        sampled = time.perf_counter()
        self.finish(rollout, *self._values(rollout, self._policy_and_reference, 3).unbind(-1))
        rollout.metrics["time/sampling"] = sampled - began
        rollout.metrics["time/rollout"] = time.perf_counter() - began
        self.show(rollout)
        return rollout

    def answer(
        self,
        number: int,
        dataset: TokenizedDataset,
        indices: list[int],
        answers_per_prompt: int = 1,
    ) -> Rollout:
        """Decode and score answers to every prompt; token t of answer n is drawn by the key (seed, number, n, t)."""
        K = answers_per_prompt
        prompts = [torch.as_tensor(dataset[i].sequences[0].tokens).int() for i in indices]
        mine = range(self.mesh.rank, len(prompts), self.mesh.world_size)
        own = {p * K + k: prompts[p] for p in mine for k in range(K)}
        self.phase("sampling")
        found = self.sampler.sample(own, number)
        self.phase("reward")
        if self.reward is not None:
            places = [indices[n // K] for n in found]
            scores = self.reward(
                [own[n].tolist() for n in found],
                [answer.tokens for answer in found.values()],
                [dataset.row(place) for place in places],
                places,
            )
            for answer, scored in zip(found.values(), scores, strict=True):
                answer.scores = scored
        everyone = ChainMap(*gather(found))
        self.phase("rollout")
        answers = [everyone[n] for n in range(len(everyone))]
        rollout = Rollout.of(
            number,
            prompts,
            answers,
            tokens_per_microbatch=self.tokens_per_microbatch * self.share_prompts,
            by_length=self.config.loss_aggregation == "sequence",
        )
        if self.scorer is not None:
            with self.scorer.inference():
                values = self._values(rollout, self.scorer)
            for answer, score in zip(answers, values[rollout.ends - 1].tolist(), strict=True):
                answer.scores[self.config.reward_model] = score
        weights = self.config.reward.items()
        for answer in answers:
            answer.score = sum(weight * answer.scores[name] for name, weight in weights)
            if not abs(answer.score) <= LARGEST:
                raise FloatingPointError(
                    f"the weighted sum of the rewards {answer.scores} is {answer.score}, which is beyond 2^53 or no "
                    "number; lower the weights in ppo.reward, or train another reward model"
                )
        return rollout

    # ---------------------------------------------------------------- passes without gradient

    def _policy_and_reference(self, batch: ShardedBatch) -> Tensor:
        """Return the policy's log-probabilities and values and the reference's log-probabilities, [S, 3]."""
        temperature = self.config.temperature
        with self.engine.inference():
            out = self.engine(batch, temperature=temperature)
        needs_value = ADVANTAGES[self.config.advantage].needs_value
        values = out.values if needs_value else torch.zeros_like(out.logps)
        reference = out.logps
        if self.reference is not None:
            reference = self.reference(batch, temperature=temperature)
        return torch.stack([out.logps, values, reference], dim=-1)

    def _values(
        self, rollout: Rollout, compute: Callable[[ShardedBatch], Tensor], *columns: int
    ) -> Tensor:
        """Return what `compute` gives for all tokens, [T, *columns]."""
        examples = np.unique(rollout.owners).tolist()
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
        config, weights = self.config, rollout.columns["weights"]
        in_answer = weights.bool()
        # a prompt comes first, so the weight of what follows a sequence's last token is 0
        predicts = in_answer.roll(-1)
        old, values, reference = (x[predicts].double() for x in (old, values, reference))
        lengths, scores, ended = answer_table(rollout.answers)
        cu_seqlens = F.pad(lengths.long().cumsum(0), (1, 0))
        kept = (ended.bool() | (not config.mask_truncated)).repeat_interleave(lengths.long())
        kl = kl_estimate(old, reference, config.kl_estimator) * kept
        kl_coefficient = config.kl_coefficient if config.kl_in == "reward" else 0.0
        rewards = token_rewards(
            kl,
            scores,
            cu_seqlens[1:] - 1,
            kl_coefficient,
            missing_eos_penalty=config.missing_eos_penalty,
            has_eos=ended,
        )
        compute = ADVANTAGES[config.advantage].compute
        columns, of_advantages = compute(rewards, values, cu_seqlens, config)
        columns["old_logps"] = old
        if config.kl_in != "reward":
            columns[COLUMN] = reference
        gap = old - np.concatenate([answer.logps for answer in rollout.answers])
        N = len(rollout.answers)
        metrics = {
            **answer_metrics(rollout.answers),
            "rollout": rollout.number,
            "objective/kl": (old - reference).sum() / N,
            "objective/entropy": -old.sum() / N,
            "objective/non_score_reward": -kl_coefficient * kl.sum() / N,
            "objective/rlhf_reward": rewards.sum() / N,
            GAP: (old - reference).abs().mean(),
            "sampler/logp_gap": gap.abs().mean(),
            "sampler/logp_gap_max": gap.abs().max(),
            **of_advantages,
        }
        if config.importance_cap:
            ratio = gap.clamp(max=MAX_LOG_RATIO).exp()
            columns["importance"] = ratio.clamp(max=config.importance_cap)
            capped = ratio > config.importance_cap
            metrics["sampler/importance_capped"] = capped.double().mean()
        rollout.metrics = {name: float(value) for name, value in metrics.items()}
        weights[in_answer] *= kept
        for name, column in columns.items():
            empty = torch.zeros(len(predicts))
            rollout.columns[name] = empty.masked_scatter_(predicts, (column * kept).float())


@dataclass(eq=False)
class RolloutSteps:
    """Serve the optimizer steps over rollouts, with the face of a StepLoader.

    steps of an epoch   | rollout 0: pass 0 (minibatch 0 .. m-1), pass 1 (...) | rollout 1: ... |

    A rollout is made when its first step is asked for; `config.epochs` passes over it take its prompts in a new order
    each, in `config.minibatches` steps. All ranks call every method together.

    Args:
        prompts: its step k has the prompts of rollout k of the epoch.
    """

    maker: RolloutMaker
    prompts: StepLoader
    holds = "the rollout"

    @property
    def steps_per_epoch(self) -> int:
        config = self.maker.config
        return self.prompts.steps_per_epoch * config.epochs * config.minibatches

    def indices(self, epoch: int, k: int) -> list[int]:
        """Return the rollout's examples of step k in a fixed order, after making a new rollout."""
        prompts, maker = self.prompts, self.maker
        config, rollout = maker.config, maker.rollout
        load, within = divmod(k, config.epochs * config.minibatches)
        number = epoch * prompts.steps_per_epoch + load
        if rollout is None or rollout.number != number:
            rollout = maker.make(number, prompts.dataset, prompts.indices(epoch, load))
            maker.rollout = rollout
        one_pass, part = divmod(within, config.minibatches)
        count = len(rollout.lengths) // rollout.answers_per_prompt
        order = shuffled(count, prompts.seed, number, one_pass)
        return rollout.examples(np.array_split(order, config.minibatches)[part].tolist())

    def step(self, epoch: int, k: int) -> list[list[Example]]:
        """Return this group's micro-batches of step k."""
        indices = self.indices(epoch, k)
        return self.prompts.micro_batches(self.maker.rollout, indices)
