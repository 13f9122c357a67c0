"""The [memory] section: decided once, reaches every layer, refuses what cannot be honoured."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.arch import architecture
from tests.engine_case import SHAPE
from tests.harness import run_distributed
from ulysses.memory.case import GIB, Machine, shards
from ulysses.memory.peak import PROCESS_BYTES
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import RandomWeights, build_engine
from ulysses.training.checks import check_numbers
from ulysses.training.command_line import check
from ulysses.training.config import Config
from ulysses.training.dry_run import planned_machine
from ulysses.training.memory import (
    MemoryChoice,
    check_head_chunks,
    choose_memory,
    free_host_bytes,
    plain_model,
    planner_model,
    planner_options,
    planner_work,
    this_machine,
)
from ulysses.training.section import ConfigError

LLAMA = architecture("llama3-8b")


def config(stage: str = "sft", lora: int = 0, sp: int = 1, **memory: Any) -> Config:
    return check(
        {
            "stage": stage,
            "model": {"arch": "llama3-8b", "init": "random", "dtype": "float32", "lora": {"rank": lora}},
            "data": {"train": "none.jsonl"},
            "parallel": {"sequence_parallel_size": sp},
            "memory": memory,
            "run": {"steps": 1},
        }
    )


def chosen(settings: Config, gpus: int, gib: float, tokens: int, host_gib: float = 0.0) -> MemoryChoice:
    model = settings.model.model_copy(update={"dtype": "bfloat16"})
    data = settings.data.model_copy(update={"max_length": tokens})
    settings = settings.model_copy(update={"model": model, "data": data})
    machine = Machine(gpus, gib * GIB, host_gib * GIB)
    return choose_memory(settings, LLAMA, machine, planner_work(settings, tokens, world=gpus))


def test_auto_on_cpu_keeps_everything() -> None:
    settings = config()
    assert this_machine(torch.device("cpu"), None) is None
    choice = choose_memory(settings, LLAMA, None, planner_work(settings, 1 << 20))
    assert choice == (("none",) * 32, 0, 0, "memory: recompute none (auto: CPU)", 1, 0)
    settings = config(offload="auto")
    assert choose_memory(settings, LLAMA, None, planner_work(settings, 64))[:2] == (("none",) * 32, 0)


def test_auto_takes_the_highest_levels_that_fit() -> None:
    found = [chosen(config(sp=8), 8, 139.8, n << 10).recompute for n in (32, 128, 512, 1024, 2048)]
    assert found[:2] == [("none",) * 32] * 2
    order = ["none", "mlp", "keep_exchange", "keep_attention", "block"]
    work = [sum(order.index(level) for level in levels) for levels in found]
    assert work == sorted(work) and work[-1] > work[-2] > work[1] == 0
    for levels in found:  # the last layers keep most: their backward comes first
        assert [order.index(x) for x in levels] == sorted((order.index(x) for x in levels), reverse=True)
    assert len(set(found[3])) == 2
    line = chosen(config(sp=8), 8, 139.8, 1 << 20).line
    assert re.search(r"recompute keep_attention\*\d+\+\w+\*\d+ \(auto: \d+\.\d GiB predicted of 139.8 GiB\)$", line)


def test_a_level_set_by_hand_is_kept_while_it_may_fit() -> None:
    assert "may run out" not in chosen(config(sp=8, recompute="block"), 8, 139.8, 1 << 17).line
    bare = config(sp=8, recompute="none", gathered_layers=0)
    need = float(chosen(bare, 8, 139.8, 1 << 17).line.split("(")[1].split()[0])
    cut = chosen(config(sp=8, recompute="none"), 8, need + 0.5, 1 << 17)  # "none" may cut MLPs to keep the reserve
    assert set(cut.recompute) == {"mlp", "none"} and "may run out" not in cut.line
    choice = chosen(config(sp=8, recompute="none", mlp_tile=0), 8, need + 0.5, 1 << 17)
    assert choice.recompute == ("none",) * 32 and choice.line.endswith("may run out")
    with pytest.raises(ConfigError, match=r'GiB on each GPU with memory.recompute = "none" .*; set memory.recompute = "auto", use more'):
        chosen(config(sp=8, recompute="none", mlp_tile=0), 8, need - 0.5, 1 << 17)
    assert set(chosen(config(sp=8, recompute="none"), 8, need - 0.5, 1 << 17).recompute) == {"mlp", "none"}


def test_gathered_weights_stay_where_nothing_is_recomputed_and_room_is_left() -> None:
    short = chosen(config(sp=8), 8, 139.8, 1 << 15)
    assert short.gathered_layers == 32 and "weights of 32 of 32 layers stay gathered" in short.line
    room = config(sp=8, recompute="none", gathered_layers=0)
    need = float(chosen(room, 8, 139.8, 1 << 16).line.split("(")[1].split()[0]) / 0.95
    layer = 2 * plain_model(LLAMA).layer_parameters * 1.03 / GIB / 0.95
    found = [chosen(config(sp=8), 8, need + n * layer, 1 << 16).gathered_layers for n in (0.5, 3.5, 20.5)]
    assert found == [0, 3, 20]
    assert chosen(config(sp=8), 8, 139.8, 1 << 19).gathered_layers == 0  # long: something is recomputed
    assert chosen(config(lora=8), 1, 139.8, 1 << 10).gathered_layers == 0  # one GPU gathers nothing
    by_hand = chosen(config(sp=8, gathered_layers=7), 8, 139.8, 1 << 19)
    assert by_hand.gathered_layers == 7
    with pytest.raises(ConfigError, match="memory.gathered_layers is -1 but must be"):
        check_numbers(config(gathered_layers=-1), 1)


def test_offload_takes_as_few_layers_as_needed_and_stays_in_its_budget() -> None:
    assert chosen(config(sp=8, offload="auto"), 8, 139.8, 1 << 17, 550).offloaded_layers == 0
    choice = chosen(config(sp=8, offload="auto", recompute="block"), 8, 139.8, 3 << 20, 550)
    assert 0 < choice.offloaded_layers < 32 and "layers' activations in host memory" in choice.line
    elsewhere = PROCESS_BYTES + 4 * LLAMA.num_parameters() / 8  # the process, and a checkpoint on its way to the disk
    assert choice.host_bytes == int(0.9 * 550 * GIB / 8 - elsewhere)
    with pytest.raises(ConfigError, match="the node's memory is unknown, .*; set memory.host_memory"):
        chosen(config(sp=8, offload="checkpoints", recompute="block"), 8, 139.8, 1 << 17)
    everything = chosen(config(sp=8, offload="checkpoints", recompute="block"), 8, 139.8, 1 << 17, 550)
    assert everything[:2] == (("block",) * 32, 32)
    little = chosen(config(sp=8, offload="checkpoints", recompute="block"), 8, 139.8, 2 << 20, 300)
    assert 0 < little.offloaded_layers < 32  # what the host cannot hold stays


def test_heads_go_in_groups_only_where_that_decides() -> None:
    for tokens in (1 << 17, 1 << 20):
        assert chosen(config(sp=8), 8, 139.8, tokens).head_chunks == 1
    alone, free = (chosen(config(sp=8, **given), 8, 139.8, 1 << 21) for given in ({"head_chunks": 1}, {}))
    assert free.head_chunks == 2 and free.recompute.count("keep_attention") > alone.recompute.count("keep_attention") > 0
    longest = 41 << 16  # 2.69M tokens: attention's working set is what no longer fits
    assert chosen(config(sp=8, head_chunks=1, recompute="block"), 8, 139.8, longest).line.endswith("may run out")
    choice = chosen(config(sp=8), 8, 139.8, longest)
    assert choice.head_chunks > 1 and choice.line.endswith(f"attention in {choice.head_chunks} groups of heads")
    assert "none" not in chosen(config(sp=8, head_chunks=2), 8, 139.8, 1 << 15).recompute


def test_groups_that_heads_or_ranks_do_not_allow_are_refused() -> None:
    check_head_chunks(config(sp=8, head_chunks=4, recompute="block"), LLAMA)
    with pytest.raises(ConfigError, match=r"memory.head_chunks is 8, but 32 query and 8 kv heads on 8 ranks can be cut into 1, 2, 4; set"):
        check_head_chunks(config(sp=8, head_chunks=8, recompute="block"), LLAMA)
    with pytest.raises(ConfigError, match=r"memory.head_chunks is 3, .* on 1 ranks can be cut into 1, 2, 4, 8"):
        check_head_chunks(config(head_chunks=3, recompute="block"), LLAMA)


def test_too_large_is_refused_with_sizes() -> None:
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB on each GPU even with the least kept .*has 79.0 GiB; use more"):
        chosen(config(), 1, 79, 4096)
    assert set(chosen(config(lora=16), 1, 79, 4096).recompute) == {"none"}
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB of host memory, .* but has 86.4 GiB, its share of the node's 96.0 GiB; "
                       r"set memory.offload_optimizer = false, use more nodes, or set memory.host_memory if"):
        chosen(config(offload_optimizer=True), 1, 79, 4096, 96)


def test_without_offload_the_host_is_only_mentioned() -> None:
    for offload in ("none", "auto"):
        choice = chosen(config(sp=8, offload=offload), 8, 139.8, 1 << 17, 20)
        assert set(choice.recompute) == {"none"} and choice.offloaded_layers == 0
        said = r"; host \d+\.\d GiB per process of 2.2 GiB that seem free \(if the node has more, memory.host_memory says so\)$"
        assert re.search(said, choice.line) and "\n" not in choice.line
    assert "seem" not in chosen(config(sp=8), 8, 139.8, 1 << 17, 200).line


def test_a_node_s_host_memory_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = planned_machine(config(offload="auto", host_memory=480), {}, 8)
    assert machine.host_bytes == 480 * GIB and planned_machine(config(host_memory=480), {"host_memory": 96}, 8).host_bytes == 96 * GIB
    assert planned_machine(config(), {"gpus": 8}, 8).host_bytes == 0
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=GIB))
    monkeypatch.setattr(torch, "tensor", lambda values, **_: torch.DoubleTensor(values))
    for told, found in ((480.0, 480 * GIB), (0.0, free_host_bytes())):
        here = this_machine(device, None, told)  # type: ignore[arg-type]
        assert here is not None and here.host_bytes == pytest.approx(found, rel=0.2)


def seen() -> Any:
    """What a rank of a node of 2, or of one of 1, takes for the machine, had it a GPU."""
    device, rank = SimpleNamespace(type="cuda"), dist.get_rank()
    os.environ["LOCAL_WORLD_SIZE"] = "21"[rank // 2]
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=GIB * (1 + rank))):
        with mock.patch.object(torch, "tensor", lambda values, **_: torch.DoubleTensor(values)):
            return this_machine(device, None, 100.0 - rank)  # type: ignore[arg-type]


def test_ranks_of_unequal_nodes_see_one_machine() -> None:
    """Else they would choose different memory settings, and wait for each other's collectives."""
    machine = Machine(3, GIB, 98 * GIB, 2)
    assert run_distributed(seen, 3, cpu=True) == [machine] * 3


def stage_case(stage: str, lora: int = 0, **section: Any) -> tuple[Any, Any, Any]:
    base = config(stage, lora).model_dump()
    base[stage] |= section
    settings = check(base)
    return planner_model(settings, LLAMA), planner_options(settings, LLAMA), planner_work(settings, 8192, world=2)


def test_every_stage_counts_its_own_models_and_passes() -> None:
    N, head = LLAMA.num_parameters(), LLAMA.num_parameters(reward=True)
    model, options, work = stage_case("rm")
    assert model.parameters == head and not model.has_head and work.documents == 2 and work.forwards == 0
    model, options, work = stage_case("dpo", reference="live")
    assert (model.trained, options.frozen_parameters, work.forwards, work.documents) == (N, N, 1, 2)
    model, options, work = stage_case("dpo", lora=4, reference="live")
    assert options.frozen_parameters == 0 and work.forwards == 1 and model.parameters == N + model.trained < 1.01 * N
    assert stage_case("dpo")[1].frozen_parameters == 0 == stage_case("dpo", reference="live", loss_type="simpo")[2].forwards
    assert [stage_case("kto", **s)[2].forwards for s in ({}, {"reference": "live"}, {"loss_type": "apo_zero_unpaired"})] == [1, 3, 0]
    ppo = {"reward": "ulysses.training.rewards:gsm8k_reward", "epochs": 2, "minibatches": 3}
    model, options, work = stage_case("ppo", **ppo, value="separate")
    assert (model.parameters, model.decoders, options.frozen_parameters, work.forwards) == (N + head, 2, N, 3 / 2)
    assert work.rollout == (4, 64, 4096, 256, 6, False)
    ppo["reward"] = "some/reward"
    model, options, work = stage_case("ppo", **ppo, lora=4, kl_coefficient=0.0)
    assert model.decoders == 1 and options.frozen_parameters == head and work.forwards == 1.0 and work.rollout.merged


def test_models_with_other_heads_share_the_mesh_and_change_its_split(tmp_path: Path) -> None:
    other = architecture("qwen2.5-7b")  # 28 heads beside 32: 4 of 8 ranks exchange heads
    (tmp_path / "config.json").write_text(json.dumps(other.to_hf()))
    assert shards(stage_case("dpo")[0], 8)[:2] == (8, 1) == shards(stage_case("dpo", reference="live")[0], 8)[:2]
    for stage, section in (("dpo", {"reference": str(tmp_path)}), ("ppo", {"reward": str(tmp_path), "kl_coefficient": 0.0})):
        model, options, _ = stage_case(stage, **section)
        assert shards(model, 8)[:2] == (4, 2), stage
        assert options.frozen_parameters == other.num_parameters(reward=stage == "ppo")
    for reference, counts in (("live", (1, 2, 4)), (str(tmp_path), (1, 2, 4, 8))):  # fewer ranks leave more ways to group the heads
        values = config("dpo").model_dump()
        values["dpo"]["reference"], values["parallel"]["sequence_parallel_size"] = reference, 8
        assert planner_options(check(values), LLAMA).head_chunks == counts
        values["memory"] |= {"head_chunks": 8, "recompute": "block"}
        with nullcontext() if 8 in counts else pytest.raises(ConfigError, match="memory.head_chunks is 8"):
            check_head_chunks(check(values), LLAMA)


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ({"mlp_tile": -1}, "memory.mlp_tile is -1 but must be"),
        ({"logits_tile": 0}, "memory.logits_tile is 0 but must be"),
        ({"offload": "checkpoints", "recompute": "none"}, 'memory.recompute "none" makes no checkpoints'),
        ({"head_chunks": 0}, "memory.head_chunks is 0 but must be"),
        ({"head_chunks": 2, "recompute": "none"}, 'memory.recompute "none" keeps all heads at once; set memory.head_chunks to 1'),
    ],
)
def test_contradictions_are_refused(memory: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_numbers(config(**memory), 1)


def test_free_host_memory_is_known_on_linux() -> None:
    assert not Path("/proc/meminfo").exists() or free_host_bytes() > 0


def _settings_of_layers(rank: int = 0) -> list[Any]:
    from ulysses.zero.construct import initialize_distributed

    initialize_distributed()
    mesh = ParallelMesh(1)
    found = []
    for memory, lora, trainable in (
        ({"recompute": "keep_attention", "mlp_tile": 3, "logits_tile": 5, "head_chunks": 2}, 0, True),
        ({"recompute": "block", "offload": "checkpoints"}, 2, True),
        ({"recompute": "keep_exchange", "head_chunks": 2}, 0, False),
    ):
        settings = config(lora=lora, **memory)
        choice = choose_memory(settings, SHAPE, None, planner_work(settings, 64))
        engine = build_engine(
            settings, SHAPE, RandomWeights(SHAPE, 0), mesh, "reference", trainable=trainable, memory=choice
        )
        layers: Any = engine.module.model.layers
        found.append([(x.recompute, x.tiling.mlp_rows, x.tiling.head_chunks, x.offloader is not None) for x in layers])
        found.append(engine.module.lm_head.tile_rows)
        engine.destroy()
    planned = MemoryChoice(("keep_attention",) + ("none",) * (SHAPE.num_hidden_layers - 1), 1)
    engine = build_engine(config(), SHAPE, RandomWeights(SHAPE, 0), mesh, "reference", memory=planned)
    mixed: Any = engine.module.model.layers
    found.append([(x.recompute, x.offloader is not None) for x in mixed])
    engine.destroy()
    return found


def test_every_setting_reaches_the_layers() -> None:
    count = SHAPE.num_hidden_layers
    (found,) = run_distributed(_settings_of_layers, 1, cpu=True)
    assert found == [
        [("keep_attention", 3, 2, False)] * count, 5,
        [("block", "auto", 1, True)] * count, "auto",
        [("none", "auto", 1, False)] * count, "auto",
        [("keep_attention", True)] + [("none", False)] * (count - 1),
    ]  # fmt: skip
