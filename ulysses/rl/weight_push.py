"""Push weights to servers of vLLM or SGLang over the network, without a disk between.

    (name, tensor), ...  -> parts of 256 MiB   besides, rank 0 holds the parameter they are of, as a layer's experts
    POST what a part holds                     the server's workers wait for it
    broadcast its tensors                      and load them

Rank 0 and the workers of one server are a group of processes of their own. A server keeps the requests that it has, and
goes on with them under the new weights from an empty cache.

The calls are those of vLLM 0.28 (with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config) and of SGLang 0.5. vLLM
itself knows no gloo: tests/servers/gloo_worker.py teaches it.
"""

import base64
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.config.section import UserCodeError
from ulysses.rl.sampling_server import Server
from ulysses.rl.servers import Json, in_thread
from ulysses.stages.base import RunParts

PART_BYTES = 256 << 20
Part = list[tuple[str, Tensor]]


class WeightPush:
    """Give servers the weights; every rank has one of these.

    Args:
        backend: "nccl" or "gloo".

    Attributes:
        version: what the last weights are called, which is another name at every push of every run; on rank 0.
        groups: all workers of a server with rank 0, which sends: the group's name, and what broadcasts in it.
    """

    def __init__(self, backend: str, parts: RunParts) -> None:
        self.backend, self.parts = backend, parts
        self.version = ""
        self.groups: dict[Server, tuple[str, Any]] = {}

    @cached_property
    def device(self) -> torch.device:
        """Where tensors are when they are sent."""
        return torch.device("cpu") if self.backend == "gloo" else self.parts.engine.device

    def __call__(self, servers: list[Server]) -> None:
        """Push the weights; all ranks call it together. Raises UserCodeError if a server does not take them."""
        weights = self.parts.served_weights(self.device)
        if not self.parts.mesh.is_main:
            for _ in weights:  # which all ranks gather together
                pass
            return

        def every(call: Callable[..., None], *args: object) -> None:
            for done in [in_thread(call, server, *args) for server in servers]:
                done.result()

        every(self._meet)
        every(_pause)
        self.version = f"ulysses-{uuid4().hex}"
        for part in _parts(weights):
            every(self._send, part)
        every(self._resume)

    def _meet(self, server: Server) -> None:
        # a server that was started again knows nothing of its group
        if server in self.groups and server.marks()[0] in (None, self.version):
            return
        is_vllm, is_gloo = server.dialect == "vllm", self.backend == "gloo"
        place = ("/get_world_size", "world_size") if is_vllm else ("/server_info", "tp_size")
        if not isinstance(workers := server.told(*place), int):
            raise UserCodeError(
                f"{server} does not tell how many workers it has ({place[0]}), which ppo.sampler_sync needs; use vLLM "
                '0.28 or newer with VLLM_SERVER_DEV_MODE=1, SGLang 0.5, or ppo.sampler_sync = "disk"'
            )
        size, limit = 1 + workers, timedelta(seconds=server.timeout)
        url = urlsplit(server.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.hostname, port), server.timeout) as found:
            host = found.getsockname()[0]  # by which the server reaches this machine
        tcp = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        name = f"ulysses-{uuid4().hex}"
        # the keys by which torch.distributed, and SGLang with it, finds what belongs to a group
        store: dist.Store = tcp
        for prefix in (name, f"{name}/", "cpu/" if is_gloo else "cuda/"):
            store = dist.PrefixStore(prefix, store)
        where = {
            "master_address": host,
            "master_port": tcp.port,
            "backend": self.backend,
            "group_name": name,
        }
        if is_gloo:
            met = in_thread(dist.ProcessGroupGloo, store, 0, size, limit)
        else:
            met = in_thread(_nccl_group, store, size, limit, self.device, is_vllm)
        if is_vllm and not is_gloo:
            # Its workers look into no store of torch, and are told NCCL's own name of the group. The clone has a
            # connection of its own: while one waits for a key, no other thread can set it.
            where = {"nccl_unique_id_b64": base64.b64encode(store.clone().get("0")).decode()}
        where |= {"rank_offset": 1, "world_size": size}
        if is_vllm:
            call = "/init_weight_transfer_engine", {"init_info": where}
        else:
            call = "/init_weights_update_group", where
        self.groups[server] = name, _call_during(met, server, *call)

    def _send(self, server: Server, part: Part) -> None:
        """Have a server load tensors."""
        names, tensors = zip(*part)
        name, processes = self.groups[server]
        info = {"names": names, "shapes": [[*x.shape] for x in tensors]}
        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
        sent = in_thread(_broadcast, processes, tensors)
        if server.dialect == "vllm":
            info |= {"dtype_names": dtypes}
            _call_during(sent, server, "/update_weights", {"update_info": info})
        else:
            info |= {"dtypes": dtypes, "group_name": name, "weight_version": self.version}
            _call_during(sent, server, "/update_weights_from_distributed", info)

    def _resume(self, server: Server) -> None:
        """Have a server go on, and ask it which weights it holds."""
        if server.dialect == "vllm":
            server.tell("/finish_weight_update", {"weight_version": self.version})
            server.tell("/reset_prefix_cache?reset_running_requests=true", {})
            server.tell("/resume", {})
        else:
            server.tell("/continue_generation", {})
        if (told := server.marks()[0]) not in (None, self.version):
            raise UserCodeError(
                f"{server} holds the weights {told!r:.100} and not {self.version!r}, which it was given; look at its "
                "log"
            )


def _pause(server: Server) -> None:
    if server.dialect == "vllm":
        server.tell("/pause?mode=keep", {})
        server.tell("/start_weight_update", {})
    else:
        server.tell("/pause_generation", {"mode": "retract"})


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
    part: Part = []
    size = 0
    for name, tensor in weights:
        part.append((name, tensor.contiguous()))
        size += tensor.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _broadcast(processes: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        processes.broadcast([tensor]).wait()


def _call_during(own: Future[Any], server: Server, path: str, body: Json) -> Any:
    """Call a server, and return what this process's own part gives, which never ends if the server refuses."""
    told = in_thread(server.tell, path, body)
    wait([told, own], return_when=FIRST_EXCEPTION)
    told.result()
    try:
        return own.result()
    except RuntimeError as error:
        raise UserCodeError(f"sending weights to {server} failed ({error})") from None


def _nccl_group(
    store: dist.Store, size: int, limit: timedelta, device: torch.device, sums: bool
) -> Any:
    """Return a group whose workers meet at its first collective, which in vLLM is a sum of one number."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, 0, size, options)
        if sums:
            group.allreduce([torch.zeros(1, device=device)]).wait()
    return group
