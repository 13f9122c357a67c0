"""A program's own loop of stage ppo: it draws answers with the current weights, and trains on what it makes of them.

All ranks call both functions together; what rank 0 gives them counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from ulysses.data import BadRowError
from ulysses.data.read.sources import RawRow
from ulysses.data.read.trajectories import read_trajectory
from ulysses.parallel.mesh import gather
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rows import trajectories_of, unfit_advantages
from ulysses.rl.sampler import Completion
from ulysses.run.trainer import Trainer
from ulysses.stages.base import Metrics


def sample(trainer: Trainer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return an answer to every prompt (token ids), drawn as the [ppo] table says."""
    maker, mesh, step = ppo_stage(trainer).maker, trainer.mesh, trainer.step
    prompts = gather(prompts)[0]
    after, calls = maker.asked
    if after != step:  # so that servers have earlier weights
        maker.synchronise()
        calls = 0
    maker.asked = step, calls + 1
    maker.phase("sampling")
    mine = range(mesh.rank, len(prompts), mesh.world_size)
    to_answer = {n: torch.tensor(prompts[n]) for n in mine}
    # each call draws with random numbers of its own
    drawn = gather(maker.sampler.sample(to_answer, (step << 20) + calls))
    trainer.watch.pause()
    found = sorted(chain(*(each.items() for each in drawn)))
    return [completion for _, completion in found]


def learn(trainer: Trainer, rows: Sequence[Mapping[str, object]]) -> Metrics:
    """Take all steps of one rollout on trajectories, and return the metrics of the last step.

    Args:
        rows: like those in the files of `ppo.sampler = "rows"`.

    Raises ValueError for a row that cannot be trained on, and where `run.steps` leaves too few steps.
    """
    stage = ppo_stage(trainer)
    maker, per_rollout = stage.maker, stage.table.steps_per_rollout
    limits = trainer.engine.module.config.vocab_size, stage.requirements.longest_example
    groups, given = defaultdict(list), []
    for n, row in enumerate(gather(rows)[0]):
        try:
            columns = read_trajectory(RawRow(0, "", False, row), {}, *limits)
        except BadRowError as error:
            raise ValueError(f"trajectory {n} {error}") from None
        groups[columns["_prompt"]].append(columns)
        given.append(columns["given"])
    if fault := unfit_advantages(np.array(given), stage.table):
        raise ValueError(fault)
    left = trainer.total_steps - trainer.step
    if not given or left < per_rollout:
        raise ValueError(
            f"there are {len(given)} trajectories for {per_rollout} steps, and run.steps leaves {left}"
        )
    while trainer.step % per_rollout:  # those that a checkpoint has left
        trainer.train_step()
    maker.phase("rollout")
    found = trajectories_of(groups.values(), maker.sampler.options.stop_tokens)
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
