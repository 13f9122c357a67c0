"""Who holds which tokens, heads and query rows, for any head count and any degree. Pure functions of host integers.

    sp = U * R ranks, U = gcd(sp, query heads); rank s = r * U + u has head block u and row set r.

                       token shards                   attention
                  (linear layers, losses)   (all rows of set r, H/U heads, every key)

        r = 0   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 0
        r = 1   |  u=0   |  u=1   |  ...        | heads of u=0 | heads of u=1 | ...   x  rows of set 1

    q and the output travel along a row of this picture (U ranks); k and v go to every rank that attends with them.
    R = 1 is plain Ulysses: one row set, contiguous shards.

Row sets (R > 1) hold equally many tokens and equal causal cost. They are cut from the pack as a necklace: take from
the circle of remaining tokens the window of T/R tokens whose cost is the mean of what is left (one exists, because the
windows' mean is that mean), close the circle, repeat. For one long sequence this gives the nested "zigzag"

        [ 3 | 2 | 1 | 0     0 | 1 | 2 | 3 ]

and for any pack at most 2R - 1 arcs in all. An arc is contiguous in the pack, so its attention is one varlen call on
contiguous query rows and on a contiguous range of keys: whole documents, except that the first may start in its
middle (fewer queries than keys, bottom-right causal) and the last may stop early. No key is copied for a second arc.
Positions travel with their tokens, so nothing else in the engine notices the order.

Letters: T packed tokens (tail included), S tokens on this rank, H query heads, K kv heads, U head-parallel and R
row-parallel size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]


class HeadLayout(NamedTuple):
    """Heads on one rank after the exchange: `query` q heads, `key` k heads and v heads.

    Kernels need a uniform ratio query/key. `repeat` consecutive slots of the U * key slots sent hold the same kv head:
    slot j is kv head j // repeat. It is 1 unless kv heads are fewer than U or a block straddles kv groups.
    """

    query: int
    key: int
    repeat: int


def head_layout(num_heads: int, num_kv_heads: int, head_parallel_size: int) -> HeadLayout:
    """Split query heads into equal consecutive blocks and find the kv heads that each block needs.

    Raises ValueError if kv heads do not divide query heads, or the blocks would be unequal.
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
    ratio = math.gcd(block, group)  # the largest run of query heads that never leaves one kv group
    return HeadLayout(query=block, key=block // ratio, repeat=group // ratio)


def padded_total(total: int, sequence_parallel_size: int) -> int:
    """Round a pack's length up so that every rank holds equally many tokens, at least one."""
    sp = sequence_parallel_size
    return max(1, -(-total // sp)) * sp


def row_sets(
    cu_seqlens: Tensor, row_parallel_size: int, head_parallel_size: int = 1
) -> list[list[Range]]:
    """Deal the packed rows to R row sets of equal length and equal causal cost, as sorted contiguous arcs.

    `cu_seqlens` [N + 1] lies on the host and covers the tail; its end must be a multiple of R * U.
    """
    total = int(cu_seqlens[-1])
    if total % (row_parallel_size * head_parallel_size):
        raise ValueError(
            f"{total} tokens do not split evenly over {row_parallel_size * head_parallel_size} ranks"
        )
    if row_parallel_size == 1:
        return [[(0, total)]]
    cu = cu_seqlens.long()
    size = total // row_parallel_size
    left: list[Range] = [(0, total)]
    sets = []
    for remaining in range(row_parallel_size, 1, -1):
        begin = _balanced_window(cu, left, size, remaining)
        taken = _cut(left, begin, min(begin + size, size * remaining))
        wrapped = begin + size - size * remaining
        if wrapped > 0:
            taken = _cut(left, 0, wrapped) + taken
            left = _cut(left, wrapped, begin)
        else:
            left = _cut(left, 0, begin) + _cut(left, begin + size, size * remaining)
        sets.append(_merge(taken))
        left = _merge(left)
    sets.append(left)
    return sets


def _balanced_window(cu: Tensor, left: list[Range], size: int, remaining: int) -> int:
    """Where in the circle of the arcs `left` a window of `size` tokens has 1/remaining of the whole cost.

    Moved by one token, a window gains the cost of the row it takes and loses that of the row it leaves. Both grow by
    one per token, so its cost is linear in its start wherever neither end passes the start of a document or an arc.
    """
    arcs = torch.tensor(left)
    offsets = torch.cat([arcs.new_zeros(1), (arcs[:, 1] - arcs[:, 0]).cumsum(0)])
    count = size * remaining
    costs = causal_prefix(cu, arcs)
    before = torch.cat([costs.new_zeros(1), (costs[:, 1] - costs[:, 0]).cumsum(0)])

    def prefix(at: Tensor) -> Tensor:
        arc = torch.bucketize(at, offsets[1:-1], right=True)
        return before[arc] + causal_prefix(cu, arcs[arc, 0] + at - offsets[arc]) - costs[arc, 0]

    arc = (torch.bucketize(cu, arcs[:, 0].contiguous(), right=True) - 1).clamp(min=0)
    inside = (cu >= arcs[arc, 0]) & (cu < arcs[arc, 1])
    corners = torch.cat([offsets[:-1], (offsets[arc] + cu - arcs[arc, 0])[inside]])
    starts = torch.cat([corners, (corners - size) % count]).unique()
    stops = starts + size
    windows = prefix(stops.clamp(max=count)) - prefix(starts) + prefix((stops - count).clamp(min=0))
    target = int(before[-1]) // remaining
    error = windows - target
    following = error.roll(-1)
    # The windows' mean is the target, so some window meets it. The first within 0.2% cuts the fewest documents.
    first = int(
        torch.nonzero((error.abs() * 500 <= target) | (error.sign() * following.sign() < 0))[0]
    )
    if abs(int(error[first])) * 500 <= target:
        return int(starts[first])
    end = int(starts[first + 1]) if first + 1 < starts.numel() else count
    begin, slope = int(starts[first]), int(following[first] - error[first])
    return begin + round(-int(error[first]) * (end - begin) / slope)


def _cut(arcs: list[Range], start: int, stop: int) -> list[Range]:
    """The part of concatenated arcs between two offsets."""
    result, offset = [], 0
    for a, b in arcs:
        low, high = max(start - offset, 0), min(stop - offset, b - a)
        if low < high:
            result.append((a + low, a + high))
        offset += b - a
    return result


def _merge(arcs: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for a, b in arcs:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return merged


def shard_ranges(sets: list[list[Range]], sp_rank: int, head_parallel_size: int) -> list[Range]:
    """Packed ranges whose tokens rank r * U + u holds, in its order: the u-th equal part of row set r."""
    arcs = sets[sp_rank // head_parallel_size]
    size = sum(b - a for a, b in arcs) // head_parallel_size
    part = sp_rank % head_parallel_size
    return _cut(arcs, part * size, (part + 1) * size)


class Segments(NamedTuple):
    """One varlen call: document i's queries are rows cu_q[i]:cu_q[i+1], its keys are cu_k[i]:cu_k[i+1].

    Causal means bottom-right: the last query sees the last key. `bounds` are the same numbers on the host.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    bounds: tuple[list[int], list[int]] | None = None


class ArcCall(NamedTuple):
    """The varlen call of one arc: its rows among this rank's query rows, its keys among the packed keys.

    Under a causal mask the keys past the arc's end are left out; without one, documents are whole (`keys`, `full`).
    """

    rows: Range
    causal_keys: Range
    causal: Segments
    keys: Range
    full: Segments


def arc_calls(cu_seqlens: Tensor, arcs: list[Range]) -> list[ArcCall]:
    """Describe the attention of each arc against its own documents' keys (host tensors)."""
    cu = cu_seqlens.to(torch.int64)
    calls, row = [], 0
    for a, b in arcs:
        first = int(torch.searchsorted(cu, a, right=True)) - 1
        last = int(torch.searchsorted(cu, b, right=False))  # documents first .. last - 1
        begin, end = int(cu[first]), int(cu[last])
        cu_q = cu[first : last + 1].clamp(a, b) - a
        full_k = cu[first : last + 1] - begin
        causal_k = full_k.clamp(max=b - begin)
        calls.append(
            ArcCall(
                rows=(row, row + b - a),
                causal_keys=(begin, b),
                causal=_segments(cu_q, causal_k),
                keys=(begin, end),
                full=_segments(cu_q, full_k),
            )
        )
        row += b - a
    return calls


def _segments(cu_q: Tensor, cu_k: Tensor) -> Segments:
    return Segments(
        cu_q=cu_q.int(),
        cu_k=cu_k.int(),
        max_q=int((cu_q[1:] - cu_q[:-1]).max()),
        max_k=int((cu_k[1:] - cu_k[:-1]).max()),
        bounds=(cu_q.tolist(), cu_k.tolist()),
    )


def causal_cost(cu_seqlens: Tensor, arcs: list[Range]) -> int:
    """Count the query-key products of causal attention over these rows."""
    costs = causal_prefix(cu_seqlens.long(), torch.tensor(arcs))
    return int((costs[:, 1] - costs[:, 0]).sum())


def causal_prefix(cu: Tensor, rows: Tensor) -> Tensor:
    """Count the query-key products of causal attention over the packed rows before each of `rows` (host i64)."""
    lengths = cu[1:] - cu[:-1]
    before = torch.cat([cu.new_zeros(1), (lengths * (lengths + 1) // 2).cumsum(0)])
    document = torch.bucketize(rows, cu, right=True) - 1
    within = rows - cu[document]
    return before[document] + within * (within + 1) // 2
