"""For users of the library, not called by the engine: dense shapes, and the all-to-all under the name the field knows.

Letters: B sequences, S tokens of each, P sequence-parallel ranks, H heads, E head dim.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import AttentionPlan, Device, contiguous, packed_plan
from .mesh import ParallelMesh


def dense_plan(mesh: ParallelMesh, local_tokens: int, device: Device) -> AttentionPlan:
    """Plan the attention of one sequence in contiguous shards, so that ranks that split rows have unequal work."""
    total = local_tokens * mesh.sequence_parallel_size
    size = total // mesh.row_parallel_size
    sets = [[(start, start + size)] for start in range(0, total, size)]
    return packed_plan(torch.tensor([0, total]), sets, mesh, device)


class SeqAllToAll4D(torch.autograd.Function):
    """Split one axis over the P ranks of `group` and gather another: `SeqAllToAll4D.apply(group, input)`."""

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        group: dist.ProcessGroup | None,
        input: Tensor,
        scatter_idx: int = 2,
        gather_idx: int = 1,
    ) -> Tensor:
        """Turn [B, S/P, H, E] into [B, S, H/P, E], or back with scatter_idx=1 and gather_idx=2.

        All ranks of the group, None for the default one, call it together, in backward too. Raises ValueError if P does
        not divide the split axis.
        """
        return super().apply(group, input, scatter_idx, gather_idx)

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup | None,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
    ) -> Tensor:
        ctx.group, ctx.scatter_idx, ctx.gather_idx = group, scatter_idx, gather_idx
        return _swap_axes(input, group, scatter_idx, gather_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        back = SeqAllToAll4D.apply(ctx.group, grad, ctx.gather_idx, ctx.scatter_idx)
        return None, back, None, None


def _swap_axes(
    input: Tensor, group: dist.ProcessGroup | None, scatter: int, gather: int
) -> Tensor:
    if input.dim() != 4 or {scatter, gather} != {1, 2}:
        raise ValueError(
            f"input has {input.dim()} axes, scatter_idx {scatter} and gather_idx {gather}; "
            "it must be [B, S, H, E] with scatter_idx and gather_idx 1 and 2 in either order"
        )
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return input
    if input.shape[scatter] % ranks:
        raise ValueError(
            f"axis {scatter} of the input has {input.shape[scatter]} entries, which {ranks} ranks do not divide; "
            "use UlyssesAttention, which splits any head count and length"
        )
    send = contiguous(input.unflatten(scatter, (ranks, -1)).movedim(scatter, 0))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return contiguous(received.movedim(0, gather)).flatten(gather, gather + 1)
