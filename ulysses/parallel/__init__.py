"""Ulysses sequence parallelism: torch only, usable on its own (copy the folder).

Read in this order: mesh, batch, layout, plan, all_to_all, attention, kernels, reduce.
"""

from .attention import UlyssesAttention
from .batch import PackedBatch, Sequence, ShardedBatch, pack_shard, shard
from .exchange import SeqAllToAll4D
from .mesh import ParallelMesh
from .sums import gather_tokens, segment_sums, sequence_last

__all__ = [
    "PackedBatch",
    "ParallelMesh",
    "SeqAllToAll4D",
    "Sequence",
    "ShardedBatch",
    "UlyssesAttention",
    "gather_tokens",
    "pack_shard",
    "segment_sums",
    "sequence_last",
    "shard",
]
