"""Ulysses sequence parallelism for any model; it needs torch only, and the folder works when copied elsewhere.

Read in this order: mesh, layout, batch, exchange, kernels (choice, document, varlen, short), attention, sums.
dense is for users of the library alone.
"""

from .attention import UlyssesAttention
from .batch import Sequence, ShardedBatch, pack_shard
from .dense import SeqAllToAll4D
from .mesh import ParallelMesh
from .sums import gather_tokens, segment_sums, sequence_last

__all__ = [
    "ParallelMesh",
    "SeqAllToAll4D",
    "Sequence",
    "ShardedBatch",
    "UlyssesAttention",
    "gather_tokens",
    "pack_shard",
    "segment_sums",
    "sequence_last",
]
