"""Weights that stay whole on every rank: the same numbers, one gather for each update, and no hooks on the way."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from models.ops.linear import stacked
from tests.engine_case import SHAPE, Case, build_trainer, trained, zero_engine
from tests.harness import memory_of, run_distributed
from tests.memory_case import assert_same_gradients
from tests.stage_case import compared
from ulysses.run.build import parameter_groups
from ulysses.run.checkpoint import save_checkpoint
from ulysses.zero.engine import full_parameters, gathered_weights

STAY = {"resident": True}
BIASED = replace(SHAPE, attention_bias=True)


@pytest.mark.parametrize(
    "stage, world, sp, more",
    [
        ("sft", 4, 2, {}),
        ("sft", 3, 3, {"lora_rank": 2}),
        ("rm", 4, 1, {}),
    ],
)
def test_loss_and_gradients_are_the_formulas(stage, world, sp, more):
    """Three ranks have slices with padding."""
    compared(Case(stage, sp=sp, engine=STAY, **more), world)


@pytest.mark.parametrize("away", [{}, {"offload_optimizer": True}])
def test_three_updates_are_those_of_sharded_weights(away):
    asked = {"stage": "sft", "sp": 2, "budget": 64, "steps": 3, "lr": 1e-3}
    decays = {"groups": partial(parameter_groups, weight_decay=10.0)}
    metrics, gradients = trained(Case(**asked, engine=decays), 2)
    found, stayed = trained(Case(**asked, engine=STAY | away | decays), 2)
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in metrics], rel=1e-6)
    assert_same_gradients(stayed[2], gradients[2], 1e-4)  # after two updates


def what_a_step_calls():
    """Count the gathers of two steps with several micro-batches, and look at memory and whole weights."""
    trainer, _ = build_trainer(Case("sft", budget=64, lr=1e-3, engine=STAY, shape=BIASED))
    engine, gathers = trainer.engine, []
    written = engine.weights.rewritten
    engine.weights.rewritten = lambda names: gathers.append(len(names)) or written(names)
    places = {name: p.data_ptr() for name, p in engine.module.named_parameters()}
    held = [
        x.untyped_storage()
        for p in engine.module.parameters()
        for x in (p, p.shard.local, p.shard.whole)
    ]
    memory = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
    micro_batches = [len(trainer.loader.step(0, k)) for k in range(2)]
    for _ in micro_batches:
        trainer.train_step()
    with gathered_weights(engine) as weights:
        sampled = {name: w.cpu().clone() for name, w in weights.items()}
    exported = {name: whole for name, whole in full_parameters(engine) if whole is not None}
    assert all(torch.equal(sampled[name], whole) for name, whole in exported.items())
    assert places == {name: p.data_ptr() for name, p in engine.module.named_parameters()}
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = engine.module.model.layers[0].modules()
    hooked = {type(m).__name__ for m in modules if any(getattr(m, kind) for kind in kinds)}
    for layer in engine.module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        for group in (projections, (mlp.gate_proj, mlp.up_proj)):
            assert len(stacked([module.weight for module in group])) == 1, (
                "one product takes them"
            )
    trained = sum(s.shard.length for s in engine.slices)
    engine.destroy()
    return {
        "micro_batches": micro_batches,
        "gathered": sum(gathers),
        "hooked": hooked,
        "exported": len(exported),
        "held": trained,
        "memory": memory,
    }


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_gathers_once_and_nothing_watches_the_modules(world):
    found = run_distributed(what_a_step_calls, world)
    parameters = dict(Case("sft", shape=BIASED).model(None).named_parameters())
    elements = sum(p.numel() for p in parameters.values())
    for one in found:
        assert min(one["micro_batches"]) > 1
        # a parameter, its whole and this rank's slice of it are one; they begin at multiples of 64 elements
        assert one["memory"] < 4 * (elements + 64 * len(parameters))
        # once for every update, however many micro-batches it has
        assert one["gathered"] == 2 * len(parameters)
        # the layer has ours alone: wait for the weights, take the gradients
        assert one["hooked"] <= {"DecoderLayer"}
    assert [one["exported"] for one in found] == [len(parameters), 0][:world]
    assert sum(one["held"] for one in found) == elements


def memory_of_a_gather():
    """Return MiB: all weights; the first one's once for each of them; what gathers asked of the system."""
    # as in a real small model: a large vocabulary, and many small tensors
    shape = replace(SHAPE, vocab_size=60_000, num_hidden_layers=16)
    case = Case("sft", shape=shape, lora_rank=2)
    engine, _ = zero_engine(case, resident=True)
    parameters = list(engine.module.parameters())
    engine.weights.wait(parameters)
    sizes = [4 * p.numel() / 2**20 for p in parameters]
    before = memory_of("VmSize")
    engine.weights.rewritten(parameters)
    engine.weights.wait(parameters)
    asked = (memory_of("VmPeak") - before) / 2**20
    engine.destroy()
    return {"weights": sum(sizes), "worst": max(sizes) * len(sizes), "asked": asked}


def test_a_gather_takes_no_more_than_the_weights_on_the_cpu():
    """Gloo's coalesced gather asks for the first tensor's memory once for every tensor: 39 GB for a model of 135M."""
    for found in run_distributed(memory_of_a_gather, 2, cpu=True):
        assert found["worst"] > 1500 > 20 * found["weights"]
        assert found["asked"] < 256  # threads reserve some


def corrupted_on_one_rank(folder, victim, flip):
    """Save a good checkpoint, change a bit or two numbers on one rank, and try to save again."""
    trainer, _ = build_trainer(Case("sft", lr=1e-3, engine=STAY))
    said = []
    for step in (1, 2):
        trainer.train_step()
        weight = dict(trainer.engine.module.named_parameters())[
            "model.layers.0.mlp.up_proj.weight"
        ]
        trainer.engine.weights.wait([weight])
        if step == 2 and torch.distributed.get_rank() == victim:
            flip(weight.data.view(-1))
        try:
            save_checkpoint(folder, trainer.engine, {"step": step}, trainer.stage.save)
        except FloatingPointError as error:
            said.append(str(error))
    trainer.engine.destroy()
    return said


def low_bit(flat):
    flat[-1:].view(torch.int32).bitwise_xor_(1)


def exchanged(flat):
    flat[:2] = flat[:2].flip(0)


@pytest.mark.parametrize(
    "world, victim, flip", [(3, 1, low_bit), (3, 0, exchanged), (2, 1, torch.neg_)]
)
def test_a_copy_that_differs_is_refused_before_it_is_saved(tmp_path, world, victim, flip):
    for said in run_distributed(corrupted_on_one_rank, world, tmp_path, victim, flip):
        [sentence] = said
        named = f"up_proj.weight of rank {victim} on "
        if world == 2:  # nobody knows which of the two is right
            named = r"up_proj.weight of rank [01] on "
        assert re.match(f"model.layers.0.mlp.{named}\\S+ is not that of rank \\d on ", sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
