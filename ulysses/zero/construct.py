"""Start the processes of a run, and build a model in parts: no process ever reads or draws the whole model.

Every rank has a flat slice of each parameter and fills it itself: from the weight file, of which it reads only the
bytes of the slice, or from a generator keyed by (seed, name), the same on any topology.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses import environment
from ulysses.zero.resident import build_whole
from ulysses.zero.settings import ZeroSettings

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
STREAMING_THRESHOLD = 1 << 20
USUAL_THRESHOLD = 32 << 20  # the highest that glibc's own rule sets
# Collectives do not time out by themselves: the watch (ulysses/watch/watch.py) ends a run that does not move.
NO_TIMEOUT = timedelta(days=1)


def meet(seconds: float) -> dist.Store | None:
    """Connect to the store of all processes of this run, and return it; None for one process.

    Under `torchrun --max-restarts` one store serves all attempts; the keys of the store that is returned belong to this
    attempt alone. torchrun has no common number of the attempt: every agent counts its own workers' failures.

    Raises RuntimeError naming the processes that have not come after so many seconds, or a port that is in use.
    """
    if dist.is_initialized():
        return common_store()
    environment.complete()
    rank, world = environment.rank(), environment.world_size()
    if world == 1:
        return None
    address = environment.store_address()
    limit = timedelta(seconds=seconds)
    host, _, port = address.rpartition(":")
    holds = rank == 0 and not environment.agent_holds_store()
    try:
        store = dist.TCPStore(
            host, int(port), world, holds, limit / 2, wait_for_workers=False, multi_tenant=True
        )
        return dist.PrefixStore(f"ulysses/{_attempt(store, rank, world, limit)}", store)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"port {port} of this machine is in use, perhaps by another run; give the launcher another one "
                "(--master_port), or set MASTER_PORT"
            ) from None
        raise RuntimeError(
            f"rank {rank} has not met rank 0 at {address} within {seconds:.0f} s: that process has not started, has "
            "ended with an error, is stuck, or cannot be reached"
        ) from None


def _attempt(store: dist.Store, rank: int, world: int, limit: timedelta) -> str:
    """Agree on a name for this attempt: rank 0 draws it and gives it to every process that asks, until all have it."""
    if rank:
        question = uuid4().hex
        store.set(f"ulysses/asks/{rank}", question)
        store.wait([f"ulysses/answer/{question}"], limit)
        attempt = store.get(f"ulysses/answer/{question}").decode()
        store.set(f"{attempt}/{rank}", "")
        store.wait([f"{attempt}/all"], 2 * limit)
        return attempt
    attempt = uuid4().hex
    others = range(1, world)
    deadline = time.monotonic() + limit.total_seconds()
    # Questions of an earlier attempt's processes are answered too, but only living ones then set a key of this attempt.
    while missing := [other for other in others if not store.check([f"{attempt}/{other}"])]:
        for asks in (f"ulysses/asks/{other}" for other in missing):
            if store.check([asks]):
                store.set(f"ulysses/answer/{store.get(asks).decode()}", attempt)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"of {world} processes, these have not come within {limit.total_seconds():.0f} s: rank "
                f"{', '.join(map(str, missing))}; they have not started, have ended with an error, are stuck before "
                "they could say where, or cannot reach rank 0"
            )
        time.sleep(0.1)
    store.set(f"{attempt}/all", "")
    return attempt


def initialize_distributed(store: dist.Store | None = None) -> torch.device:
    """Start torch.distributed for this process (one process without a launcher) and return its device.

    Args:
        store: from `meet`; without it the processes find each other through their environment.
    """
    environment.complete()
    gpu, backend = None, "gloo"
    if torch.cuda.is_available():
        gpu, backend = torch.device("cuda", environment.local_rank()), "nccl"
        torch.cuda.set_device(gpu)
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            store=store,
            rank=environment.rank(),
            world_size=environment.world_size(),
            timeout=NO_TIMEOUT,
            device_id=gpu,
        )
    return gpu or torch.device("cpu")


# torch has no public functions that return the store, all groups, the collectives that a group has begun or what NCCL's
# flight recorder holds, or that set a group's timeout. The private ones below are in all versions of torch that the
# engine is tested with (2.11 to 2.13).


def common_store() -> dist.Store | None:
    """Return the store that torch.distributed was started with; None for one process."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        # torch lays the default group's prefix over the store that it was given
        return dist.distributed_c10d._get_default_store().underlying_store
    return None


def lift_time_limits() -> None:
    """Let every process group made so far, DeepSpeed's and the engine's, wait without a limit.

    NCCL's groups also begin to record when collectives run. Call it while none runs: torch's threads read the limit.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(NO_TIMEOUT, group)
        if dist.get_backend(group) == "nccl":
            group._enable_collectives_timing()


def collectives_begun() -> int:
    """Count the collectives that this process has begun; on a GPU those that only wait in the queue do not count."""
    if not dist.is_initialized():
        return 0
    groups = list(dist.distributed_c10d._world.pg_map)  # the main thread may add to them
    queued = sum(group._get_sequence_number_for_group() for group in groups)
    waiting = [e for e in flight_record(active=True) if e["state"] == "scheduled"]
    return queued - len(waiting)


def flight_record(*, active: bool) -> list[dict[str, Any]]:
    """Return the last collectives of NCCL's flight recorder, or those that have not ended; none on a CPU."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return []
    dump = torch._C._distributed_c10d._dump_nccl_trace_json
    return json.loads(dump(includeCollectives=True, onlyActive=active)).get("entries", [])


def end_distributed() -> None:
    """Leave torch.distributed, and DeepSpeed where it is used, so that this process may start another run."""
    comm: Any = sys.modules.get("deepspeed.comm", dist)
    (comm if comm.is_initialized() else dist).destroy_process_group()


@contextmanager
def streaming_memory() -> Iterator[None]:
    """Return every block above 1 MiB to the system as soon as it is freed, while weights stream through host memory.

    glibc takes large blocks from the system and returns them when they are freed. What it calls large grows, up to
    32 MiB, with every such block that is freed. Parameters that pass one by one would then leave holes in the heap that
    nobody uses and the process keeps. After the block glibc's usual, faster reuse is back. Does nothing without glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, STREAMING_THRESHOLD)
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL_THRESHOLD)
        libc.malloc_trim(0)


@streaming_memory()
def build_partitioned(
    create: Callable[[], nn.Module],
    settings: ZeroSettings,
    fill: Callable[[str, torch.Size, int, Tensor], None],
    *,
    resident: bool = False,
) -> nn.Module:
    """Create a model and fill this rank's shard of each parameter.

    All ranks must call it together.

    Args:
        create: builds the module; its parameters may be uninitialised.
        settings: from ulysses.zero.settings.derive.
        fill: fill(name, shape, start, out) writes the elements of a flattened parameter from `start` on into `out`,
            a flat tensor.
        resident: whether the weights stay whole on every rank. On one process they do in any case, unless they are kept
            in host memory.
    """
    if (resident or dist.get_world_size() == 1) and not settings.offload_parameters:
        model = build_whole(create, settings.dtype)
    else:
        from ulysses.zero.deepspeed_internals import build_sharded  # takes seconds to import

        model = build_sharded(create, settings.deepspeed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = parameter.shard
            if shard.length:
                fill(name, shard.shape, shard.start, shard.local[: shard.length])
            shard.local[shard.length :].zero_()
    return model
