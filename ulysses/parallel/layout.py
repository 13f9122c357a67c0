"""Which rank holds which tokens, heads and query rows, and the index plans of a batch that follow from it.

    sp = U * R ranks, U = gcd(sp, query heads); rank s = r * U + u has head block u and row set r.

                       token shards                   attention
                  (linear layers, losses)   (all rows of set r, H/U heads, every key)

        r = 0   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 0
        r = 1   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 1

Queries and outputs travel between the U ranks of one line of this picture; keys and values go to every rank that
attends to them. R = 1 is plain Ulysses: one row set and contiguous shards.

With R > 1 all row sets have equally many tokens and the same causal cost. They are cut from the pack like pieces of a
necklace: bend the remaining tokens into a circle, take the window of T/R tokens that costs the mean of all windows (one
exists, because cost changes gradually from window to window), close the circle and repeat. For one long sequence this
gives the nested zigzag

        [ 3 | 2 | 1 | 0     0 | 1 | 2 | 3 ]

and for any pack at most 2R - 1 arcs in total. An arc is contiguous in the pack, so its attention is one kernel call on
contiguous query rows and a contiguous range of keys. These are whole documents, except that the first one may start in
the middle (then it has fewer queries than keys, and the causal mask is aligned bottom-right) and the last one may end
early. No key is copied for a second arc. Positions travel with their tokens, so the rest of the engine does not notice
the order.

Letters: T packed tokens (tail included), S tokens on this rank, N sequences, H query heads, K kv heads, U head-parallel
and R row-parallel size.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from .mesh import ParallelMesh

Range = tuple[int, int]
FAN_IN = 64  # values that one step of a segment sum adds up


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to the device; copies to a GPU go through pinned memory and do not make the host wait."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# --- heads -------------------------------------------------------------------------------------------------------


class HeadLayout(NamedTuple):
    """Heads on one rank after the exchange: `query` query heads, `key` key heads and as many value heads.

    Kernels need the same number of query heads for every key head. `repeat` consecutive slots of the U * key slots that
    are sent hold the same kv head: slot j is kv head j // repeat. It is 1 unless there are fewer kv heads than U, or a
    block of query heads covers parts of several kv groups.
    """

    query: int
    key: int
    repeat: int


def head_layout(num_heads: int, num_kv_heads: int, head_parallel_size: int) -> HeadLayout:
    """Split the query heads into equal consecutive blocks and find the kv heads that each block needs.

    Raises ValueError if the kv heads do not divide the query heads, or if the blocks would be unequal.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
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


def row_sets(
    cu_seqlens: Tensor, row_parallel_size: int, prefix_lengths: Tensor | int = 0
) -> list[list[Range]]:
    """Deal the packed rows to R row sets of equal length and equal causal cost, each a list of sorted arcs.

    `cu_seqlens` [N + 1] is on the host and covers the tail; its last entry is a multiple of R * U. The rows of
    sequence i see `prefix_lengths[i]` rows of another one too.
    """
    total = int(cu_seqlens[-1])
    if row_parallel_size == 1:
        return [[(0, total)]]
    size = total // row_parallel_size
    starts = (cu_seqlens[:-1] - prefix_lengths).long()
    starts = starts.repeat_interleave(cu_seqlens.diff().long())
    left = torch.arange(total)  # the rows that are not dealt yet, as a circle
    costs = left - starts + 1  # keys that each of them sees
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
    # Of the windows within 0.05% take the first: where it starts at the circle's beginning, it cuts fewer documents.
    return int(error.clamp(min=target // 2000).argmin())


def _arcs(rows: Tensor) -> list[Range]:
    """Write sorted row numbers as contiguous ranges."""
    bounds = [0, *(1 + torch.nonzero(rows.diff() != 1).flatten()).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(bounds)]


def rows_of(ranges: Sequence[Range]) -> Tensor:
    """List the rows of packed ranges, in order: int64 on the host."""
    return torch.cat([torch.arange(a, b) for a, b in ranges])


def shard_ranges(sets: list[list[Range]], sp_rank: int, head_parallel_size: int) -> list[Range]:
    """Return the packed ranges whose tokens rank r * U + u holds, in order: the u-th equal part of row set r."""
    row_set, part = divmod(sp_rank, head_parallel_size)
    return _arcs(rows_of(sets[row_set]).chunk(head_parallel_size)[part])


# --- the plan of attention ---------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The documents of one kernel call: queries cu_q[i]:cu_q[i+1] of document i attend to keys cu_k[i]:cu_k[i+1].

    Causal masks are aligned bottom-right: the last query sees the last key. `bounds` has the same numbers on the host.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    bounds: Sequence[list[int]] | None = None


class VarlenCall(NamedTuple):
    """One kernel call: some of this rank's query rows, the packed keys that they need, and the documents."""

    rows: slice | Tensor
    keys: slice | Tensor
    segments: Segments


# A document of a kernel call: its query rows on this rank and its packed keys.
Document = tuple[list[Range], list[Range]]


@dataclass(frozen=True)
class AttentionPlan:
    """How this rank's tokens are exchanged and which kernel calls its attention makes.

    A plan is made once per batch on the host, moved to the device once and used by every layer. It knows tokens and
    rows but not heads, so models with different head counts (a policy and a reward model) share it.

    calls[causal]: one call per arc of this rank's row set, for True with a causal mask and for False without. A causal
    call leaves out the keys after the arc's end; the other has whole documents.
    prefix_calls: calls without a mask from branches' rows to the prefixes that they share, to be joined with the causal
    ones. Within a call no row and no key comes twice, and no two of them have the same key.
    unshared: of every arc, the documents of a causal call that attends to copies of the prefixes instead; empty on all
    ranks if no sequence of the pack has a prefix.
    pieces: the packed ranges of every row set; its U ranks hold equal parts of them, one after the other.
    batch: 1 for a pack; for a dense batch its number of sequences, each of which is cut over all ranks.
    """

    mesh: ParallelMesh
    total: int
    documents: int
    calls: dict[bool, list[VarlenCall]]
    pieces: tuple[tuple[Range, ...], ...]
    batch: int = 1
    prefix_calls: tuple[VarlenCall, ...] = ()
    unshared: tuple[list[Document], ...] = ()

    @property
    def local_tokens(self) -> int:
        return self.total // self.mesh.sequence_parallel_size

    def unshared_calls(self) -> list[VarlenCall]:
        """Return causal calls that need no `prefix_calls`, for a kernel whose results cannot be joined."""
        device = self.calls[True][0].segments.cu_q.device
        return [_call(documents, device) for documents in self.unshared]


def packed_plan(
    cu_seqlens: Tensor,
    sets: list[list[Range]],
    mesh: ParallelMesh,
    device: torch.device | str,
    batch: int = 1,
    prefixes: tuple[Tensor, Tensor] | None = None,
    tail: bool = False,
) -> AttentionPlan:
    """Plan the attention of a pack whose rows were dealt as `sets`; `cu_seqlens` is on the host and covers the tail.

    `tail` says that the last entry is a tail. After a single document causal calls take it as a part of that, which no
    row of the document sees, so that kernels for one document may be used. `prefixes` says how many rows of which
    sequence come before those of each sequence: lengths [N] and owners [N].
    """
    cu, row = cu_seqlens.tolist(), 0
    merged = tail and len(cu) == 3
    if merged:
        del cu[1]
    shared: dict[int, list[Range]] = {}  # the rows of every branch's prefix
    for i, (length, owner) in enumerate(zip(*(x.tolist() for x in prefixes or ()))):
        if length:
            shared[i] = [(cu[owner], cu[owner] + length)]
    calls: dict[bool, list[VarlenCall]] = {True: [], False: []}
    # where an owner starts: the prefix's end and the rows of each of its branches
    trees: dict[int, list[tuple[int, Range]]] = {}
    unshared: list[list[Document]] = []
    for a, b in sets[mesh.row_set]:
        causal: list[Document] = []
        alone: list[Document] = []
        for i in range(bisect_right(cu, a) - 1, bisect_left(cu, b)):
            low, high = max(a, cu[i]), min(b, cu[i + 1])
            rows, prefix = (row + low - a, row + high - a), shared.get(i, [])
            causal.append(([rows], [(cu[i], high)]))
            alone.append(([rows], [*prefix, (cu[i], high)]))
            for start, end in prefix:
                trees.setdefault(start, []).append((end, rows))
        calls[True].append(_call(causal, device))
        whole = [*causal[:-1], ([rows], [(cu[i], cu[i + 1])])]
        calls[False].append(calls[True][-1] if b in cu else _call(whole, device))
        unshared.append(alone)
        row += b - a
    if merged:
        calls[False] = packed_plan(cu_seqlens, sets, mesh, device).calls[False]
    return AttentionPlan(
        mesh=mesh,
        total=cu[-1],
        documents=len(cu) - 1,
        calls=calls,
        pieces=tuple(map(tuple, sets)),
        batch=batch,
        prefix_calls=tuple(_call(documents, device) for documents in _prefix_documents(trees)),
        unshared=tuple(unshared) if shared else (),
    )


def _prefix_documents(trees: dict[int, list[tuple[int, Range]]]) -> list[list[Document]]:
    """Return the documents of every prefix call, from the prefix's end and the rows of each owner's branches.

    All branches of one owner attend to the rows that all of them share in one document; where some share more, a
    document of the next call has the rest.
    """
    found = [
        [
            ([rows for end, rows in branches if end >= high], [(low, high)])
            for low, high in pairwise(sorted({start, *(end for end, _ in branches)}))
        ]
        for start, branches in trees.items()
    ]
    return [list(filter(None, documents)) for documents in zip_longest(*found)]


def _call(documents: list[Document], device: torch.device | str) -> VarlenCall:
    indices: list[slice | Tensor] = []
    sizes: list[list[int]] = []  # of every document
    for side in zip(*documents):  # their query rows, their keys
        ranges = [part for document in side for part in document]
        if all(first[1] == second[0] for first, second in pairwise(ranges)):
            indices.append(slice(ranges[0][0], ranges[-1][1]))
        else:
            indices.append(to_device(rows_of(ranges), device))
        sizes.append([sum(b - a for a, b in document) for document in side])
    bounds = [[0, *accumulate(x)] for x in sizes]
    cu_q = to_device(torch.tensor(bounds[0], dtype=torch.int32), device)
    cu_k = cu_q
    if bounds[0] != bounds[1]:
        cu_k = to_device(torch.tensor(bounds[1], dtype=torch.int32), device)
    segments = Segments(cu_q, cu_k, max(sizes[0]), max(sizes[1]), bounds)
    return VarlenCall(indices[0], indices[1], segments)


def dense_plan(
    batch_size: int, local_tokens: int, mesh: ParallelMesh, device: torch.device | str
) -> AttentionPlan:
    """Plan the classic layout [B, S/P, ...]: B sequences of equal length, each cut into P contiguous shards.

    With R > 1 the row sets are contiguous too, so the result is exact but the ranks have unequal causal work. The work
    is balanced in batches made by `pack_shard`.
    """
    rows, length = mesh.row_parallel_size, local_tokens * mesh.sequence_parallel_size
    total = batch_size * length
    # with whole sequences one kernel call serves all of them
    share = total if rows == 1 else length // rows
    sets = [
        [(start, start + share) for start in range(r * share, total, rows * share)]
        for r in range(rows)
    ]
    return packed_plan(torch.arange(batch_size + 1) * length, sets, mesh, device, batch_size)


def device_plan(
    cu_seqlens: Tensor, max_seqlen: int | None, local_tokens: int, mesh: ParallelMesh
) -> AttentionPlan:
    """Plan from cu_seqlens on the device. With R = 1 and max_seqlen given, the host does not wait for the device."""
    ranks, rows = mesh.sequence_parallel_size, mesh.row_parallel_size
    total = local_tokens * ranks
    if rows > 1 or max_seqlen is None or cu_seqlens.device.type == "cpu":
        host = cu_seqlens.cpu()
        if int(host[-1]) != total:
            raise ValueError(
                f"cu_seqlens ends at {int(host[-1])} but the {ranks} ranks hold {total} tokens; "
                "it must describe the whole pack, with an entry for padding"
            )
        return packed_plan(host, row_sets(host, rows), mesh, cu_seqlens.device)
    bounds = cu_seqlens.int()
    segments = Segments(bounds, bounds, max_seqlen, max_seqlen)
    calls = [VarlenCall(slice(0, total), slice(0, total), segments)]
    return AttentionPlan(
        mesh, total, cu_seqlens.numel() - 1, {True: calls, False: calls}, (((0, total),),)
    )


# --- the plan of sums over sequences -----------------------------------------------------------------------------


def sum_levels(
    sequence_ids: Tensor, num_sequences: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Plan sums over the sequences of a rank's tokens (host ids [S], sorted; ids from N on are left out).

    Returns gather indices [rows, <= FAN_IN] for one level after the other; an index one past the end reads zero. The
    first level sums tokens to partial sums, the last one ends in N sums. Such a tree is accurate in float32 and gives
    the same bits in every run.
    """
    count = torch.bincount(sequence_ids, minlength=num_sequences + 1)[:num_sequences]
    levels: list[Tensor] = []
    size = sequence_ids.numel()
    longest = max(count.tolist(), default=1)
    while not levels or longest > 1:
        width = max(1, min(FAN_IN, longest))
        rows = (-(-count // width)).clamp(min=1)
        # the sum that each row is a part of
        of = torch.arange(len(rows)).repeat_interleave(rows)
        within = torch.arange(len(of)) - (rows.cumsum(0) - rows)[of]
        offset = within[:, None] * width + torch.arange(width)
        first = (count.cumsum(0) - count)[of, None]
        levels.append(
            to_device(torch.where(offset < count[of, None], first + offset, size), device)
        )
        count, size, longest = rows, offset.shape[0], -(-longest // width)
    return tuple(levels)
