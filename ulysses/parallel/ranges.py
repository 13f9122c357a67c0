"""Ranges of packed rows: the first, and the one after the last."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Range = tuple[int, int]


def count_rows(ranges: Sequence[Range]) -> int:
    """Count the rows of packed ranges."""
    return sum(end - start for start, end in ranges)


def rows_of(ranges: Sequence[Range]) -> Tensor:
    """List the rows of packed ranges, in order: int64 on the host."""
    starts, ends = torch.tensor(ranges).T
    sizes = ends - starts
    # the difference between a row's number and its place in the list, which is the same for all rows of a range
    shift = starts - sizes.cumsum(0) + sizes
    return shift.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def rows_between(ranges: Iterable[Range], first: int, last: int) -> list[Range]:
    """Return rows `first` up to `last` of packed ranges, counted through all of them."""
    found = []
    for start, end in ranges:
        low, high = max(start, start + first), min(end, start + last)
        if low < high:
            found.append((low, high))
        first, last = first - (end - start), last - (end - start)
    return found
