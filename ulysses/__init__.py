"""Ulysses sequence parallelism as a library; `ulysses.training` and `train.py` are the engine built on it."""

from .parallel import (
    PackedBatch,
    ParallelMesh,
    SeqAllToAll4D,
    Sequence,
    ShardedBatch,
    UlyssesAttention,
    pack_shard,
    shard,
)

__all__ = [
    "PackedBatch",
    "ParallelMesh",
    "SeqAllToAll4D",
    "Sequence",
    "ShardedBatch",
    "UlyssesAttention",
    "pack_shard",
    "shard",
]
