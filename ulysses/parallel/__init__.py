"""Ulysses sequence parallelism for any model; it needs torch only, and the folder works when copied elsewhere.

Read in this order: mesh, layout, batch, exchange, kernels (choice, document, varlen, short), attention, sums.
dense is for users of the library alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .attention import UlyssesAttention
from .batch import Sequence, ShardedBatch, pack_shard
from .mesh import ParallelMesh

if TYPE_CHECKING:
    from .dense import SeqAllToAll4D
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


def __getattr__(name: str) -> object:
    """Import what not every run needs when it is asked for."""
    if name in __all__:
        part = "dense" if name == "SeqAllToAll4D" else "sums"
        return getattr(import_module(f".{part}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
