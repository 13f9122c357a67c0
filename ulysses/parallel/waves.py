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


class Copies(NamedTuple):
    """A pack in which what shares a prompt begins with copies of the prompt's last rows.

    bounds: where each document begins, and the end. cu_seqlens: the same on the device, int64. rows: the packed rows
    that it consists of. kept: which of its rows are no copies.
    """

    bounds: list[int]
    cu_seqlens: Tensor
    rows: slice | Tensor
    kept: slice | Tensor


class Recurrence:
    """What recurrences and the convolutions before them need of a pack, on its device; made once for all layers.

    waves: the documents in their order. `prefixes` are the packed rows that some of them leave out.
    with_copies(count): the pack whose copies are so many rows at most.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        prefixes: Mapping[int, tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.documents, self.prefixes, self.device = [*pairwise(cu_seqlens)], prefixes, device
        self.waves: list[Wave] = []
        self.with_copies = cache(self._with_copies)
        ends = {end for _, end in prefixes.values()}
        # by a document's first row: the end of the rows that it comes after
        before_first = dict.fromkeys(cu_seqlens, 0)
        before_first |= {cu_seqlens[i]: end for i, (_, end) in prefixes.items()}
        level_after: dict[int, int] = {0: 0}  # of what starts behind a packed row
        # of parts: their rows, and the end of the rows that each comes after
        levels: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for start, end in pairwise(sorted({*cu_seqlens, *ends})):
            before = before_first.get(start, start)
            levels[level := level_after[before]].append((start, end, before))
            level_after[end] = level + 1
        places: dict[int, int] = {}
        for level, parts in levels.items():
            starts = [places[before] for *_, before in parts if level]
            hands_on = [i for i, (_, end, _) in enumerate(parts) if end in ends]
            for i in hands_on:
                places[parts[i][1]] = len(places)
            rows: slice | Tensor = slice(None)
            if prefixes:
                rows = torch.cat([torch.arange(*part[:2]) for part in parts]).to(device)
            bounds = [0, *accumulate(end - start for start, end, _ in parts)]
            cu, *others = (torch.tensor(x, device=device) for x in (bounds, starts, hands_on))
            given = (x if len(x) else None for x in others)
            self.waves.append(Wave(rows, bounds, cu, *given))

    def _with_copies(self, count: int) -> Copies:
        if not self.prefixes:
            wave = self.waves[0]
            return Copies(wave.bounds, wave.cu_seqlens, slice(None), slice(None))
        bounds, rows, originals = [0], [], []
        for i, (start, end) in enumerate(self.documents):
            first, last = self.prefixes.get(i, (0, 0))
            copies = min(count, last - first)
            rows += [torch.arange(last - copies, last), torch.arange(start, end)]
            bounds.append(bounds[-1] + copies + end - start)
            originals.append(torch.arange(bounds[-1] - (end - start), bounds[-1]))
        tensors = torch.tensor(bounds), torch.cat(rows), torch.cat(originals)
        return Copies(bounds, *(x.to(self.device) for x in tensors))
