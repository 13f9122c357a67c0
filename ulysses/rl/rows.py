"""Rollouts of trajectories that were drawn elsewhere, a group of rows for each prompt (ppo.sampler = "rows")."""

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ulysses.config.stage_sections import PpoSection
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.trajectory import Trajectory

Columns = Mapping[str, Any]  # of a row, as data/read/trajectories.py names them


class TrajectoryGroups:
    """The groups of a dataset of trajectories, with as much of the face of a dataset as a StepLoader needs.

    members: the numbers of each group's rows, wherever they stand.
    lengths: the tokens of each group.
    """

    def __init__(self, rows: TokenizedDataset) -> None:
        self.rows, ids = rows, rows.columns["prompt_id"]
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        self.members = np.split(order, starts[1:])
        self.lengths = np.add.reduceat(rows.lengths[order], starts)
        self.sources = rows.sources[[each[0] for each in self.members]]
        self.source_weights, self.source_names = rows.source_weights, rows.source_names

    def __len__(self) -> int:
        return len(self.members)

    def trajectories(
        self, indices: Iterable[int], stop_tokens: Collection[int]
    ) -> list[Trajectory]:
        """Return the trajectories of these groups."""
        groups = ([*map(self._columns, self.members[i].tolist())] for i in indices)
        return trajectories_of(groups, stop_tokens)

    def _columns(self, row: int) -> Columns:
        example = self.rows[row]
        whole = example.sequences[0]
        arrays = {"tokens": whole.tokens, "weights": whole.loss_weights}
        return {**arrays, **whole.token_columns, **example.columns}

    def sizes(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the rows of these groups, and how many more each has in common with another, [N, 1]."""
        room = sys.maxsize if self.rows.share_prompts else 0
        found = self.trajectories(indices, ())
        rollout = Rollout.of(0, found, tokens_per_microbatch=room, share_drawn=False)
        return rollout.lengths[:, None], rollout.prefixes[:, None]


def trajectories_of(
    groups: Iterable[list[Columns]], stop_tokens: Collection[int]
) -> list[Trajectory]:
    """Return the rows of groups as trajectories, each up to its last trained token.

    Args:
        stop_tokens: a trajectory that ends with one of them has ended by itself.
    """
    found: list[Trajectory] = []
    names = "tokens", "token_logps", "token_advantages", "weights"
    for group, rows in enumerate(groups):
        for row in rows:
            start, last = np.flatnonzero(row["weights"])[[0, -1]]
            after = (row[name][start : last + 1].tolist() for name in names)
            tokens, logps, advantages, weights = after
            one = Trajectory(
                row["tokens"][:start].tolist(),
                tokens,
                logps,
                [*map(bool, weights)],
                tokens[-1] in stop_tokens,
                group=group,
                episode=len(found),
                score=row["reward"],
                advantages=advantages if row["given"] else [],
            )
            found.append(one)
    return found


def unfit_rows(groups: int, given: np.ndarray, ppo: PpoSection) -> str:
    """Return why rows of so many groups, of which these have advantages, cannot be trained on, or nothing."""
    compares = ppo.compares_answers and not given.any()
    if compares and 0 < groups == len(given):
        return (
            f'ppo.advantage = "{ppo.advantage}" compares the rows of a group but every group has one row; give one '
            "group to the rows that answer the same"
        )
    in_reward = ppo.missing_eos_penalty or (ppo.kl_coefficient and ppo.kl_in == "reward")
    if not given.any() or (given.all() and not ppo.needs_value and not in_reward):
        return ""
    return (
        f"{int(given.sum())} of {len(given)} rows have advantages, which train no value and contain no KL and no "
        'penalty; give all or none of them, and set ppo.advantage to another one than "gae", ppo.kl_coefficient = 0 or '
        'ppo.kl_in = "loss" with k3, and ppo.missing_eos_penalty = 0'
    )
