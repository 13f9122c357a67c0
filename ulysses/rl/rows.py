"""Rollouts of trajectories that were drawn elsewhere, a group of rows for each prompt (ppo.sampler = "rows")."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from ulysses.config.stage_sections import PpoSection
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.rl.trajectory import Trajectory


class TrajectoryGroups:
    """The groups of a dataset of trajectories, with as much of the face of a dataset as a StepLoader needs.

    lengths: the tokens of the rows, which are more than the groups.
    members: the rows of each group, wherever they stand.
    """

    def __init__(self, rows: TokenizedDataset) -> None:
        self.rows, self.lengths = rows, rows.lengths
        ids = rows.columns["prompt_id"]
        order = np.argsort(ids, kind="stable")
        self.members = np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)
        self.sources = rows.sources[[each[0] for each in self.members]]
        self.source_weights, self.source_names = rows.source_weights, rows.source_names

    def __len__(self) -> int:
        return len(self.members)

    @property
    def apart(self) -> Self:
        return self

    def trajectories(
        self, groups: Iterable[int], stop_tokens: Collection[int]
    ) -> list[Trajectory]:
        """Return the trajectories of these groups, which are numbered in their order."""
        found: list[Trajectory] = []
        for group, index in enumerate(groups):
            for n in self.members[index].tolist():
                row, numbers = self.rows[n].sequences[0], self.rows[n].columns
                per_token = {f"token_{name}": x for name, x in row.token_columns.items()}
                columns = {"tokens": row.tokens, "weights": row.loss_weights, **per_token}
                one = trajectory_of(columns | numbers, stop_tokens)
                found.append(replace(one, group=group, episode=len(found), row=n))
        return found


def trajectory_of(columns: Mapping[str, Any], stop_tokens: Collection[int]) -> Trajectory:
    """Return what `read_trajectory` has read as a trajectory, which ends with its last trained token.

    Args:
        stop_tokens: a trajectory that ends with one of them has ended by itself.
    """
    start, end = np.flatnonzero(columns["weights"])[[0, -1]]
    names = "tokens", "token_logps", "weights", "token_advantages"
    tokens, logps, mask, given = (columns[name][start : end + 1].tolist() for name in names)
    prompt, ended = columns["tokens"][:start].tolist(), tokens[-1] in stop_tokens
    found = Trajectory(
        prompt, tokens, logps, [*map(bool, mask)], ended, score=columns["reward"]
    )
    return replace(found, advantages=given) if columns["given"] else found


def unfit_advantages(given: np.ndarray, ppo: PpoSection) -> str:
    """Return why rows, of which these have advantages, cannot be trained on, or nothing."""
    in_reward = ppo.kl_coefficient and ppo.kl_in == "reward"
    if not given.any() or (given.all() and not ppo.advantage == "gae" and not in_reward):
        return ""
    return (
        f"{int(given.sum())} of {len(given)} rows have advantages, which train no value and contain no KL; give all "
        'or none of them, and set ppo.advantage to another one than "gae", and ppo.kl_in = "loss" or '
        "ppo.kl_coefficient = 0"
    )
