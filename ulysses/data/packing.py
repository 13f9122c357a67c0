"""Deal the examples of one optimizer step to data-parallel groups and micro-batches.

    examples of a step       7 3 3 2 9 1 4 ...            tokens each, whole examples only (pairs stay together)
    dp 0  micro-batches     [9 | 4 3 ]  [ ... ]           every micro-batch <= budget tokens,
    dp 1                    [7 | 3 2 1] [ ... ]           the same number of them on every group

Micro-batches with the same index run at the same time on all groups, so they get similar costs. The result is a pure
function of the arguments: every rank computes all of it and keeps its part.
"""

import random
from collections.abc import Sequence

ATTENTION_LENGTH = 50_000.0  # tokens at which attention costs as much as everything else: 12 times the model's width


def example_cost(
    sequence_lengths: Sequence[int], attention_length: float = ATTENTION_LENGTH
) -> float:
    """Relative cost of one example: linear in its tokens plus quadratic in each sequence's length."""
    return sum(length + length * length / attention_length for length in sequence_lengths)


def pack_step(
    lengths: Sequence[int],
    budget: int,
    dp: int,
    *,
    costs: Sequence[float] | None = None,
    shuffle: int | None = None,
) -> list[list[list[int]]]:
    """Return, for each of `dp` groups, its micro-batches as lists of positions in `lengths`.

    Args:
        lengths: tokens of each example (all its sequences together).
        budget: most tokens in a micro-batch.
        costs: relative work of each example; by default one sequence of its length.
        shuffle: seed that permutes order and places of the result (any result trains the same step).

    Every group gets the same number of micro-batches, as few as packing finds; some may be empty when examples are
    fewer than groups.

    Raises ValueError: an example is longer than the budget; says what to raise.
    """
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=None)
    if longest is not None and lengths[longest] > budget:
        raise ValueError(
            f"example {longest} of the step has {lengths[longest]} tokens but batch.tokens_per_microbatch is {budget}; "
            f"raise it to at least {lengths[longest]} or lower data.max_length"
        )
    work = (
        [float(c) for c in costs]
        if costs is not None
        else [example_cost([length]) for length in lengths]
    )
    count = max(1, -(-sum(lengths) // (budget * dp)))
    while (bins := _fill(lengths, work, budget, count * dp)) is None:
        count += 1
    return _deal(bins, work, dp, shuffle)


def _fill(
    lengths: Sequence[int], work: list[float], budget: int, bins: int
) -> list[list[int]] | None:
    """Put every example into one of `bins`: balanced by work if that fits, else tightly by length, else None."""
    by_work = sorted(range(len(lengths)), key=lambda i: (-work[i], i))
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for order, balanced in ((by_work, True), (by_length, False)):
        filled: list[list[int]] = [[] for _ in range(bins)]
        tokens, loads = [0] * bins, [0.0] * bins
        for i in order:
            fits = [b for b in range(bins) if tokens[b] + lengths[i] <= budget]
            if not fits:
                break
            best = min(fits, key=lambda b: (loads[b], b) if balanced else (-tokens[b], b))
            filled[best].append(i)
            tokens[best] += lengths[i]
            loads[best] += work[i]
        else:
            return filled
    return None


def _deal(
    bins: list[list[int]], work: list[float], dp: int, shuffle: int | None
) -> list[list[list[int]]]:
    """Give bins of similar work to the groups at the same index, the heavier one to the group with less so far."""
    load = [sum(work[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    groups: list[list[list[int]]] = [[] for _ in range(dp)]
    totals = [0.0] * dp
    for first in range(0, len(order), dp):
        for b, g in zip(order[first : first + dp], sorted(range(dp), key=lambda g: (totals[g], g))):
            groups[g].append(sorted(bins[b]))
            totals[g] += load[b]
    if shuffle is not None:
        generator = random.Random(shuffle)
        for group in groups:
            generator.shuffle(group)
            for micro_batch in group:
                generator.shuffle(micro_batch)
        generator.shuffle(groups)
    return groups
