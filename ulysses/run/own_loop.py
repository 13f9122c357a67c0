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
from ulysses.data.serve.steps import check_fits
from ulysses.parallel.mesh import gather
from ulysses.rl.outside_sampler import OutsideSampler
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rows import trajectories_of, unfit_advantages
from ulysses.rl.sampler import Completion
from ulysses.rl.trajectory import Trajectory
from ulysses.run.trainer import Trainer
from ulysses.stages.base import Metrics


def sample(trainer: Trainer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Return an answer to every prompt (token ids), drawn as the [ppo] table says.

    Raises ValueError for a prompt without tokens, or with one that the model does not know.
    """
    maker, mesh = ppo_stage(trainer).maker, trainer.mesh
    vocabulary = trainer.engine.module.config.vocab_size
    prompts = [[*each] for each in gather(prompts)[0]]
    for n, prompt in enumerate(prompts):
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise ValueError(
                f"prompt {n} should have tokens, and they are from 0 to {vocabulary - 1}"
            )
    if not prompts:
        return []
    finish_rollout(trainer)
    step, (after, calls) = trainer.step, maker.asked
    if after != step:  # so that servers have earlier weights
        maker.synchronise()
        calls = 0
    maker.asked = step, calls + 1
    maker.phase("sampling")
    mine = range(mesh.rank, len(prompts), mesh.world_size)
    to_answer = {n: torch.tensor(prompts[n]) for n in mine}
    # each call draws with random numbers of its own
    drawn = gather(maker.sampler.sample(to_answer, (step << 20) + calls))
    found = sorted(chain(*(each.items() for each in drawn)))
    if after < 0 and isinstance(maker.sampler, OutsideSampler):  # do they have these weights?
        made = [Trajectory.of(prompts[n], each, group=0, episode=n) for n, each in found]
        made = [one for one in made if len(one.whole) <= maker.tokens_per_microbatch]
        if made:
            rollout = maker.laid_out(0, made)
            maker.complete(rollout)
            maker.sampler.check_gap(rollout.metrics["sampler/logp_gap"])
    trainer.watch.pause()
    return [completion for _, completion in found]


def learn(trainer: Trainer, rows: Sequence[Mapping[str, object]]) -> Metrics:
    """Take all steps of one rollout on trajectories, and return the metrics of the last step.

    Args:
        rows: like those in the files of `ppo.sampler = "rows"`.

    Raises ValueError for a row that cannot be trained on, and where groups or `run.steps` are too few for all steps.
    """
    stage = ppo_stage(trainer)
    maker, per_rollout = stage.maker, stage.table.steps_per_rollout
    limits = trainer.engine.module.config.vocab_size, stage.requirements.longest_example
    groups, given = defaultdict(list), []
    for n, row in enumerate(gather(rows)[0]):
        try:
            columns = read_trajectory(RawRow(0, "", row), {}, *limits)
        except BadRowError as error:
            raise ValueError(f"trajectory {n} {error}") from None
        groups[columns["_prompt"]].append(columns)
        given.append(columns["given"])
    if fault := unfit_advantages(np.array(given), stage.table):
        raise ValueError(fault)
    left = trainer.total_steps - trainer.step - -trainer.step % per_rollout
    if len(groups) < stage.table.minibatches or left < per_rollout:
        raise ValueError(
            f"there are {len(groups)} groups for {stage.table.minibatches} minibatches, and run.steps leaves "
            f"{max(0, left)} steps for the {per_rollout} of a rollout"
        )
    found = trajectories_of(groups.values(), maker.sampler.options.stop_tokens)
    check_fits(max(len(one.whole) for one in found), maker.tokens_per_microbatch)
    finish_rollout(trainer)
    maker.phase("rollout")
    maker.rollout = maker.laid_out(trainer.step // per_rollout, found)
    maker.complete(maker.rollout)
    for _ in range(per_rollout):
        metrics = trainer.train_step()
    trainer.watch.pause()
    return metrics


def finish_rollout(trainer: Trainer) -> None:
    """Take the steps of a rollout that a checkpoint has left."""
    per_rollout = ppo_stage(trainer).table.steps_per_rollout
    while trainer.step % per_rollout and trainer.step < trainer.total_steps:
        trainer.train_step()


def ppo_stage(trainer: Trainer) -> PpoStage:
    """Return the run's stage; ValueError if it is another one."""
    if not isinstance(trainer.stage, PpoStage):
        raise ValueError('a program samples and learns by stage = "ppo" alone')
    return trainer.stage
