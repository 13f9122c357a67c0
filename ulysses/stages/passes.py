"""Passes without gradient over many sequences, dealt to all ranks like the micro-batches of one optimizer step.

An item is what must stay in one micro-batch: one sequence, both sides of a pair, or answers that share a prompt.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.data.serve.steps import pack_step, sequence_cost
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import gather_tokens
from ulysses.stages.base import RunParts


def packed_batches(
    lengths: list[int],
    sequences: Callable[[list[int]], list[Sequence]],
    mesh: ParallelMesh,
    device: torch.device,
    tokens_per_microbatch: int,
) -> Iterator[tuple[list[int], ShardedBatch]]:
    """Yield this data-parallel group's micro-batches with the numbers of their items; every rank gets as many.

    Args:
        lengths: tokens of each item; at least one item.
        sequences: returns the sequences of one micro-batch by the numbers of its items.
        tokens_per_microbatch: the most tokens of a micro-batch, unless the longest item is longer.
    """
    costs = [sequence_cost(length, windows=mesh.windows) for length in lengths]
    groups = pack_step(lengths, costs, tokens_per_microbatch, mesh.data_parallel_size)
    for numbers in groups[mesh.dp_rank]:
        packed = sequences(numbers) if numbers else [s.emptied for s in sequences([0])]
        yield numbers, pack_shard(packed, mesh, device)


def token_values(
    compute: Callable[[ShardedBatch], Tensor],
    sizes: list[int],
    sequences: Callable[[int], Collection[Sequence]],
    parts: RunParts,
    *columns: int,
) -> Tensor:
    """Return [T, *columns] float32 values of all items' tokens end to end, the same on the CPU of every rank.

    Args:
        compute: maps a batch to its tokens' values [S, *columns].
        sizes: tokens of each item, where a prompt that its sequences share counts once.
        sequences: returns the sequences of an item by its number.
        parts: of the run, for its mesh, its device and the size of its micro-batches.
    """
    mesh, device = parts.mesh, parts.engine.device
    flat = torch.zeros(sum(sizes), *columns, device=device)
    rows = flat.split(sizes)

    def sequences_of(numbers: list[int]) -> list[Sequence]:
        """Return the items' sequences; two items with the same prompt do not share it, so that each has its size."""
        return [
            s if s.prompt is None else replace(s, prompt=i)
            for i in numbers
            for s in sequences(i)
        ]

    for numbers, batch in packed_batches(
        sizes, sequences_of, mesh, device, parts.tokens_per_microbatch
    ):
        values = gather_tokens(compute(batch).float(), batch)
        # all ranks of the sequence-parallel group hold the same values, which count once
        if mesh.sp_rank == 0:
            for i, part in zip(numbers, values.split([sizes[i] for i in numbers]), strict=True):
                rows[i].copy_(part)
    if dist.is_initialized():
        dist.all_reduce(flat)
    return flat.cpu()
