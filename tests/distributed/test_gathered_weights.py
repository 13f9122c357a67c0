"""Between forward and backward nothing keeps gathered weights alive, and torch's functions stay torch's own."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.layers import DecoderLayer
from tests.engine_case import HostWeights, optimizer_of
from tests.harness import run_distributed
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import matrix_sizes
from ulysses.training.config import LoraConfig
from ulysses.training.lora import AdapterWeights, add_adapters
from ulysses.zero.construct import build_partitioned, initialize_distributed
from ulysses.zero.engine import ZeroEngine
from ulysses.zero.settings import derive

LAYERS = 6
SHAPE = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4,
})  # fmt: skip


def measured(adapters: bool) -> dict[str, Any]:
    """How many layers' weights of a forward pass are alive before its backward."""
    own = F.linear
    initialize_distributed()
    mesh, settings = ParallelMesh(1), derive(dtype=torch.float32, **matrix_sizes(SHAPE))
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def create() -> CausalLM:
        model = CausalLM(SHAPE, mesh)
        return add_adapters(model, LoraConfig(rank=4)) if adapters else model

    source = HostWeights(SHAPE, 0)
    model = build_partitioned(create, settings, AdapterWeights(source, 0) if adapters else source)
    engine = ZeroEngine(model.train(), settings, optimizer_of(model), (DecoderLayer,))
    gathered: list[StorageWeakRef] = []

    def watch(layer: torch.nn.Module, _: Any) -> None:
        gathered.extend(StorageWeakRef(p.data.untyped_storage()) for p in layer.parameters())

    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            layer.register_forward_pre_hook(watch)
    loss = engine(pack_shard([Sequence(torch.arange(9), torch.ones(9))], mesh)).logps.sum()
    gc.collect()
    alive = sum(not storage.expired() for storage in gathered) * LAYERS / len(gathered)
    engine.backward(loss, last=True)
    return {"alive": alive, "torch_is_whole": F.linear is own}


@pytest.mark.parametrize("adapters", [False, True])
def test_no_gathered_weight_outlives_its_layers_forward(adapters: bool) -> None:
    for found in run_distributed(measured, 2, adapters, with_zero=True, cpu=True):
        assert found["torch_is_whole"] and found["alive"] == 0, found
