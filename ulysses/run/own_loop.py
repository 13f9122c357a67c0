"""A program's own loop of stage ppo: it draws answers with the current weights, and trains on what it makes of them.

All ranks call both functions together; what rank 0 gives them counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from ulysses.data import BadRowError
from ulysses.data.read.sources import RawRow
from ulysses.data.read.trajectories import read_trajectory
from ulysses.parallel.mesh import gather
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rows import trajectory_of, unfit_advantages
from ulysses.rl.sampler import Completion
from ulysses.run.trainer import Trainer
from ulysses.stages.base import Metrics


def sample(trainer: Trainer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return an answer to every prompt (token ids), drawn as the [ppo] table says."""
    stage, mesh = ppo_stage(trainer), trainer.mesh
    prompts, maker = gather(prompts)[0], stage.maker
    longest, vocabulary = stage.config.data.max_length, trainer.engine.module.config.vocab_size
    for n, prompt in enumerate(prompts):
        if not (0 < len(prompt) <= longest and 0 <= min(prompt) <= max(prompt) < vocabulary):
            raise ValueError(
                f"prompt {n} has not 1 to {longest} tokens (data.max_length), each below {vocabulary}"
            )
    step, calls = maker.asked
    if step != trainer.step:  # so that servers have other weights
        maker.synchronise()
        calls = 0
    maker.asked = trainer.step, calls + 1
    maker.phase("sampling")
    mine = range(mesh.rank, len(prompts), mesh.world_size)
    drawn = maker.sampler.sample(
        {n: torch.tensor(prompts[n]) for n in mine}, (trainer.step << 20) + calls
    )
    found = dict(chain(*(each.items() for each in gather(drawn))))
    trainer.watch.pause()
    return [found[n] for n in range(len(prompts))]


def learn(trainer: Trainer, rows: Sequence[Mapping[str, object]]) -> Metrics:
    """Take all steps of one rollout on trajectories, and return the metrics of the last step.

    Args:
        rows: like those in the files of `ppo.sampler = "rows"`.

    Raises ValueError for a row that cannot be trained on, and where `run.steps` leaves too few steps.
    """
    stage = ppo_stage(trainer)
    maker, ppo = stage.maker, stage.table
    vocabulary = trainer.engine.module.config.vocab_size
    limits = {}, vocabulary, stage.requirements.longest_example
    groups, found, given = {}, [], []
    for n, row in enumerate(gather(rows)[0]):
        try:
            columns = read_trajectory(RawRow(0, "", False, row), *limits)
        except BadRowError as error:
            raise ValueError(f"trajectory {n} {error}") from None
        group = groups.setdefault(columns["_prompt"], len(groups))
        one = trajectory_of(columns, maker.sampler.options.stop_tokens)
        found.append(replace(one, group=group, episode=n, row=n))
        given.append(columns["given"])
    left, per_rollout = trainer.total_steps - trainer.step, ppo.steps_per_rollout
    if fault := unfit_advantages(np.array(given), ppo):
        raise ValueError(fault)
    if not found or left < per_rollout:
        raise ValueError(
            f"there are {len(found)} trajectories for {per_rollout} steps, and run.steps leaves {left}"
        )
    maker.phase("rollout")
    while trainer.step % per_rollout:  # those that a checkpoint has left
        trainer.train_step()
    found.sort(key=lambda one: one.group)
    maker.rollout = maker.laid_out(trainer.step // per_rollout, found)
    maker.complete(maker.rollout)
    for _ in range(per_rollout):
        metrics = trainer.train_step()
    trainer.watch.pause()
    return metrics


def ppo_stage(trainer: Trainer) -> PpoStage:
    """Return the run's stage; ValueError if it is another one."""
    if not isinstance(trainer.stage, PpoStage):
        raise ValueError('a program samples and learns by stage = "ppo" alone')
    return trainer.stage
