"""Build a model directly as ZeRO-3 shards: no process ever holds the whole model.

Every rank creates each parameter empty, keeps its own flat slice of it, and fills that slice itself: from the
weight file (only those bytes are read) or from a generator keyed by (seed, name), the same on any topology.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn

from ulysses.zero.host_memory import streaming_memory


class WeightSource(Protocol):
    """Where a parameter's values come from."""

    def slice(
        self,
        name: str,
        shape: torch.Size,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter."""
        ...


def initialize_distributed() -> torch.device:
    """Start torch.distributed for this process (one process without a launcher) and return its device."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, value)
    if (
        "LOCAL_WORLD_SIZE" not in os.environ
    ):  # torchrun's name; deepspeed's launcher has its own, others none
        world = int(os.environ["WORLD_SIZE"])
        os.environ["LOCAL_WORLD_SIZE"] = os.environ.get(
            "LOCAL_SIZE", str(min(world, torch.cuda.device_count() or world))
        )
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl", verbose=False)
        return device
    # On CPU DeepSpeed would compile a shared-memory collective with the host's compiler at start (half a minute,
    # and a killed build leaves a lock that every later run waits for); gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    return torch.device("cpu")


def end_distributed() -> None:
    """Leave torch.distributed, so that this process may start another run; DeepSpeed forgets its groups too."""
    deepspeed.comm.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@streaming_memory()
def build_partitioned(
    create: Callable[[], nn.Module], config: dict[str, Any], source: WeightSource
) -> nn.Module:
    """Create a model inside ZeRO-3's partitioned construction and fill this rank's shards from `source`.

    Args:
        create: builds the module; its parameters may be uninitialised.
        config: DeepSpeed configuration (ulysses.zero.settings.derive).
        source: gives the values of any flat slice of any parameter.

    All ranks must call it together.
    """
    rank = dist.get_rank()
    # Each parameter is gathered straight into its own memory: no copy between gathering and first use. Only the parameters
    # are told: the engine would stop gathering ahead.
    straight = {
        **config,
        "zero_optimization": {**config["zero_optimization"], "stage3_allgather_sequential": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=straight):
        model = create()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = parameter.ds_tensor
            size = shard.ds_numel
            start = min(rank * size, parameter.ds_numel)
            stop = min(start + size, parameter.ds_numel)
            if stop > start:
                values = source.slice(
                    name, parameter.ds_shape, start, stop, shard.dtype, shard.device
                )
                shard.view(-1)[: stop - start].copy_(values)
            shard.view(-1)[stop - start : size].zero_()
    return model
