"""Passes without gradient over many sequences, dealt to all ranks like the micro-batches of one optimizer step.

An item is what must stay in one micro-batch: one sequence, or both sides of a pair.
"""

from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.data.serve.steps import pack_step, sequence_cost
from ulysses.parallel.batch import Sequence, ShardedBatch, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.sums import gather_tokens


def packed_batches(
    lengths: list[int],
    sequences: Callable[[list[int]], list[Sequence]],
    mesh: ParallelMesh,
    device: torch.device,
    budget: int,
) -> Iterator[tuple[list[int], ShardedBatch]]:
    """Yield this data-parallel group's micro-batches with the numbers of their items, as many on every rank.

    Args:
        lengths: tokens of each item.
        sequences: returns the sequences of one micro-batch by the numbers of its items.
        budget: tokens of a micro-batch, which the longest item may exceed.
    """
    costs = [sequence_cost(length, windows=mesh.windows) for length in lengths]
    budget = max([budget, *lengths])
    groups = pack_step(lengths, costs, budget, mesh.data_parallel_size)
    for numbers in groups[mesh.dp_rank]:
        yield numbers, pack_shard(sequences(numbers), mesh, device, may_be_empty=True)


def token_values(
    compute: Callable[[ShardedBatch], Tensor],
    items: list[Collection[Sequence]],
    mesh: ParallelMesh,
    device: torch.device,
    budget: int,
    *columns: int,
) -> Tensor:
    """Return [T, *columns] float32 values of all items' tokens end to end, the same on the CPU of every rank.

    Args:
        compute: maps a batch to its tokens' values [S, *columns].
        items: the sequences of each item; the other arguments are those of `packed_batches`.
    """
    lengths = [sum(len(sequence.tokens) for sequence in item) for item in items]
    flat = torch.zeros(sum(lengths), *columns, device=device)
    rows = flat.split(lengths)
    batches = packed_batches(
        lengths, lambda numbers: [s for i in numbers for s in items[i]], mesh, device, budget
    )
    for numbers, batch in batches:
        values = gather_tokens(compute(batch).float(), batch)
        if mesh.sp_rank == 0:  # all ranks of its group hold the same values, which count once
            for i, part in zip(
                numbers, values.split([lengths[i] for i in numbers]), strict=True
            ):
                rows[i].copy_(part)
    if dist.is_initialized():
        dist.all_reduce(flat)
    return flat.cpu()
