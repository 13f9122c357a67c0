"""The [memory] section: decided once, reaches every layer, refuses what cannot be honoured."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.arch import architecture
from tests.engine_case import SHAPE
from tests.harness import run_distributed
from ulysses.memory.plan import GIB, Machine
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import RandomWeights, build_engine
from ulysses.training.checks import check_numbers
from ulysses.training.command_line import ConfigError, check
from ulysses.training.config import Config
from ulysses.training.memory import MemoryChoice, choose_memory, free_host_bytes, planner_model, planner_work, this_machine

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
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": "bfloat16"})})
    machine = Machine(gpus, gib * GIB, host_gib * GIB)
    return choose_memory(settings, planner_model(settings, LLAMA), machine, planner_work(settings, tokens))


def test_auto_on_cpu_keeps_everything() -> None:
    settings = config()
    assert this_machine(torch.device("cpu"), None) is None
    choice = choose_memory(settings, planner_model(settings, LLAMA), None, planner_work(settings, 1 << 20))
    assert choice == ("none", 0, 0, "memory: recompute none (auto: CPU)")
    settings = config(offload="auto")
    assert choose_memory(settings, planner_model(settings, LLAMA), None, planner_work(settings, 64))[:2] == ("none", 0)


def test_auto_takes_the_highest_level_that_fits() -> None:
    levels = [chosen(config(sp=8), 8, 139.8, n << 10).recompute for n in (32, 128, 512, 1024, 2048)]
    assert levels[:2] == ["none", "none"]
    order = ["none", "keep_exchange", "keep_attention", "block"]
    assert [order.index(x) for x in levels] == sorted(order.index(x) for x in levels) and levels[-1] != "none"
    line = chosen(config(sp=8), 8, 139.8, 1 << 20).line
    assert line.startswith("memory: recompute keep_attention (auto: ") and line.endswith("GiB predicted of 139.8 GiB)")


def test_a_level_set_by_hand_is_kept_and_warned_about() -> None:
    choice = chosen(config(sp=8, recompute="none"), 8, 139.8, 1 << 20)
    assert choice.recompute == "none" and choice.line.endswith("may run out")
    assert "may run out" not in chosen(config(sp=8, recompute="block"), 8, 139.8, 1 << 17).line


def test_offload_takes_as_few_layers_as_needed_and_stays_in_its_budget() -> None:
    assert chosen(config(sp=8, offload="auto"), 8, 139.8, 1 << 17, 550).offloaded_layers == 0
    choice = chosen(config(sp=8, offload="auto", recompute="block"), 8, 139.8, 3 << 20, 550)
    assert 0 < choice.offloaded_layers < 32 and "layers' activations in host memory" in choice.line
    assert choice.host_bytes == int(0.8 * 550 * GIB / 8)
    assert chosen(config(sp=8, offload="checkpoints"), 8, 139.8, 1 << 17, 550)[:2] == ("keep_exchange", 32)


def test_too_large_is_refused_with_sizes() -> None:
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB on each GPU even with the least kept .*has 79.0 GiB; use more"):
        chosen(config(), 1, 79, 4096)
    assert chosen(config(lora=16), 1, 79, 4096).recompute == "none"


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ({"mlp_tile": -1}, "memory.mlp_tile is -1 but must be"),
        ({"logits_tile": 0}, "memory.logits_tile is 0 but must be"),
        ({"offload": "checkpoints", "recompute": "none"}, 'memory.recompute "none" makes no checkpoints'),
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
        ({"recompute": "keep_attention", "mlp_tile": 3, "logits_tile": 5}, 0, True),
        ({"recompute": "block", "offload": "checkpoints"}, 2, True),
        ({"recompute": "keep_exchange"}, 0, False),
    ):
        settings = config(lora=lora, **memory)
        choice = choose_memory(settings, planner_model(settings, SHAPE), None, planner_work(settings, 64))
        engine = build_engine(
            settings, SHAPE, RandomWeights(SHAPE, 0), mesh, "reference", trainable=trainable, memory=choice
        )
        layers: Any = engine.module.model.layers
        found.append([(x.recompute, x.tiling.mlp_rows, x.offloader is not None) for x in layers])
        found.append(engine.module.lm_head.tile_rows)
        engine.destroy()
    return found


def test_every_setting_reaches_the_layers() -> None:
    count = SHAPE.num_hidden_layers
    (found,) = run_distributed(_settings_of_layers, 1)
    assert found == [
        [("keep_attention", 3, False)] * count, 5,
        [("block", "auto", True)] * count, "auto",
        [("none", "auto", False)] * count, "auto",
    ]  # fmt: skip
