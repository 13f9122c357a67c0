"""The order in which a recurrence runs over the documents of a pack: an answer starts where its prompt has ended.

    packed rows     p p p a a a | b b | c c c     the second document leaves out p p p, which the first one holds
    wave 0          p p p | c c c                 start from nothing
    wave 1          a a a | b b                   start from the state after p p p

A pack without shared prompts is one wave of all its documents.

Letters: T packed tokens.
"""

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
    cu_seqlens: the same on the device, int64. starts: of each part, the place of its first state among a state of zeros
    and those that the waves before have handed on; None if all start from nothing. hands_on: the parts whose last
    states later waves start from; None if there are none.
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
    if not prefixes:
        rows, on_device = slice(0, cu_seqlens[-1]), torch.tensor(cu_seqlens, device=device)
        return [Wave(rows, [*cu_seqlens], on_device, None, None)]
    cuts: dict[
        int, set[int]
    ] = {}  # of documents that others share the beginning of, by their first row
    for start, end in prefixes.values():
        cuts.setdefault(start, set()).add(end)
    levels: list[list[tuple[Range, int]]] = [[] for _ in range(2 + len(prefixes))]
    level_after: dict[int, int] = {0: 0}  # of what starts behind a packed row
    for place, (first, last) in enumerate(pairwise(cu_seqlens)):
        before = prefixes.get(place, (0, 0))[1]  # the end of the rows before it
        for start, end in pairwise(sorted({first, last, *cuts.get(first, ())})):
            level = level_after[before]
            levels[level].append(((start, end), before))
            level_after[end], before = level + 1, end
    places, waves, wanted = {0: 0}, [], set().union(*cuts.values())
    for parts in filter(None, levels):
        starts = [places[before] for _, before in parts]
        hands_on = [i for i, ((_, end), _) in enumerate(parts) if end in wanted]
        for i in hands_on:
            places[parts[i][0][1]] = len(places)
        bounds = [0, *accumulate(end - start for (start, end), _ in parts)]
        all_rows = torch.cat([torch.arange(*rows) for rows, _ in parts])
        waves.append(
            Wave(
                all_rows.to(device),
                bounds,
                torch.tensor(bounds, device=device),
                torch.tensor(starts, device=device) if any(starts) else None,
                torch.tensor(hands_on, device=device) if hands_on else None,
            )
        )
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
        self.rows_before = cache(self._rows_before)
        self.with_copies = cache(self._with_copies)

    def _rows_before(self, count: int) -> Tensor:
        """Return for each packed row the rows of the `count` tokens before it, the nearest first [T, count].

        T stands for none: before the beginning of a document that shares no prompt.
        """
        bounds, prefixes, device = self._pack
        lengths, total = torch.tensor(bounds).diff(), bounds[-1]
        shared = torch.tensor([prefixes.get(i, (0, 0)) for i in range(len(lengths))])
        begin, low, high = (
            x.repeat_interleave(lengths)[:, None]
            for x in (torch.tensor(bounds[:-1]), *shared.unbind(1))
        )
        found = torch.arange(total)[:, None] - torch.arange(1, count + 1)
        of_prefix = found - begin + high
        of_prefix = of_prefix.masked_fill((of_prefix < low) | (low == high), total)
        return torch.where(found >= begin, found, of_prefix).to(device)

    def _with_copies(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a pack in which what shares a prompt begins with copies of the prompt's last `count` rows.

        That is cu_seqlens of this pack, the packed rows that it consists of, and which of them are no copies.
        """
        bounds, prefixes, device = self._pack
        rows, kept, lengths = [], [], [0]
        for place, (first, last) in enumerate(pairwise(bounds)):
            start, end = prefixes.get(place, (0, 0))
            copies = range(max(start, end - count), end)
            kept.append(torch.arange(last - first) + sum(lengths) + len(copies))
            rows += [torch.arange(copies.start, copies.stop), torch.arange(first, last)]
            lengths.append(len(copies) + last - first)
        found = torch.tensor(lengths).cumsum(0), torch.cat(rows), torch.cat(kept)
        cu_seqlens, all_rows, originals = (x.to(device) for x in found)
        return cu_seqlens, all_rows, originals
