"""What a rollout is made of: token sequences that the policy has drawn, wholly or in parts.

prompt          tokens
[ p p p p ]     [ a a a . . t t . . a a a . ]     a: drawn by the policy (`sampled`), and trained
                                                  t: told to it between its turns, as a tool's result is

The trajectories of a group are a tree: they share a prompt, and branches of an episode its first turns. In depth-first
order each one leaves out what it has in common with the one before it (parallel/batch.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, starmap
from operator import index
from typing import SupportsIndex

import numpy as np

# a branching point costs every layer a kernel call, about as much as so many tokens that are computed again
FEWEST_SHARED = 64


@dataclass
class Trajectory:
    """A prompt with what came after it.

    prompt: tokens, none of which is trained.
    tokens, logps, sampled: of what came after it, one entry for each token: the token, the log-probability that the
        sampler gave it, and whether the policy has drawn it. The others are not trained, and their logps mean nothing.
    ended: whether it ended by itself and was not cut.
    group: trajectories with the same number are compared with each other; by default they answer the same prompt.
    episode: the branches of one episode have the same number, and one score.
    row: the number of the data's row.
    scores, score: by the names of the rewards, and their weighted sum.
    advantages: one for each of `tokens` if they are given, and not computed from the scores.
    """

    prompt: list[int]
    tokens: list[int]
    logps: list[float]
    sampled: list[bool]
    ended: bool
    group: int = 0
    episode: int = 0
    row: int = 0
    score: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)

    @cached_property
    def whole(self) -> np.ndarray:
        """All tokens, int32."""
        return np.array([*self.prompt, *self.tokens], np.int32)

    @cached_property
    def drawn(self) -> np.ndarray:
        """The places in the whole sequence at which the policy has drawn a token."""
        return np.flatnonzero(self.sampled) + len(self.prompt)


def prompt_tokens(prompt: Iterable[SupportsIndex], vocabulary: int, name: str) -> list[int]:
    """Return the tokens of a program's prompt; ValueError, which names it, unless the policy knows all of them."""
    try:
        tokens = [*map(index, prompt)]
    except TypeError:  # no list of whole numbers
        tokens = []
    if not tokens or not all(0 <= token < vocabulary for token in tokens):
        raise ValueError(f"{name} should have tokens, and they are from 0 to {vocabulary - 1}")
    return tokens


def episodes_of(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Return the branches of every episode of a rollout."""
    episodes: dict[int, list[Trajectory]] = {}
    for one in trajectories:
        episodes.setdefault(one.episode, []).append(one)
    return [*episodes.values()]


def depth_first(group: list[Trajectory], share_drawn: bool) -> list[tuple[Trajectory, int]]:
    """Order the trajectories of a group; give each with how many first tokens it shares with the one before it.

    Sorting whole sequences gives a depth-first order; where it shares no more, the given order stays.

    Args:
        share_drawn: tokens that a trajectory has drawn itself count too, where they are enough.
    """

    def in_common(before: Trajectory, after: Trajectory) -> int:
        count, first = min(len(before.whole), len(after.whole)), int(after.drawn[0])
        count = int((before.whole[:count] == after.whole[:count]).cumprod().sum())
        enough = share_drawn and count - first >= FEWEST_SHARED
        return count if enough else min(count, first)

    orders = group, sorted(group, key=lambda one: one.prompt + one.tokens)
    found = [[*zip(order, [0, *starmap(in_common, pairwise(order))])] for order in orders]
    return max(found, key=lambda pairs: sum(count for _, count in pairs))
