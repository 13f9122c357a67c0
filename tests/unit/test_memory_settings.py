"""The [memory] section: decided once, reaches every layer, refuses what cannot be honoured."""

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.arch import architecture
from tests.engine_case import SHAPE
from tests.harness import run_distributed
from ulysses.config.command_line import check
from ulysses.config.schema import Options
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.memory.levels import LayerMemory
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.memory_choice import (
    choose,
    choose_memory,
    layer_memory,
    memory_line,
    plain_model,
    planned_machine,
    planner_case,
    this_machine,
)
from ulysses.plan.planner import GIB, Machine, predict
from ulysses.run.build import InitialWeights, build_engine

LLAMA = architecture("llama3-8b")
CPU = torch.device("cpu")


def config(stage="sft", lora=0, sp=1, dtype="float32", **memory):
    model = {"arch": "llama3-8b", "init": "random", "dtype": dtype, "lora": {"rank": lora}}
    given = {
        "stage": stage,
        "model": model,
        "data": {"train": "none.jsonl"},
        "parallel": {"sequence_parallel_size": sp},
        "memory": memory,
        "run": {"steps": 1},
    }
    return check(given)


def chosen(tokens, gib=139.8, host_gib=0.0, *, gpus=8, **settings):
    machine = Machine(gpus, gib * GIB, host_gib * GIB)
    return choose_memory(
        planner_case(config(sp=gpus, dtype="bfloat16", **settings), LLAMA, machine, tokens)
    )


@pytest.mark.parametrize("gpus, gib", [(8, 139.8), (8, 80.0), (6, 139.8), (1, 80.0)])
def test_an_automatic_degree_is_the_smallest_that_fits(gpus, gib):
    machine, found = Machine(gpus, gib * GIB), []
    for tokens in (1 << 13, 1 << 17, 1 << 19, 1 << 24):

        def planned(degree, tokens=tokens):
            return planner_case(config(sp=degree, dtype="bfloat16"), LLAMA, machine, tokens)

        fitting = [
            d for d in range(1, gpus + 1) if gpus % d == 0 and predict(choose(planned(d))).fits
        ]
        found.append(planned("auto").sp)
        assert found[-1] == min(fitting, default=gpus)
    assert found == sorted(found) and not fitting  # no degree fits 16 million tokens
    assert len({*found}) > 1 or gpus == 1


def test_auto_on_cpu_keeps_everything():
    for offload in ("none", "auto"):
        choice = choose_memory(
            planner_case(config(sp="auto", offload=offload), LLAMA, this_machine(CPU), 1 << 20)
        )
        assert memory_line(choice) == "memory: recompute none (auto: CPU)"
        assert layer_memory(choice) == LayerMemory(("none",) * 32, offloaded_layers=0)
        assert choice.resident


def test_a_level_set_by_hand_is_kept_while_it_may_fit():
    assert "may run out" not in memory_line(chosen(1 << 17, recompute="block"))
    need = predict(chosen(1 << 17, recompute="none", weights="sharded")).gpu / GIB
    choice = chosen(1 << 17, need + 0.5, recompute="none")
    assert choice.levels == ("none",) * 32 and memory_line(choice).endswith("may run out")
    said = r'GiB on each GPU with memory.recompute = "none" .*; set memory.recompute and memory.offload to "auto"'
    with pytest.raises(ConfigError, match=said):
        chosen(1 << 17, need - 0.5, recompute="none")


def test_weights_stay_where_that_is_faster_and_fits():
    """32 layers of short sequences wait for weights; of a longer one the room is worth more for activations."""
    short, long = chosen(1 << 15), chosen(1 << 20)
    assert short.resident and memory_line(short).endswith("; weights resident")
    assert not long.resident and long == chosen(1 << 20, weights="sharded")
    assert f"memory: recompute {long.name} (auto: " in memory_line(long)
    # what does not fit on every GPU is sharded, unless that is asked for
    assert not chosen(1 << 13, 30.0).resident and chosen(1 << 13, 30.0, recompute="block")
    with pytest.raises(ConfigError, match="weights, optimizer and gradients"):
        chosen(1 << 13, 30.0, weights="resident")
    assert chosen(1 << 13, gpus=1, gib=200.0, weights="sharded").resident  # nothing to share


def test_offload_of_all_layers_stays_in_its_budget():
    everything = {"offload": "checkpoints", "recompute": "block"}
    choice = chosen(1 << 17, host_gib=550, **everything)
    assert (choice.levels, choice.offloaded_layers) == (("block",) * 32, 32)
    assert " of 32 layers' activations in host memory" in memory_line(choice)
    # what the host cannot hold stays
    assert 0 < chosen(2 << 20, host_gib=300, **everything).offloaded_layers < 32


ON_GPU = r"needs \d+\.\d GiB on each GPU with memory.recompute = .*has 79.0 GiB; .* use more"
ON_HOST = (
    r"needs \d+\.\d GiB of host memory, .* but has 86.4 GiB, its share of the node's 96.0 GiB; "
    r"set memory.offload_optimizer and .*, use more nodes, or set memory.host_memory if"
)


def test_too_large_is_refused_with_sizes():
    with pytest.raises(ConfigError, match=ON_GPU):
        chosen(4096, 79, gpus=1)
    with pytest.raises(ConfigError, match=ON_HOST):
        chosen(4096, 79, 96, gpus=1, offload_optimizer=True)
    assert set(chosen(4096, 79, gpus=1, lora=16).levels) == {"none"}


def test_a_node_s_host_memory_can_be_told():
    def host(told=0.0, **given):
        options = Options(**given, dry_run=True)
        return planned_machine(config(host_memory=told), options, 8).host_bytes / GIB

    assert (host(480.0), host(480.0, host_memory=96), host(gpus=8)) == (480, 96, 0)
    assert host() > 0


def seen():
    """What a rank of a node of 2, or of one of 1, takes for the machine, had it a GPU."""
    device, rank = SimpleNamespace(type="cuda"), dist.get_rank()
    os.environ["LOCAL_WORLD_SIZE"] = "21"[rank // 2]
    gpu = SimpleNamespace(total_memory=GIB * (1 + rank))
    share = {0: 1.0, 1: 0.25, 2: 1.0}[rank]  # of rank 1's GPU of 2 GiB, half a GiB
    with (
        mock.patch("torch.cuda.get_device_properties", lambda _: gpu),
        mock.patch("torch.cuda.get_per_process_memory_fraction", lambda _: share),
    ):
        return this_machine(device, 100.0 - rank)


def test_ranks_of_unequal_nodes_see_one_machine():
    """Else they would choose different memory settings, and wait for each other's collectives."""
    machine = Machine(3, GIB // 2, 98 * GIB, 2)
    assert run_distributed(seen, 3, cpu=True) == [machine] * 3


def stage_case(stage, lora=0, sp=1, **section):
    base = config(stage, lora, sp).model_dump()
    base[stage] |= section
    return planner_case(check(base), LLAMA, Machine(8, GIB), 8192)


WHOLE, SCORES = plain_model(LLAMA), plain_model(LLAMA, reward=True)
LIVE = {"reference": "live"}
PPO = {"reward": "ulysses.rl.rewards:gsm8k_reward", "epochs": 2, "minibatches": 3}
MODEL = PPO | {"reward": "some/reward", "kl_coefficient": 0.0}
# The stage, the rank of its adapters and its table; the model that stands beside, and the passes that are counted.
STAGE_PASSES = """
rm | 0 | {} | none | 0
dpo | 0 | {} | none | 0
dpo | 0 | {"reference": "live"} | whole | 1
dpo | 4 | {"reference": "live"} | none | 1
dpo | 0 | {"reference": "live", "loss_type": "simpo"} | none | 0
kto | 0 | {} | none | 1
kto | 0 | {"reference": "live"} | whole | 3
kto | 0 | {"loss_type": "apo_zero_unpaired"} | none | 0
ppo | 0 | {"reward": "math:sqrt", "epochs": 2, "minibatches": 3} | whole | 1
ppo | 4 | {"reward": "some/reward", "epochs": 2, "minibatches": 3, "kl_coefficient": 0} | scores | half
"""
BESIDE = {"none": (), "whole": (WHOLE,), "scores": (SCORES,)}
# the policy's pass and the reward model's, which has no head and so costs less, over two epochs
HALF = (1 + SCORES.forward_parameters / WHOLE.forward_parameters) / 2


@pytest.mark.parametrize("line", STAGE_PASSES.strip().splitlines())
def test_every_stage_counts_its_own_models_and_passes(line):
    stage, lora, section, beside, forwards = line.split(" | ")
    case = stage_case(stage, int(lora), **json.loads(section))
    assert case.others == BESIDE[beside]
    assert case.forwards == (HALF if forwards == "half" else int(forwards))


def test_the_planner_knows_the_trained_model_and_the_rollout():
    scored, pairs, ppo = stage_case("rm"), stage_case("dpo", lora=4), stage_case("ppo", **PPO)
    assert scored.model == SCORES and scored.documents == pairs.documents == 2
    N = WHOLE.parameters
    assert pairs.model.parameters == N + pairs.model.trained < 1.01 * N
    assert stage_case("dpo").model.trained == N
    assert ppo.model.parameters == N + LLAMA.hidden_size
    assert ppo.rollout == (1, 64, 4096, 256, 8192, False)
    assert stage_case("ppo", lora=4, **MODEL).rollout.merged


def test_models_with_other_heads_share_the_mesh_and_change_its_split(tmp_path):
    other = architecture("qwen2.5-7b")  # 28 heads beside 32: 4 of 8 ranks exchange heads
    write_json(tmp_path / "config.json", other.to_hf())
    assert stage_case("dpo", sp=8, **LIVE).shards[:2] == (8, 1)
    for stage, section, passes in (
        ("dpo", {"reference": str(tmp_path)}, lambda size: size),
        # ppo trains on a rollout 4 times
        ("ppo", MODEL | {"reward": str(tmp_path), "epochs": 4}, lambda size: (1 + size) / 4),
    ):
        case = stage_case(stage, sp=8, **section)
        model = plain_model(other, reward=stage == "ppo")
        assert case.shards[:2] == (4, 2) and case.others == (model,)
        # its passes are counted at its own size
        size = model.forward_parameters / WHOLE.forward_parameters
        assert case.forwards == pytest.approx(passes(size)) and size < 0.96


MIXED = ("keep_attention",) + ("none",) * (SHAPE.num_hidden_layers - 1)


def settings_of_layers(rank=0):
    from ulysses.zero.construct import initialize_distributed

    initialize_distributed()
    mesh, weights, found = ParallelMesh(1), InitialWeights(SHAPE, 0), []
    machine = Machine(1, 80 * GIB, 80 * GIB)
    for settings, trainable, planned in (
        (config(lora=2, recompute="block", offload="checkpoints"), True, {}),
        (config(recompute="keep_attention"), False, {}),
        (config(), True, {"levels": MIXED, "offloaded_layers": 1}),
    ):
        choice = choose_memory(planner_case(settings, SHAPE, machine, 64))._replace(**planned)
        engine = build_engine(settings, weights, mesh, choice if trainable else None)
        layers = engine.module.model.layers
        found.append([(layer.recompute, layer.offloader is not None) for layer in layers])
        engine.destroy()
    return found


def test_every_setting_reaches_the_layers():
    (found,) = run_distributed(settings_of_layers, 1, cpu=True)
    block, frozen, mixed = found
    assert {*block} == {("block", True)} and {*frozen} == {("none", False)}
    assert mixed == [(level, level != "none") for level in MIXED]
