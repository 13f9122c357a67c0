"""A program's own loop of stage ppo: it draws answers with the current weights, and trains on what it makes of them.

All ranks call both functions together; what rank 0 gives them counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ulysses.data import BadRowError
from ulysses.data.read.sources import RawRow
from ulysses.data.read.trajectories import read_trajectory
from ulysses.data.serve.steps import check_fits
from ulysses.parallel.mesh import gather
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rows import trajectories_of, unfit_rows
from ulysses.rl.sampler import Completion
from ulysses.rl.trajectory import prompt_tokens
from ulysses.run.trainer import Trainer
from ulysses.stages.base import Metrics


def sample(trainer: Trainer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return an answer to every prompt (token ids), drawn as the [ppo] table says.

    Raises ValueError for a prompt without tokens, with one that the model does not know, or without room for an answer.
    """
    stage = ppo_stage(trainer)
    maker, longest = stage.maker, stage.requirements.longest_example
    vocabulary = trainer.engine.module.config.vocab_size
    numbered = {
        n: prompt_tokens(prompt, vocabulary, f"prompt {n}")
        for n, prompt in enumerate(gather(prompts)[0])
    }
    if not numbered:
        return []
    if (most := max(map(len, numbered.values())) + stage.table.max_new_tokens) > longest:
        raise ValueError(
            f"a prompt and its answer may have {most} tokens, but {longest} are planned for; raise data.max_length, or "
            "lower ppo.max_new_tokens"
        )
    finish_rollout(trainer)
    step = trainer.step
    if not maker.calls[step]:  # servers have earlier weights
        maker.synchronise()
    # each call draws with random numbers of its own
    number = (step << 20) + maker.calls[step]
    maker.calls[step] += 1
    maker.parts.phase("sampling")
    answers = maker.sampler.sample_together(numbered, number)
    trainer.watch.pause()
    return [*answers.values()]


def learn(trainer: Trainer, rows: Sequence[Mapping[str, object]]) -> Metrics:
    """Take all steps of one rollout on trajectories, and return the metrics of the last step.

    Args:
        rows: like those in the files of `ppo.sampler = "rows"`.

    Raises ValueError for a row that cannot be trained on, where groups or `run.steps` are too few for all steps, and
    where `run.patience` has ended the run.
    """
    stage = ppo_stage(trainer)
    maker, per_rollout = stage.maker, stage.table.steps_per_rollout
    limits = trainer.engine.module.config.vocab_size, stage.requirements.longest_example
    groups, with_advantages = defaultdict(list), []
    for n, row in enumerate(gather(rows)[0]):
        # the first row of the first rollout tells which columns are not read; `str` says nothing
        note = str if n or trainer.metrics else trainer.say
        try:
            columns = read_trajectory(RawRow(0, "", row), {}, *limits, note)
        except BadRowError as error:
            raise ValueError(f"trajectory {n} {error}") from None
        groups[columns["_prompt"]].append(columns)
        with_advantages.append(columns["given"])
    if fault := unfit_rows(len(groups), np.array(with_advantages), stage.table):
        raise ValueError(fault)
    if trainer.finished and trainer.step < trainer.total_steps:
        raise ValueError(
            f"the run has ended at step {trainer.step}, because eval/loss was not below that of step {trainer.best[0]} "
            f"in {trainer.run.patience} evaluations (run.patience)"
        )
    rest = -trainer.step % per_rollout  # steps of a rollout that a checkpoint has left
    left = trainer.total_steps - trainer.step - rest
    if len(groups) < stage.table.minibatches or left < per_rollout:
        raise ValueError(
            f"there are {len(groups)} groups for {stage.table.minibatches} minibatches, and run.steps leaves "
            f"{max(0, left)} steps for the {per_rollout} of a rollout"
        )
    trajectories = trajectories_of(groups.values(), maker.sampler.options.stop_tokens)
    check_fits(max(len(t.whole) for t in trajectories), maker.parts.tokens_per_microbatch)
    finish_rollout(trainer)
    maker.rollout = maker.made_of(trainer.step // per_rollout, trajectories)
    take_steps(trainer, per_rollout)
    trainer.watch.pause()
    return trainer.metrics


def finish_rollout(trainer: Trainer) -> None:
    """Take the steps of a rollout that a checkpoint has left."""
    rest = -trainer.step % ppo_stage(trainer).table.steps_per_rollout
    take_steps(trainer, min(rest, trainer.total_steps - trainer.step))


def take_steps(trainer: Trainer, count: int) -> None:
    """Take steps, evaluate, log and save as configured.

    Raises InterruptedError, with a checkpoint saved, if the run was asked to stop before its last step, as when its log
    cannot be written.
    """
    for _ in range(count):
        trainer.advance()
        if trainer.stop_requested and trainer.step < trainer.total_steps:
            raise InterruptedError(
                f"the run was asked to stop, and has saved step {trainer.step}"
            )


def ppo_stage(trainer: Trainer) -> PpoStage:
    """Return the run's stage; ValueError if it is another one."""
    if not isinstance(trainer.stage, PpoStage):
        raise ValueError('a program samples and learns by stage = "ppo" alone')
    return trainer.stage
