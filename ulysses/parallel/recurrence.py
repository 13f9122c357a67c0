"""The order in which a recurrence runs over the documents of a pack: a suffix starts where its prefix has ended.

    packed rows     p p p a a a | b b | c c c     the second document leaves out p p p, which the first one holds
    tree level 0    p p p | c c c                 start from nothing
    tree level 1    a a a | b b                   start from the state after p p p

Shared prefixes make documents trees, whose levels run one after the other. A pack without them has one level.

Letters: T packed tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .ranges import Range, count_rows, rows_between, rows_of


class TreeLevel(NamedTuple):
    """Parts of documents that run together.

    rows: the packed rows of the parts, one after the other. bounds: where each part begins among them, and the end.
    cu_seqlens: the bounds on the device, int64. final_states: the parts whose last states later levels start from;
    None in the last level. initial_states: the place of each part's first state among the final states of all earlier
    levels; None in the first level, where every part starts from nothing.
    """

    rows: slice | Tensor
    bounds: list[int]
    cu_seqlens: Tensor
    initial_states: Tensor | None
    final_states: Tensor | None


class Copies(NamedTuple):
    """A pack in which each document that leaves out a prefix begins with copies of the prefix's last rows.

    bounds: where each document begins, and the end. cu_seqlens: the bounds on the device, int64. rows: the packed rows
    that the new pack consists of. originals: which rows of the new pack are no copies.
    """

    bounds: list[int]
    cu_seqlens: Tensor
    rows: slice | Tensor
    originals: slice | Tensor


class Recurrence:
    """What recurrences and the convolutions before them need of a pack, on its device; made once for all layers.

    tree_levels: the parts of documents in the order in which they run. `prefixes` gives, by a document's place in the
    pack, the packed rows that it leaves out.
    with_copies(count): the pack in which at most so many rows of each prefix are copied.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        prefixes: Mapping[int, Sequence[Range]],
        device: torch.device,
    ) -> None:
        self.documents, self.prefixes, self.device = [*pairwise(cu_seqlens)], prefixes, device
        self.tree_levels: list[TreeLevel] = []
        self.with_copies = cache(self._with_copies)
        # by a sequence's place: the row before which its prefix ends
        prefix_end = {i: ranges[-1][1] for i, ranges in prefixes.items()}
        prefix_ends = {*prefix_end.values()}
        # A part begins where a document begins, or where a prefix ends. Each is given by its packed rows and by the
        # row before which the state that it starts from ends; 0 is the state of nothing.
        state_of_start = dict.fromkeys(cu_seqlens, 0)
        state_of_start |= {cu_seqlens[i]: end for i, end in prefix_end.items()}
        level_after_state = {0: 0}
        levels: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for start, end in pairwise(sorted({*cu_seqlens, *prefix_ends})):
            state = state_of_start.get(start, start)
            level = level_after_state[state]
            levels[level].append((start, end, state))
            level_after_state[end] = level + 1
        state_places: dict[int, int] = {}  # among the final states of all levels so far
        for parts in levels.values():
            initial = [state_places[state] for _, _, state in parts if state]
            final = [i for i, (_, end, _) in enumerate(parts) if end in prefix_ends]
            for i in final:
                state_places[parts[i][1]] = len(state_places)
            rows: slice | Tensor = slice(None)
            if prefixes:
                rows = rows_of([(start, end) for start, end, _ in parts]).to(device)
            bounds = [0, *accumulate(end - start for start, end, _ in parts)]
            tree_level = TreeLevel(
                rows,
                bounds,
                cu_seqlens=torch.tensor(bounds, device=device),
                initial_states=torch.tensor(initial, device=device) if initial else None,
                final_states=torch.tensor(final, device=device) if final else None,
            )
            self.tree_levels.append(tree_level)

    def _with_copies(self, count: int) -> Copies:
        if not self.prefixes:
            level = self.tree_levels[0]
            return Copies(level.bounds, level.cu_seqlens, slice(None), slice(None))
        bounds, rows, originals = [0], [], []
        for i, (start, end) in enumerate(self.documents):
            prefix = self.prefixes.get(i, ())
            length = count_rows(prefix)
            document = [*rows_between(prefix, length - count, length), (start, end)]
            rows.append(rows_of(document))
            bounds.append(bounds[-1] + count_rows(document))
            originals.append(torch.arange(bounds[-1] - (end - start), bounds[-1]))
        tensors = torch.tensor(bounds), torch.cat(rows), torch.cat(originals)
        return Copies(bounds, *(x.to(self.device) for x in tensors))
