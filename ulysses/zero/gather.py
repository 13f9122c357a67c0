"""Whole weights on every rank for a while: what a sampler reads without hooks and without collectives."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from ulysses.zero.engine import ZeroEngine

RESERVE = 0.05  # of the free memory, for what sampling itself allocates


@contextmanager
def gathered_weights(
    engine: ZeroEngine, prefix: str = "", *, more_bytes: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Gather the parameters whose name begins with `prefix` and give them by the rest of their name; read only.

    All ranks enter and leave together and need no lockstep in between. `more_bytes`: what the caller will allocate
    besides.

    Raises:
        ValueError: on every rank, if the free memory of any rank cannot hold them, with the sizes.
    """
    chosen = [(engine.names[id(p)], p) for p in engine.module.parameters()]
    chosen = [(name.removeprefix(prefix), p) for name, p in chosen if name.startswith(prefix)]
    weights = sum(p.ds_numel * p.ds_tensor.element_size() for _, p in chosen)
    free = free_bytes(engine.device)
    least = torch.tensor(
        float(free) * (1 - RESERVE) - more_bytes, dtype=torch.float64, device=engine.device
    )
    if dist.is_initialized():
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if float(least) < weights:
        raise ValueError(
            f"the whole model takes {weights / 2**30:.2f} GiB and the sampler {more_bytes / 2**30:.2f} GiB for its "
            f"cache, but a process has only {(float(least) + more_bytes) / 2**30:.2f} GiB to spare; lower "
            "ppo.generation_batch or ppo.max_new_tokens, or free memory (memory.offload_optimizer, more GPUs)"
        )
    with deepspeed.zero.GatheredParameters([p for _, p in chosen]):
        yield {name: p.data for name, p in chosen}


def free_bytes(device: torch.device) -> int:
    """Return what this process can still allocate: GPU memory, or its share of the node's available memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62
    )
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
