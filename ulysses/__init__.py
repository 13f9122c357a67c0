"""Ulysses sequence parallelism as a library; `ulysses.run` and `train.py` are the engine built on it."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gradients import (
        ClipGlobalNorm,
        GradientPolicy,
        GradientPolicyChain,
        StepContext,
        TorchGradients,
        build_chain,
    )
    from .parallel import (
        ParallelMesh,
        SeqAllToAll4D,
        Sequence,
        ShardedBatch,
        UlyssesAttention,
        pack_shard,
    )

__all__ = [
    "ClipGlobalNorm",
    "GradientPolicy",
    "GradientPolicyChain",
    "ParallelMesh",
    "SeqAllToAll4D",
    "Sequence",
    "ShardedBatch",
    "StepContext",
    "TorchGradients",
    "UlyssesAttention",
    "build_chain",
    "pack_shard",
]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: the command line and `quiet` come before torch."""
    if name == "__version__":
        return version("ulysses-engine")
    parts = ("parallel", "gradients")
    if name in parts:
        return import_module(f".{name}", __name__)
    if name in __all__:
        for part in parts:
            if member := getattr(import_module(f".{part}", __name__), name, None):
                return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
