"""The planner's formulas of a layer against a real one of every family and degree, whole or with adapters."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.lora import add_adapters
from models.ops.linear import AdapterProducts
from models.ops.rotary import rotary_tables
from tests.family_case import FAMILIES
from tests.model_folder import init_weights
from ulysses.check.adapter_settings import rule_targets
from ulysses.config.schema import LoraSection
from ulysses.memory.levels import LEVELS, LayerMemory
from ulysses.memory.offload import Offloader
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.layer_cost import LayerSetup, layer_costs

LENGTHS = 9, 1, 26  # 36 rows, of which every degree takes an equal share


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Let this process be the first of so many, to whom the others send zeros."""
    if count == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    zeros = mock.patch("torch.distributed.all_to_all_single", lambda out, *_, **__: out.zero_())
    try:
        with zeros:
            yield
    finally:
        dist.destroy_process_group()


def build(config, degree, rank, level, offloader=None):
    """Return a model, its batch, and what the costs of its layers depend on."""
    mesh = ParallelMesh(degree, num_heads=config.num_attention_heads, windows=config.windows)
    memory = LayerMemory(level, offloader=offloader)
    model = CausalLM(config, mesh, memory=memory, attention="reference")
    init_weights(model, seed=4)
    if rank:
        targets = [*LoraSection().targets, *rule_targets(config)]
        add_adapters(model, LoraSection(rank=rank, targets=targets))
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.data.normal_(0, 0.1)
    given = [Sequence(torch.arange(n) % 67, torch.ones(n)) for n in LENGTHS]
    setting = LayerSetup(degree, mesh.head_parallel_size, rank, 4)
    return model, pack_shard(given, mesh), setting


def storages(*tensors):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def kept_by_autograd(model, batch, place):
    """Return the bytes of a row that a layer's graph holds: the weights, rotary tables and numbers of columns aside."""
    layer, ropes, held = (
        model.model.layers[place],
        rotary_tables(batch.positions, model.config),
        {},
    )
    rope = ropes[layer.kind.rotary]

    def note(x):
        held.update(storages(x) if x.dim() > 1 or x.is_floating_point() else {})
        return x

    made, make = [], AdapterProducts._multiply_by_a

    def remember(products, x):
        make(products, x)
        made.extend(weakref.ref(x) for x in [products.narrow] if x is not None)

    saved = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    with saved, mock.patch.object(AdapterProducts, "_multiply_by_a", remember):
        hidden = torch.randn(len(batch.tokens), model.config.hidden_size, requires_grad=True)
        out = layer(hidden, rope, batch.attention_plan)
    assert out.requires_grad
    held |= storages(*(x for ref in made if (x := ref()) is not None))  # of adapters
    shared = storages(*model.parameters(), *rope)
    return sum(size for at, size in held.items() if at not in shared) / len(hidden)


def offloaded(config, degree, rank, level):
    """Return the bytes of a row that all layers give to the host until their backward."""
    offloader = Offloader("cpu", chunk_bytes=4)
    model, batch, _ = build(config, degree, rank, level, offloader)
    assert model(batch).logps.requires_grad
    return offloader.allocated / len(batch.tokens)


@pytest.mark.parametrize("degree, rank", [(1, 0), (2, 3), (3, 0), (4, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_keep_what_the_formulas_say(name, degree, rank):
    config = ModelConfig.from_hf(FAMILIES[name])
    with ranks(degree):
        model, batch, setting = build(config, degree, rank, "none")
        costs = layer_costs(config, setting)
        for place, (kind, cost) in enumerate(zip(config.layers, costs)):
            wanted = cost.kept_bytes("none", 4)
            # with adapters a few numbers of a row lie beside others that are kept
            near = 0.02 if rank else 1e-6
            assert kept_by_autograd(model, batch, place) == pytest.approx(wanted, near), kind
        for level in LEVELS[1:]:
            wanted = sum(cost.kept_bytes(level, 4) for cost in costs)
            assert offloaded(config, degree, rank, level) == pytest.approx(wanted), level
