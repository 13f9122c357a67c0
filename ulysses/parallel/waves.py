"""The order in which a recurrence runs over the documents of a pack: an answer starts where its prompt has ended.

    packed rows     p p p a a a | b b | c c c     the second document leaves out p p p, which the first one holds
    wave 0          p p p | c c c                 start from nothing
    wave 1          a a a | b b                   start from the state after p p p

A pack without shared prompts is one wave of all its documents.

Letters: T packed tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]


class Wave(NamedTuple):
    """Parts of documents that run together.

    rows: the packed rows of the parts, one after the other. bounds: where each part begins among them, and the end.
    cu_seqlens: the same on the device, int64. starts: of each part, the place of its first state among those that the
    waves before have handed on; None in the first wave, where all start from nothing. hands_on: the parts whose last
    states later waves start from; None in the last wave.
    """

    rows: slice | Tensor
    bounds: list[int]
    cu_seqlens: Tensor
    starts: Tensor | None
    hands_on: Tensor | None


def make_waves(
    cu_seqlens: Sequence[int], prefixes: Mapping[int, Range], device: torch.device
) -> list[Wave]:
    """Return the waves of a pack's documents; `prefixes` are the packed rows that some of them leave out."""
    ends = {end for _, end in prefixes.values()}
    before_first = {
        first: prefixes.get(i, (0, 0))[1] for i, first in enumerate(cu_seqlens[:-1])
    }
    level_after: dict[int, int] = {0: 0}  # of what starts behind a packed row
    # of parts: their rows, and the end of the rows that each comes after
    levels: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for start, end in pairwise(sorted({*cu_seqlens, *ends})):
        before = before_first.get(start, start)
        levels[level := level_after[before]].append((start, end, before))
        level_after[end] = level + 1
    places: dict[int, int] = {}
    waves = []
    for level, parts in levels.items():
        starts = [places[before] for *_, before in parts if level]
        hands_on = [i for i, (_, end, _) in enumerate(parts) if end in ends]
        for i in hands_on:
            places[parts[i][1]] = len(places)
        spans = [(start, end) for start, end, _ in parts]
        rows: slice | Tensor = slice(None)
        if prefixes:
            rows = torch.cat([torch.arange(*span) for span in spans]).to(device)
        bounds = [0, *accumulate(end - start for start, end in spans)]
        cu, *others = (torch.tensor(x, device=device) for x in (bounds, starts, hands_on))
        given = (x if len(x) else None for x in others)
        waves.append(Wave(rows, bounds, cu, *given))
    return waves


class Recurrence:
    """What recurrences and the convolutions before them need of a pack, on its device; made once for all layers.

    waves: the documents in their order.
    """

    def __init__(
        self, cu_seqlens: Sequence[int], prefixes: Mapping[int, Range], device: torch.device
    ) -> None:
        self.waves = make_waves(cu_seqlens, prefixes, device)
        self._pack = [*cu_seqlens], prefixes, device
        self.with_copies = cache(self._with_copies)

    def _with_copies(self, count: int) -> tuple[Tensor, slice | Tensor, slice | Tensor]:
        """Return a pack in which what shares a prompt begins with copies of the prompt's last `count` rows.

        That is cu_seqlens of this pack, the packed rows that it consists of, and which of them are no copies.
        """
        cu_seqlens, prefixes, device = self._pack
        if not prefixes:
            return self.waves[0].cu_seqlens, slice(None), slice(None)
        bounds = torch.tensor(cu_seqlens)
        shared = torch.tensor([prefixes.get(i, (0, 0)) for i in range(len(bounds) - 1)])
        copies = shared.diff()[:, 0].clamp(max=count)
        lengths = bounds.diff() + copies
        ends = lengths.cumsum(0)
        # of every row: where its document begins, where the prompt ends, and the document's first row that is no copy
        begin, end, first = (
            x.repeat_interleave(lengths)
            for x in (bounds[:-1], shared[:, 1], ends - bounds.diff())
        )
        place = torch.arange(len(first)) - first
        rows = torch.where(place < 0, end, begin) + place
        found = torch.cat([bounds[:1], ends]), rows, (place >= 0).nonzero()[:, 0]
        cu, all_rows, originals = (x.to(device) for x in found)
        return cu, all_rows, originals
