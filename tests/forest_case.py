"""Random forests of sequences, for tests that compare them with their whole sequences."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ulysses.parallel.batch import Sequence


class Whole(NamedTuple):
    """A whole sequence, and the number of its tree."""

    sequence: Sequence
    tree: int


def forest(
    seed: int, vocabulary: int, *, trees: int = 3, branches: int = 7, longest: int = 90
) -> list[Whole]:
    """Draw trees of whole sequences: a branch continues any earlier one of its tree at any token, up to 5 deep.

    All tokens but a sequence's first may be trained, also those that others share. Weights are eighths, so that their
    sums are exact. The last tree is a single sequence.
    """
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    found = []
    for tree in range(trees):
        whole: list[Tensor] = []
        depths: list[int] = []
        for place in range(1 + branches * (tree < trees - 1)):
            tokens, depth = torch.empty(0, dtype=torch.int64), 0
            if place:
                # later ones twice as often, for depth
                parent = max(number(0, place - 1), number(0, place - 1))
                parent = parent if depths[parent] < 5 else 0
                least = 0 if number(0, 3) else len(whole[parent])
                tokens = whole[parent][: number(least, len(whole[parent]))]
                depth = depths[parent] + 1
            own = torch.randint(0, vocabulary, (number(1, longest),), generator=draw)
            whole.append(torch.cat([tokens, own]))
            depths.append(depth)
            weights = torch.randint(0, 9, (len(whole[-1]),), generator=draw) / 8
            weights *= torch.rand(len(weights), generator=draw) < 0.6
            found.append(Whole(Sequence(whole[-1], weights), tree))
    return found


def common(left: Tensor, right: Tensor) -> int:
    """Count the first tokens that two sequences have in common."""
    count = min(len(left), len(right))
    return int((left[:count] == right[:count]).long().cumprod(0).sum())


def as_trees(found: list[Whole]) -> list[Sequence]:
    """Return the sequences as a pack takes them: depth first, and who holds a token has the weights of all."""
    found = sorted(found, key=lambda one: (one.tree, one.sequence.tokens.tolist()))
    tokens = [one.sequence.tokens for one in found]
    weights = [one.sequence.loss_weights.clone() for one in found]
    shared = [0]
    for (one, other), same_tree in zip(pairwise(tokens), pairwise(w.tree for w in found)):
        shared.append(common(one, other) * (len({*same_tree}) == 1))
    for i in reversed(range(1, len(found))):
        weights[i - 1][1 : shared[i]] += weights[i][1 : shared[i]]
        weights[i][: shared[i]] = 0
    return [
        Sequence(t, w, prompt=one.tree, prompt_length=count)
        for one, t, w, count in zip(found, tokens, weights, shared)
    ]
