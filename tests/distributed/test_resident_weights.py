"""Weights that stay whole on every rank: the same numbers, one gather for each update, and no hooks on the way."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine_case import SHAPE, Case, build_trainer, trained
from tests.harness import run_distributed
from tests.memory_case import assert_same_gradients
from tests.stage_case import compared
from ulysses.zero.engine import full_parameters, gathered_weights

STAY = {"resident": True}


@pytest.mark.parametrize(
    ("stage", "world", "sp", "more"),
    [
        ("sft", 4, 2, {}),
        ("dpo", 2, 2, {"recompute": "pair"}),
        ("sft", 3, 3, {"lora_rank": 2}),  # slices with padding
        ("rm", 4, 1, {}),
    ],
)
def test_loss_and_gradients_are_the_formulas(stage, world, sp, more):
    compared(Case(stage, sp=sp, engine=STAY, **more), world)


@pytest.mark.parametrize("away", [{}, {"offload_optimizer": True}])
def test_three_updates_are_those_of_sharded_weights(away):
    asked = {"stage": "sft", "sp": 2, "budget": 64, "steps": 3, "lr": 1e-3}
    metrics, gradients = trained(Case(**asked), 2)
    found, stayed = trained(Case(**asked, engine=STAY | away), 2)
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in metrics], rel=1e-6)
    assert_same_gradients(stayed[2], gradients[2], 1e-4)  # after two updates


def hooks(module: nn.Module) -> int:
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return sum(map(len, kinds))


def what_a_step_calls() -> dict[str, Any]:
    """Count the gathers of two steps with several micro-batches, and look at modules, memory and whole weights."""
    trainer, _ = build_trainer(Case("sft", budget=64, lr=1e-3, engine=STAY))
    engine, gathers = trainer.engine, []
    gather = engine.weights.gather
    engine.weights.gather = lambda parameters: (
        gathers.append(len(parameters)) or gather(parameters)
    )
    before = {name: p.data_ptr() for name, p in engine.module.named_parameters()}
    micro_batches = [len(trainer.loader.step(0, k)) for k in range(2)]
    for _ in micro_batches:
        trainer.train_step()
    inside = {type(m).__name__: hooks(m) for m in engine.module.model.layers[0].modules()}
    with gathered_weights(engine) as weights:
        sampled = {name: w.cpu().clone() for name, w in weights.items()}
    exported = dict(full_parameters(engine))
    masters = torch.cat(
        [s.master[s.offset : s.offset + len(s.grad)] for s in engine.partition.slices]
    )
    same = [
        torch.equal(sampled[name], whole)
        for name, whole in exported.items()
        if whole is not None
    ]
    moved = [
        name for name, p in engine.module.named_parameters() if p.data_ptr() != before[name]
    ]
    engine.destroy()
    return {
        "micro_batches": micro_batches, "gathered": sum(gathers), "hooks": inside, "same": same, "moved": moved,
        "held": masters.numel(), "world": dist.get_world_size(),
    }  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_gathers_once_and_nothing_watches_the_modules(world):
    found = run_distributed(what_a_step_calls, world)
    parameters = (
        3 + 9 * SHAPE.num_hidden_layers
    )  # embedding, norm and head; seven matrices and two norms of each layer
    for rank, one in enumerate(found):
        assert min(one["micro_batches"]) > 1
        assert one["gathered"] == 2 * parameters, (
            "once for every update, however many micro-batches it has"
        )
        layer = one["hooks"].pop("DecoderLayer")
        assert layer <= 2 and not any(one["hooks"].values()), (
            "only ours: wait for the weights, take the gradients"
        )
        assert (
            one["moved"] == []
            and len(one["same"]) == (parameters if rank == 0 else 0)
            and all(one["same"])
        )
    assert sum(one["held"] for one in found) == sum(
        p.numel() for p in Case("sft").model(None).parameters()
    )
