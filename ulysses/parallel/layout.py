"""Which rank holds which tokens, heads and query rows, and the index plans of a batch that follow from it.

    sp = U * R ranks, U = gcd(sp, query heads); rank s = r * U + u has head block u and row set r.

                       token shards                   attention
                  (linear layers, losses)   (all rows of set r, H/U heads, every key)

        r = 0   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 0
        r = 1   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 1

Queries and outputs travel between the U ranks of one line of this picture; keys and values go to every rank that
attends with them. R = 1 is plain Ulysses: one row set and contiguous shards.

With R > 1 all row sets have equally many tokens and the same causal cost. To deal a set, the remaining tokens are bent
into a circle; the set is the window of T/R tokens that costs the mean of all windows (one exists, because cost changes
gradually from window to window). The circle is closed for the next set. For one sequence of 8 tokens and R = 2:

        row             0   1   2   3   4   5   6   7
        cost            1   3   5   7   9  11  13  15     the keys that it sees, its own counted half; twice that
        windows of 4    from row 0 it is 16, from row 1 it is 24, from row 2 it is 32, half of the whole
        row set 0               x   x   x   x              one arc
        row set 1       x   x                   x   x      two arcs, 1 + 3 + 13 + 15 = 32

With any R one sequence gives such nested sets, and any pack at most 2R - 1 arcs in total. An arc is contiguous in the
pack, so its attention is one kernel call on contiguous query rows and a contiguous range of keys. An arc consists of
whole documents, except that the first one may start in the middle (then it has fewer queries than keys, and the causal
mask is aligned bottom-right) and the last one may end early. No key is copied for a second arc. Positions travel with
their tokens, so the rest of the engine does not notice the order.

A document is a sequence of the pack, or its tail. A sequence that continues another one is a suffix; the packed rows
that it leaves out, which earlier sequences hold, are its prefix (batch.py).

Letters: T packed tokens (tail included), S tokens on this rank, N sequences, H query heads, K kv heads, U head-parallel
and R row-parallel size.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .mesh import ParallelMesh
from .ranges import Range, count_rows, rows_between, rows_of

Device = torch.device | str
Tensors = Sequence[Tensor]
_WIDE = 16  # bytes that a GPU's thread moves at once


def to_device(tensor: Tensor, device: Device) -> Tensor:
    """Copy a host tensor to the device; copies to a GPU go through pinned memory and do not make the host wait."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_strided(target: Tensor, source: Tensor) -> None:
    """Copy between strided tensors of one dtype without recording a graph; `source` may be broadcast.

    torch moves strided tensors element by element. Where 16 bytes can be moved at once, bfloat16 heads copy 2.4 times
    as fast.
    """
    if _is_wide(target) and _is_wide(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


def contiguous(x: Tensor) -> Tensor:
    """Return x in contiguous memory without recording a graph; x itself if it is contiguous."""
    if x.is_contiguous():
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy_strided(out, x)
    return out


def _is_wide(x: Tensor) -> bool:
    """Tell whether the last axis can be read as elements of 16 bytes, on a device that has such elements."""
    sizes = (x.shape[-1], *x.stride()[:-1], x.storage_offset())
    aligned = all(size * x.element_size() % _WIDE == 0 for size in sizes)
    return aligned and x.stride(-1) == 1 and x.device.type in ("cpu", "cuda")


# --- heads -------------------------------------------------------------------------------------------------------


class HeadLayout(NamedTuple):
    """Heads on one rank after the exchange: `query` query heads, `key` key heads and as many value heads.

    Kernels need the same number of query heads for every key head. `repeat` consecutive slots of the U * key slots that
    are sent hold the same kv head: slot j is kv head j // repeat. `repeat` is 1 unless there are fewer kv heads than U,
    or a block of query heads covers parts of several kv groups.
    """

    query: int
    key: int
    repeat: int


def head_layout(num_heads: int, num_kv_heads: int, head_parallel_size: int) -> HeadLayout:
    """Split the query heads into equal consecutive blocks and find the kv heads that each block needs.

    Raises ValueError if the kv heads do not divide the query heads, or if the blocks would be unequal.
    """
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads} but must divide the {num_heads} query heads; "
            "set it to the model's number of key-value heads"
        )
    if num_heads % head_parallel_size:
        raise ValueError(
            f"the mesh splits heads {head_parallel_size} ways, which does not divide {num_heads} query heads; "
            f"construct it as ParallelMesh(..., num_heads={num_heads})"
        )
    block = num_heads // head_parallel_size
    group = num_heads // num_kv_heads
    # the longest run of query heads that never leaves one kv group
    ratio = math.gcd(block, group)
    return HeadLayout(query=block, key=block // ratio, repeat=group // ratio)


# --- tokens and query rows ---------------------------------------------------------------------------------------


def squares(length: Any, prefix_length: Any = 0, windows: Sequence[int | None] = ()) -> Any:
    """Return twice the pairs of a query and a key in the causal attention of documents, the mean over a model's layers.

    `windows` has an entry for every layer, None where a query sees all keys before it; it may be empty if no layer has
    a window. A document's rows also see the `prefix_length` rows of its prefix. `length` and `prefix_length` may be
    numbers, arrays or tensors. The diagonal counts half, so that a whole document without a window has length^2.
    """
    whole, layers = length + prefix_length, Counter(windows)
    total = length * (length + 2 * prefix_length)
    for window in filter(None, layers):
        # A window leaves out a triangle of queries and keys, whose tip belongs to the rows of the prefix.
        # the comparison counts as 1 or 0, of numbers, arrays and tensors alike
        triangle = (whole - window) * (whole > window)
        tip = (prefix_length - window) * (prefix_length > window)
        total = total - (triangle**2 - tip**2) * (layers[window] / len(windows))
    return total


def row_sets(
    cu_seqlens: Tensor,
    row_parallel_size: int,
    prefix_lengths: Tensor | int = 0,
    windows: Sequence[int | None] = (),
) -> list[list[Range]]:
    """Deal the packed rows to R row sets of equal length and equal causal cost, each a list of sorted arcs.

    `cu_seqlens` [N + 1] is on the host and covers the tail; its last entry is a multiple of R * U. The rows of
    sequence i also see the `prefix_lengths[i]` rows of its prefix. `windows` are those of the layers.
    """
    total = int(cu_seqlens[-1])
    if row_parallel_size == 1:
        return [[(0, total)]]
    size = total // row_parallel_size
    starts = (cu_seqlens[:-1] - prefix_lengths).long()
    starts = starts.repeat_interleave(cu_seqlens.diff().long())
    left = torch.arange(total)  # rows that are not dealt yet, as a circle
    costs = squares(1, left - starts, windows).long()
    sets = []
    for remaining in range(row_parallel_size, 1, -1):
        begin = _balanced_window(costs[left], size, remaining)
        taken = left.roll(-begin)[:size]
        left = left.roll(-begin)[size:].sort().values
        sets.append(_arcs(taken.sort().values))
    return [*sets, _arcs(left)]


def _balanced_window(costs: Tensor, size: int, remaining: int) -> int:
    """Find where in the circle of rows a window of `size` rows has 1/remaining of the whole cost."""
    before = torch.cat([costs.new_zeros(1), costs, costs[: size - 1]]).cumsum(0)
    target = int(costs.sum()) // remaining
    error = (before[size:] - before[:-size] - target).abs()
    # Of the windows within 0.05% take the first: one that starts at the circle's beginning cuts fewer documents.
    return int(error.clamp(min=target // 2000).argmin())


def _arcs(rows: Tensor) -> list[Range]:
    """Write sorted row numbers as contiguous ranges."""
    bounds = [0, *(1 + torch.nonzero(rows.diff() != 1).flatten()).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(bounds)]


def shard_ranges(sets: list[list[Range]], sp_rank: int, head_parallel_size: int) -> list[Range]:
    """Return the packed ranges whose tokens rank r * U + u holds, in order: the u-th equal part of row set r."""
    row_set, part = divmod(sp_rank, head_parallel_size)
    return _arcs(rows_of(sets[row_set]).chunk(head_parallel_size)[part])


# --- the plan of attention ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The part of a sequence that lies in one of a rank's ranges.

    whole: packed rows of the whole sequence. start, end: packed rows of the part. row: where it begins on this rank.
    """

    sequence: int
    whole: Range
    start: int
    end: int
    row: int

    @property
    def rows(self) -> Range:
        """The part's rows, counted on this rank."""
        return self.row, self.row + self.end - self.start


def sequence_parts(cu_seqlens: list[int], ranges: Iterable[Range]) -> list[list[Part]]:
    """Cut each of a rank's packed ranges where a new sequence begins."""
    parts_by_range, row = [], 0
    for begin, end in ranges:
        parts = []
        for i in range(bisect_right(cu_seqlens, begin) - 1, bisect_left(cu_seqlens, end)):
            first, last = cu_seqlens[i : i + 2]
            start, stop = max(begin, first), min(end, last)
            parts.append(Part(i, (first, last), start, stop, row))
            row += stop - start
        parts_by_range.append(parts)
    return parts_by_range


class DocumentBounds(NamedTuple):
    """The documents of one kernel call: queries cu_q[i]:cu_q[i+1] of document i attend to keys cu_k[i]:cu_k[i+1].

    Causal masks are aligned bottom-right: the last query sees the last key. `on_host` holds the numbers of cu_q and
    cu_k. Plans use one tensor as cu_q and cu_k where every document has as many queries as keys, so that kernels
    recognise this case without waiting for the device.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    on_host: Sequence[list[int]] | None = None


class VarlenCall(NamedTuple):
    """One kernel call: some of this rank's query rows, the packed keys that they need, and the documents."""

    rows: slice | Tensor
    keys: slice | Tensor
    documents: DocumentBounds
    causal: bool


Document = tuple[list[Range], list[Range]]  # its query rows on this rank, and its packed keys


@dataclass(frozen=True)
class AttentionPlan:
    """How this rank's tokens are exchanged and which kernel calls its attention makes.

    A plan is made once per batch on the host, moved to the device once and used by every layer. It knows tokens and
    rows but not heads, so models with different head counts (a policy and a reward model) share it.

    cu_seqlens [N + 1]: on the host, with an entry for the tail.
    row_sets: the packed ranges of every row set; its U ranks hold equal parts of them, one after the other.
    calls: one for each arc of this rank's row set; causal calls leave out the keys after the arc's end.
    prefix_calls: calls without a mask from the rows of suffixes to their prefixes, whose results are merged with those
        of `calls`. Within one of them no row and no key comes twice, and no two of them have the same key.
    prefixes: the packed rows of every suffix's prefix, by the suffix's place in the pack; the same on all ranks. Each
        range has the first rows of a sequence, so that two prefixes that have a row in common are alike before it.
    """

    mesh: ParallelMesh
    cu_seqlens: list[int]
    row_sets: list[list[Range]]
    calls: list[VarlenCall]
    prefix_calls: list[VarlenCall]
    prefixes: dict[int, list[Range]]

    @property
    def total(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def local_tokens(self) -> int:
        return self.total // self.mesh.sequence_parallel_size

    @property
    def device(self) -> torch.device:
        return self.calls[0].documents.cu_q.device

    @cached_property
    def longest(self) -> int:
        """The most tokens that a row sees without a window."""
        bounds = enumerate(pairwise(self.cu_seqlens))
        return max(b - a + count_rows(self.prefixes.get(i, ())) for i, (a, b) in bounds)

    def windowed(self, window: int) -> "AttentionPlan":
        """Return the plan of layers whose window cuts documents, which is another one if there are shared prefixes.

        Its calls let a suffix's rows see the end of the prefix and their own document's rows together, because the
        window reaches further back from an early row than from a late one.
        """
        if not self.prefixes:
            return self
        if window not in self._windowed:
            arcs = sequence_parts(self.cu_seqlens, self.row_sets[self.mesh.row_set])
            calls = _causal_calls(arcs, self.prefixes, window, self.device)
            self._windowed[window] = replace(self, calls=calls, prefix_calls=[])
        return self._windowed[window]

    @cached_property
    def _windowed(self) -> dict[int, "AttentionPlan"]:
        """The plans that `windowed` has made."""
        return {}

    @cached_property
    def recurrence(self) -> Any:
        """What layers of linear attention need of the pack, a Recurrence."""
        from .recurrence import Recurrence

        return Recurrence(self.cu_seqlens, self.prefixes, self.device)

    @cached_property
    def by_rank(self) -> slice | Tensor:
        """The packed rows in the order of the ranks that hold them."""
        return _end_to_end(self.row_sets, self.device)[0]

    @cached_property
    def unmasked(self) -> "AttentionPlan":
        """The plan with calls without a mask: every row attends to its whole sequence."""
        if self.prefixes:
            raise ValueError(
                "sequences that continue others need a causal mask; pack them whole"
            )
        arcs = sequence_parts(self.cu_seqlens, self.row_sets[self.mesh.row_set])
        whole = [[([part.rows], [part.whole]) for part in parts] for parts in arcs]
        return replace(self, calls=[varlen_call(x, self.device, causal=False) for x in whole])


def packed_plan(
    cu_seqlens: Tensor,
    sets: list[list[Range]],
    mesh: ParallelMesh,
    device: Device,
    prefixes: dict[int, list[Range]] | None = None,
    tail: bool = False,
) -> AttentionPlan:
    """Plan the attention of a pack whose rows were dealt as `sets`; `cu_seqlens` is on the host and covers the tail.

    `tail` says that the last entry is a tail. Causal calls take the tail of a single sequence as the sequence's end,
    which changes nothing for the rows before it, so that kernels for one document may be used. `prefixes` gives the
    packed rows of each suffix's prefix, by the suffix's place in the pack.
    """
    cu = cu_seqlens.tolist()
    document_bounds = [0, cu[-1]] if tail and len(cu) == 3 else cu
    arcs = sequence_parts(document_bounds, sets[mesh.row_set])
    prefixes = prefixes or {}
    return AttentionPlan(
        mesh=mesh,
        cu_seqlens=cu,
        row_sets=sets,
        calls=_causal_calls(arcs, {}, cu[-1], device),
        prefix_calls=_prefix_calls(chain(*arcs), prefixes, device) if prefixes else [],
        prefixes=prefixes,
    )


def _prefix_calls(
    parts: Iterable[Part], prefixes: dict[int, list[Range]], device: Device
) -> list[VarlenCall]:
    """Return the calls from all parts of suffixes to their prefixes, which are cut wherever one of them ends.

    The n-th call has the n-th piece of every prefix. Three suffixes have the first 2, 2 and 3 rows of one sequence as
    their prefixes, and a fourth one has those of the third and its first row:

        call 0     rows of all four suffixes           keys 0 1
        call 1     rows of the third and the fourth    keys     2
        call 2     rows of the fourth                  keys       the third one's first
    """
    read = [(part, prefixes[part.sequence]) for part in parts if part.sequence in prefixes]
    ends = sorted({end for _, ranges in read for _, end in ranges})
    # by the number of the call and the piece of prefixes: the rows that read it
    calls: dict[int, dict[Range, list[Range]]] = defaultdict(lambda: defaultdict(list))
    for part, ranges in read:
        cut = (
            [start, *ends[bisect_right(ends, start) : bisect_right(ends, end)]]
            for start, end in ranges
        )
        for number, piece in enumerate(chain(*map(pairwise, cut))):
            calls[number][piece].append(part.rows)
    return [
        varlen_call([(rows, [piece]) for piece, rows in call.items()], device, causal=False)
        for call in calls.values()
    ]


def _causal_calls(
    arcs: list[list[Part]], prefixes: dict[int, list[Range]], window: int, device: Device
) -> list[VarlenCall]:
    """Return the call of every arc, where suffixes may have keys of their prefixes in common.

    The keys of a part are those of its rows, and those that its first row sees through the window.
    """
    calls = []
    for parts in arcs:
        documents = []
        for part in parts:
            begin, reach = part.whole[0], part.start + 1 - window
            keys = [(max(begin, reach), part.end)]
            if prefix := prefixes.get(part.sequence):
                count = count_rows(prefix)
                keys = rows_between(prefix, count + reach - begin, count) + keys
            documents.append(([part.rows], keys))
        calls.append(varlen_call(documents, device, causal=True))
    return calls


def varlen_call(documents: list[Document], device: Device, *, causal: bool) -> VarlenCall:
    """Write documents as one kernel call, whose tensors are on the device."""
    rows, row_bounds = _end_to_end([rows for rows, _ in documents], device)
    keys, key_bounds = _end_to_end([keys for _, keys in documents], device)
    cu_q = cu_k = to_device(torch.tensor(row_bounds, dtype=torch.int32), device)
    if key_bounds != row_bounds:
        cu_k = to_device(torch.tensor(key_bounds, dtype=torch.int32), device)
    max_q, max_k = (max(b - a for a, b in pairwise(x)) for x in (row_bounds, key_bounds))
    bounds = DocumentBounds(cu_q, cu_k, max_q, max_k, (row_bounds, key_bounds))
    return VarlenCall(rows, keys, bounds, causal)


def _end_to_end(
    parts: Sequence[list[Range]], device: Device
) -> tuple[slice | Tensor, list[int]]:
    """Lay the ranges of all parts end to end; return a slice or an index of their rows, and where each part begins."""
    bounds = [0, *accumulate(map(count_rows, parts))]
    ranges = list(chain(*parts))
    if all(first[1] == second[0] for first, second in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1]), bounds
    return to_device(rows_of(ranges), device), bounds
