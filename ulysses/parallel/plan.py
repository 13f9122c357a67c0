"""The attention plan of a batch: made once on the host, moved to the device once, used by every layer.

It knows tokens and rows, not heads, so that models of different head counts (a policy and a reward model) share it.

Letters: T packed tokens (tail included), S tokens on this rank, U head-parallel and R row-parallel size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .device import to_device
from .layout import ArcCall, Range, Segments, arc_calls, row_sets
from .mesh import ParallelMesh


@dataclass(frozen=True)
class AttentionPlan:
    """Say how this rank's tokens are exchanged and which varlen calls its attention makes.

    pieces: the packed ranges of every row set; its U ranks hold equal parts of them, one after the other.
    batch: 1, or the sequences of a dense batch, of each of which these ranks hold equal parts.
    calls: one per arc of the row set. cu_seqlens [N + 1] int32 and max_seqlen describe the whole pack.
    """

    group: dist.ProcessGroup | None
    head_parallel_size: int
    row_parallel_size: int
    row_set: int
    local_tokens: int
    total: int
    cu_seqlens: Tensor
    max_seqlen: int
    documents: int
    calls: tuple[ArcCall, ...]
    pieces: tuple[tuple[Range, ...], ...]
    batch: int = 1

    @property
    def ranks(self) -> int:
        return self.head_parallel_size * self.row_parallel_size


def dense_plan(
    batch_size: int, local_tokens: int, mesh: ParallelMesh | None, device: torch.device | str
) -> AttentionPlan:
    """Plan the classic layout [B, S/P, ...]: B sequences of equal length, each cut into P contiguous shards.

    Row sets are contiguous here, so with R > 1 the result is exact but causal work is not balanced; packed batches
    from `shard` are.
    """
    ranks, rows = _sizes(mesh)
    length = local_tokens * ranks
    starts = torch.arange(batch_size, dtype=torch.int64) * length
    cu_seqlens = torch.cat([starts, starts[-1:] + length])
    share = length // rows
    sets = [
        [(b * length + r * share, b * length + (r + 1) * share) for b in range(batch_size)]
        for r in range(rows)
    ]
    if rows == 1:
        sets = [[(0, batch_size * length)]]
    return packed_plan(cu_seqlens, sets, mesh, device, batch_size)


def device_plan(
    cu_seqlens: Tensor, max_seqlen: int | None, local_tokens: int, mesh: ParallelMesh | None
) -> AttentionPlan:
    """Plan from device cu_seqlens alone. With R = 1 and max_seqlen given, the host does not wait for the device."""
    ranks, rows = _sizes(mesh)
    total = local_tokens * ranks
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} with {cu_seqlens.dim()} axes; it must be int32 and 1-dim"
        )
    on_host = cu_seqlens.device.type == "cpu"
    if (on_host or max_seqlen is None) and int(cu_seqlens[-1]) != total:
        raise ValueError(
            f"cu_seqlens ends at {int(cu_seqlens[-1])} but the {ranks} ranks hold {total} tokens; "
            "it must describe the whole pack, with an entry for padding"
        )
    if rows > 1 or on_host:
        host = cu_seqlens.cpu()
        return packed_plan(host, row_sets(host, rows, ranks // rows), mesh, cu_seqlens.device)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if max_seqlen is None else max_seqlen
    segments = Segments(cu_seqlens, cu_seqlens, longest, longest)
    return AttentionPlan(
        group=mesh.sp_group if mesh else None,
        head_parallel_size=ranks,
        row_parallel_size=1,
        row_set=0,
        local_tokens=local_tokens,
        total=total,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        documents=cu_seqlens.numel() - 1,
        calls=(ArcCall((0, total), (0, total), segments, (0, total), segments),),
        pieces=(((0, total),),),
    )


def _sizes(mesh: ParallelMesh | None) -> tuple[int, int]:
    return (mesh.sequence_parallel_size, mesh.row_parallel_size) if mesh else (1, 1)


def packed_plan(
    cu_seqlens: Tensor,
    sets: list[list[Range]],
    mesh: ParallelMesh | None,
    device: torch.device | str,
    batch: int = 1,
) -> AttentionPlan:
    """Plan the attention of a pack whose rows were dealt as `sets` (host `cu_seqlens`, tail included)."""
    ranks, rows = _sizes(mesh)
    total = int(cu_seqlens[-1])
    row_set = mesh.sp_rank // mesh.head_parallel_size if mesh else 0
    cu_device = to_device(cu_seqlens.int(), device)
    return AttentionPlan(
        group=mesh.sp_group if mesh else None,
        head_parallel_size=ranks // rows,
        row_parallel_size=rows,
        row_set=row_set,
        local_tokens=total // ranks,
        total=total,
        cu_seqlens=cu_device,
        max_seqlen=int((cu_seqlens[1:] - cu_seqlens[:-1]).max()),
        documents=cu_seqlens.numel() - 1,
        calls=tuple(
            _on_device(call, cu_device, device) for call in arc_calls(cu_seqlens, sets[row_set])
        ),
        pieces=tuple(tuple(arcs) for arcs in sets),
        batch=batch,
    )


def _on_device(call: ArcCall, cu_seqlens: Tensor, device: torch.device | str) -> ArcCall:
    whole = (
        call.causal.cu_q.numel() == cu_seqlens.numel()
        and call.rows[1] - call.rows[0] == call.keys[1]
    )
    if whole:  # plain Ulysses: one call over the whole pack
        segments = call.causal._replace(cu_q=cu_seqlens, cu_k=cu_seqlens)
        return call._replace(causal=segments, full=segments)

    def move(segments: Segments) -> Segments:
        return segments._replace(
            cu_q=to_device(segments.cu_q, device), cu_k=to_device(segments.cu_k, device)
        )

    return call._replace(causal=move(call.causal), full=move(call.full))
