"""What a sampling server does with weights that come over the network, as vLLM 0.32 and SGLang 0.5 do it."""

import base64
import ctypes
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.managers import BaseManager
from typing import Any

import torch
from safetensors.torch import save
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

LIMIT = timedelta(seconds=60)


def torch_group(where: dict[str, Any]) -> Any:
    """Meet rank 0 as SGLang does, which has copied this from torch."""
    name, backend = where["group_name"], where["backend"]
    place = f"tcp://{where['master_address']}:{where['master_port']}"
    rank, world = where["rank_offset"], where["world_size"]
    store = next(rendezvous(place, rank, world, timeout=LIMIT))[0]
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), store, group_name=name, timeout=LIMIT
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world)}
    return lambda tensor: group.broadcast(tensor, 0).wait()


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def nccl_group(where: dict[str, Any], device: torch.device) -> Any:
    """Meet rank 0 as vLLM does: by calls of NCCL's library, which torch has loaded, and with a sum of one number."""
    name = base64.b64decode(where["nccl_unique_id_b64"], validate=True)
    nccl, communicator = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()
    BYTE, FLOAT, SUM = 1, 7, 0

    def call(function: str, *args: Any) -> None:
        with torch.cuda.device(device):
            assert getattr(nccl, function)(*args) == 0, function

    def run(function: str, tensor: torch.Tensor, *args: int) -> None:
        address = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        size = ctypes.c_size_t(tensor.nbytes if args[0] == BYTE else tensor.numel())
        call(function, address, address, size, *args, communicator, stream)

    world = where["world_size"]
    unique = UniqueId.from_buffer_copy(name)
    call("ncclCommInitRank", ctypes.byref(communicator), world, unique, where["rank_offset"])
    run("ncclAllReduce", torch.zeros(1, device=device), FLOAT, SUM)
    return lambda tensor: run("ncclBroadcast", tensor, BYTE, 0)


GET = ("/get_world_size", "/weight_info", "/model_info", "/server_info")
POST = (
    *("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/resume", "/init_weights_update_group", "/pause_generation"),
    *("/update_weights_from_distributed", "/continue_generation"),
)  # fmt: skip


class WeightReceiver:
    """One worker of a server; its phases are what it is in the middle of.

    A process in which it has met others must not fork afterwards: `in_a_process` gives it one of its own.
    """

    def __init__(self, backend: str = "gloo", device: str = "cpu") -> None:
        self.backend, self.device = backend, torch.device(device)
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.phases = "default", set[str]()
        self.receive: Any = None

    def held(self) -> tuple[str, set[str], bytes]:
        """Return what its weights are called, the phases, and the weights as a file of safetensors."""
        return self.version, self.phases, save(self.weights)

    def forget(self) -> None:
        """Be as if it was started again."""
        self.version = "default"

    def get(self) -> Any:
        return {"world_size": 1, "tp_size": 1, "weight_version": self.version}

    def post(self, path: str, query: str, body: Any) -> Any:
        match path:
            case "/init_weight_transfer_engine":
                where = body["init_info"]
                is_gloo = self.backend == "gloo"
                self.receive = torch_group(where) if is_gloo else nccl_group(where, self.device)
            case "/init_weights_update_group":
                assert body["backend"] == self.backend
                self.receive = torch_group(body)
            case "/pause" | "/pause_generation":
                # requests that wait must not be dropped
                assert query == "mode=keep" or body == {"mode": "retract"}
                self.phases.add("paused")
            case "/start_weight_update":
                assert self.phases == {"paused"}
                self.phases.add("updated")
            case "/update_weights":
                assert "updated" in self.phases
                info = body["update_info"]
                self._load(info["names"], info["dtype_names"], info["shapes"])
            case "/update_weights_from_distributed":
                assert self.phases == {"paused"}
                self._load(body["names"], body["dtypes"], body["shapes"])
                self.version = body["weight_version"]
            case "/finish_weight_update":
                self.phases.remove("updated")
                self.version = body["weight_version"]
            case "/resume" | "/continue_generation":
                assert self.phases == {"paused"}
                self.phases.clear()
        return {"success": True}

    def _load(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.receive(tensor)
            self.weights[name] = tensor.cpu()


class Receivers(BaseManager):
    """A process that has receivers."""


Receivers.register("WeightReceiver", WeightReceiver)


@contextmanager
def in_a_process(*settings: str) -> Iterator[Any]:
    """Give a receiver in a process of its own, with the same methods."""
    with Receivers(ctx=multiprocessing.get_context("spawn")) as manager:
        yield manager.WeightReceiver(*settings)
