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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.config.section import UserCodeError
from ulysses.parallel.mesh import gather
from ulysses.rl.servers import Json, in_thread

PART_BYTES = 256 << 20
Part = list[tuple[str, Tensor]]


@dataclass
class WeightPush:
    """Give servers the weights; every rank has one of these.

    Args:
        backend: "nccl" or "gloo".
        weights: device -> names and tensors; all ranks iterate together, and the first one gets them.
        main: whether this is the first rank.
        seconds: how long a server may take for a call.
        post, get: call a server by its address: (address, path, body) and (address, path). They raise UserCodeError if
            it fails, and `get` returns None where it knows no such path.

    Attributes:
        version: what the last weights are called, which is another name at every push of every run.
        receivers: the servers that rank 0 has met in a group, by their addresses.
    """

    backend: str
    weights: Callable[[torch.device], Iterable[tuple[str, Tensor]]]
    main: bool
    seconds: float
    post: Callable[[str, str, Json], Json]
    get: Callable[[str, str], Json]
    version: str = ""
    receivers: dict[str, "Receiver"] = field(default_factory=dict)

    @cached_property
    def device(self) -> torch.device:
        """Where tensors are when they are sent."""
        if self.backend == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def __call__(self, addresses: list[str]) -> None:
        """Push the weights; all ranks call it together. Raises UserCodeError if a server does not take them."""
        version = gather(f"ulysses-{uuid4().hex}")[0]
        weights = self.weights(self.device)
        if not self.main:
            self.version = version
            deque(weights, maxlen=0)
            return

        def every(call: Callable[[str], None]) -> None:
            for done in [in_thread(call, address) for address in addresses]:
                done.result()

        every(self._meet)
        every(lambda address: self.receivers[address].begin())
        for part in _parts(weights):
            every(lambda address, part=part: self.receivers[address].send(part, version))
        self.version = version
        every(self._finish)

    def _told(self, address: str) -> str | None:
        path = "/weight_info" if address.startswith("vllm") else "/model_info"
        told = self.get(address, path)
        return told.get("weight_version") if isinstance(told, dict) else None

    def _meet(self, address: str) -> None:
        # a server that was started again knows nothing of its group
        if address not in self.receivers or self._told(address) not in (None, self.version):
            self.receivers[address] = Receiver(self, address)

    def _finish(self, address: str) -> None:
        self.receivers[address].finish(self.version)
        if (told := self._told(address)) not in (None, self.version):
            raise UserCodeError(
                f"{address} holds the weights {told!r:.100} and not {self.version!r}, which it was given; look "
                "at its log"
            )


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


class Receiver:
    """A server, all workers of which are in a group with this process, which sends.

    Args:
        push: whose backend, device and calls are used.
        address: of the server.
    """

    def __init__(self, push: WeightPush, address: str) -> None:
        self.address, self.post = address, partial(push.post, address)
        self.is_vllm = address.startswith("vllm")
        path, number = (
            ("/get_world_size", "world_size") if self.is_vllm else ("/server_info", "tp_size")
        )
        try:
            size = 1 + push.get(address, path)[number]
        except (LookupError, TypeError):
            raise UserCodeError(
                f"{address} does not tell how many workers it has ({path}), which ppo.sampler_sync needs; use vLLM "
                '0.28 or newer with VLLM_SERVER_DEV_MODE=1, SGLang 0.5, or ppo.sampler_sync = "disk"'
            ) from None
        url, limit = urlsplit(address.partition("+")[2]), timedelta(seconds=push.seconds)
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.hostname, port), push.seconds) as found:
            host = found.getsockname()[0]  # by which the server reaches this machine
        tcp = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.name = f"ulysses-{uuid4().hex}"
        store: dist.Store = dist.PrefixStore(self.name, tcp)
        # the keys by which torch.distributed, and SGLang with it, finds what belongs to a group
        for prefix in (self.name, "cuda" if push.backend == "nccl" else "cpu"):
            store = dist.PrefixStore(f"{prefix}/", store)
        where = {"master_address": host, "master_port": tcp.port, "backend": push.backend}
        where |= {"group_name": self.name}
        if push.backend == "gloo":
            met = in_thread(dist.ProcessGroupGloo, store, 0, size, limit)
        else:
            met = in_thread(_nccl_group, store, size, limit, push.device, self.is_vllm)
        if self.is_vllm and push.backend == "nccl":
            # its workers look into no store of torch, and are told NCCL's own name of the group
            where = {"nccl_unique_id_b64": base64.b64encode(store.get("0")).decode()}
        where |= {"rank_offset": 1, "world_size": size}
        if self.is_vllm:
            path, where = "/init_weight_transfer_engine", {"init_info": where}
        else:
            path = "/init_weights_update_group"
        self.group: Any = self._call_during(met, path, where)

    def begin(self) -> None:
        """Have the server pause."""
        if self.is_vllm:
            self.post("/pause?mode=keep", {})
            self.post("/start_weight_update", {})
        else:
            self.post("/pause_generation", {"mode": "retract"})

    def send(self, part: Part, version: str) -> None:
        """Have the server load tensors."""
        names, tensors = zip(*part)
        info = {"names": names, "shapes": [[*x.shape] for x in tensors]}
        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
        sent = in_thread(self._broadcast, tensors)
        if self.is_vllm:
            info |= {"dtype_names": dtypes}
            self._call_during(sent, "/update_weights", {"update_info": info})
        else:
            info |= {"dtypes": dtypes, "group_name": self.name, "weight_version": version}
            self._call_during(sent, "/update_weights_from_distributed", info)

    def finish(self, version: str) -> None:
        """Have the server go on."""
        if self.is_vllm:
            self.post("/finish_weight_update", {"weight_version": version})
            self.post("/reset_prefix_cache?reset_running_requests=true", {})
            self.post("/resume", {})
        else:
            self.post("/continue_generation", {})

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.group.broadcast([tensor]).wait()

    def _call_during(self, own: Future[Any], path: str, body: Json) -> Any:
        """Call the server, and return what this process's own part gives, which never ends if the server refuses."""
        told = in_thread(self.post, path, body)
        wait([told, own], return_when=FIRST_EXCEPTION)
        told.result()
        try:
            return own.result()
        except RuntimeError as error:
            raise UserCodeError(f"sending weights to {self.address} failed ({error})") from None


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
