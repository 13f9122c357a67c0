"""Teach vLLM to take weights over gloo, which stands in for NCCL on a CPU; everything else stays as it is.

PYTHONPATH=tests/servers python -m vllm.entrypoints.openai.api_server ...
    --worker-extension-cls gloo_worker.GlooWorker --weight-transfer-config '{"backend": "gloo"}'
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

LIMIT = timedelta(seconds=600)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class GlooEngine(NCCLWeightTransferEngine):
    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        name, size = init_info.group_name, init_info.world_size
        store: Any = dist.TCPStore(
            init_info.master_address,
            init_info.master_port,
            wait_for_workers=False,
            timeout=LIMIT,
        )
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = dist.ProcessGroupGloo(store, rank, size, LIMIT)

    def receive_weights(self, update_info: Any) -> None:
        info = update_info
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weight, 0).wait()
            self.model.load_weights([(name, weight)])


class GlooWorker:
    """Adds nothing to vLLM's worker, which imports this module for it."""


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
