"""The grid of processes: which ranks share a packed batch, and which have different ones.

    rank = dp_rank * sp + sp_rank            world 8, sp 4:

                 sp_rank   0   1   2   3
    dp_rank 0              0   1   2   3     one packed batch, its tokens split four ways
    dp_rank 1              4   5   6   7     another packed batch

The sequence axis is the inner one, so that its all-to-alls stay inside a node. ZeRO partitions over all ranks.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def gather(value: Value) -> list[Value]:
    """Return every rank's value, any object that can be pickled, in rank order; all ranks call it together.

    Without torch.distributed there is one rank. A single rank pickles nothing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def divisors(count: int) -> list[int]:
    """Return the degrees of sequence parallelism that so many processes may have, the smallest first."""
    return [degree for degree in range(1, count + 1) if count % degree == 0]


class ParallelMesh:
    """Arrange the processes in a (data, sequence) grid.

    All ranks construct it together, because making the process groups is a collective. Without torch.distributed it
    describes one process.

    Args:
        sequence_parallel_size: the degree sp: how many processes share each packed batch.
        num_heads: the query head counts of all models that will run on this mesh. A degree that does not divide them
            works too: some ranks then split query rows (layout.py). If it is left out, the degree must divide them.
        windows: the sliding window of every layer of the model that is trained, None where it sees all; empty if all
            of them do. Ranks that split query rows get equal work under them.

    Attributes:
        world_size, rank: the number of processes, and this one's number.
        sequence_parallel_size, sp_rank: the processes that share a packed batch, and this one's place among them.
        data_parallel_size, dp_rank: the groups that have different batches, and the number of this one's group.
        head_parallel_size: gcd(sp, *num_heads), the ranks that exchange heads.
        row_parallel_size, row_set: sp / head_parallel_size, the ranks that split query rows, and this one's part.
        is_main: whether this is rank 0.
        sp_group: the process group of the ranks that share this one's batch; None if it has it alone.

    Raises ValueError if the degree does not divide the number of processes.
    """

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        *,
        num_heads: int | Sequence[int] | None = None,
        windows: Sequence[int | None] = (),
    ):
        distributed = dist.is_initialized()
        self.world_size = dist.get_world_size() if distributed else 1
        self.rank = dist.get_rank() if distributed else 0
        sp = sequence_parallel_size
        if sp < 1 or self.world_size % sp:
            raise ValueError(
                f"sequence_parallel_size is {sp} but must divide the number of processes, {self.world_size}; "
                f"set it to one of {divisors(self.world_size)}"
            )
        heads = (num_heads,) if isinstance(num_heads, int) else tuple(num_heads or ())
        self.sequence_parallel_size = sp
        self.data_parallel_size = self.world_size // sp
        self.sp_rank = self.rank % sp
        self.dp_rank = self.rank // sp
        self.head_parallel_size = math.gcd(sp, *heads)
        self.row_parallel_size = sp // self.head_parallel_size
        self.row_set = self.sp_rank // self.head_parallel_size
        self.windows = tuple(windows)
        self.is_main = self.rank == 0
        self.sp_group: dist.ProcessGroup | None = dist.new_subgroups(sp)[0] if sp > 1 else None

    def __deepcopy__(self, memo: dict[int, object]) -> "ParallelMesh":
        return self  # process groups cannot be copied: a copied module stays on the same mesh
