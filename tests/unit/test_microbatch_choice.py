"""The micro-batch of "auto": as large as makes a step faster, never for more recomputation, and the same everywhere."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.arch import ModelConfig, architecture
from ulysses.config.command_line import check
from ulysses.data.serve.steps import PlannedStep, StepLoader
from ulysses.plan.memory_choice import (
    choose_memory,
    cut_steps,
    micro_batch_line,
    planned_machine,
    planner_case,
    this_machine,
)
from ulysses.plan.planner import GIB, Machine, predict, step_flops, step_seconds
from ulysses.run.trainer import Trainer
from ulysses.stages.sft import SftStage

SMALL = ModelConfig.from_hf(
    architecture("llama3-8b").to_hf()
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
)
LLAMA = architecture("llama3-8b")


def step(*tokens):
    return PlannedStep([*tokens], [float(n * n) for n in tokens])


def planned(shape, examples, *, gpus=1, gib=80.0, sp=1, auto=True, tokens=0, **memory):
    config = check(
        {
            "stage": "sft",
            "model": {"arch": "llama3-8b", "init": "random", "dtype": "bfloat16"},
            "data": {"train": "none.jsonl"},
            "parallel": {"sequence_parallel_size": sp},
            "memory": memory,
            "run": {"steps": 1},
        }
    )
    machine = Machine(gpus, gib * GIB)
    case = planner_case(config, shape, machine, tokens or max(examples.tokens))
    return choose_memory(cut_steps(case, examples, examples, auto))


def test_a_small_model_takes_a_step_at_once():
    found = planned(SMALL, step(*[215] * 31, 1024))
    assert (found.tokens, found.micro_batches) == (31 * 215 + 1024, 1)
    assert found.levels == ("none",) * 30 and predict(found).fits
    # what keeps nothing takes more at a time, in no more memory
    assert found.pass_tokens >= 4 * found.tokens
    assert predict(found).allocated == predict(found._replace(pass_tokens=0)).allocated
    text = micro_batch_line(found, auto=True)
    assert text.startswith(
        "micro-batches: 1 in a typical step, each of at most 7,689 tokens (auto)"
    )


@pytest.mark.parametrize("gpus, sp", [(2, 1), (2, 2), (4, 2)])
def test_every_group_gets_its_share_of_a_step(gpus, sp):
    found = planned(SMALL, step(*[256] * 64), gpus=gpus, sp=sp)
    assert (found.tokens, found.micro_batches) == (64 * 256 * sp // gpus, 1)
    assert found.work == found.tokens


def test_nothing_more_is_recomputed_for_a_larger_one():
    examples = step(*[2048] * 256)
    smallest = planned(SMALL, examples, auto=False)
    large = planned(SMALL, examples, auto=False, tokens=256 * 2048)
    chosen = planned(SMALL, examples)
    assert {*smallest.levels} == {*chosen.levels} == {"none"} and {*large.levels} != {"none"}
    assert 2048 < chosen.tokens < 256 * 2048 and predict(chosen).fits
    assert step_seconds(chosen) < step_seconds(smallest)
    assert sum(step_flops(chosen)) * chosen.micro_batches == pytest.approx(
        sum(step_flops(smallest)) * smallest.micro_batches
    )


def test_a_long_example_stays_alone_and_what_fits_is_never_refused():
    # the longest example alone needs more than it would keep
    found = planned(LLAMA, step(*[65536] * 16), gpus=8, sp=8)
    assert found.tokens == 65536 and found.micro_batches == 16
    for gib in (50.0, 60.0, 80.0):
        examples = step(*[32768] * 8)
        smallest = planned(LLAMA, examples, gpus=8, sp=8, gib=gib, auto=False)
        chosen = planned(LLAMA, examples, gpus=8, sp=8, gib=gib)
        assert sum(step_flops(chosen)) * chosen.micro_batches <= 8 * sum(step_flops(smallest))


def test_a_size_set_by_hand_stays():
    found = planned(SMALL, step(*[215] * 32), auto=False, tokens=1024)
    assert (found.tokens, found.micro_batches) == (1024, 8)
    assert "(auto)" not in micro_batch_line(found, auto=False)


def test_a_cpu_takes_what_hides_its_overhead():
    machine = this_machine(torch.device("cpu"))
    config = check(
        {
            "stage": "sft",
            "model": {"arch": "llama3-8b", "init": "random"},
            "data": {"train": "x"},
            "run": {"steps": 1},
        }
    )
    examples = step(*[100] * 64)
    tiny = SMALL.to_hf() | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    for shape, at_once in ((ModelConfig.from_hf(tiny), True), (LLAMA, False)):
        case = cut_steps(planner_case(config, shape, machine, 100), examples, examples, True)
        assert (case.tokens > 1600) == at_once


def test_plan_and_run_ask_a_gpu_for_its_peaks_once(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0)
    options = SimpleNamespace(gpu_memory=None, host_memory=1.0, gpus=1)
    config = SimpleNamespace(memory=SimpleNamespace(host_memory=0.0))
    plan, run = planned_machine(config, options, 1), this_machine(torch.device("cuda"), 1.0)
    assert plan[4:] == run[4:] == (312e12, 2e12)


def test_the_typical_and_the_largest_step_are_those_of_the_data():
    class Data(SimpleNamespace):
        def __len__(self):
            return len(self.lengths)

    lengths = np.array([1, 2, 3, 40, 5, 6, 7])
    data = Data(lengths=lengths, sources=0 * lengths, source_weights=[1.0])
    loader = StepLoader(data, 2, tokens_per_microbatch=64, shuffle=False)
    assert loader.planned_steps() == ([4, 5], [2, 3])


def test_the_note_of_a_waiting_host_names_what_auto_cannot_choose():
    def note(tokens, cuts, world=1):
        trainer = object.__new__(Trainer)
        trainer.__dict__ |= {
            "_waits": [0.0], "_cuts": cuts, "mesh": SimpleNamespace(world_size=world),
            "engine": SimpleNamespace(device=torch.device("cuda")),
            "stage": SftStage(SimpleNamespace(batch=SimpleNamespace(tokens_per_microbatch=tokens))),
        }  # fmt: skip
        return trainer._host_note()

    assert note("auto", 3) == ""
    assert note("auto", 1).endswith("at a time by more batch.examples")
    assert note("auto", 1, 2).endswith("more batch.examples, or use fewer GPUs")
    assert note(1024, 3).endswith('by batch.tokens_per_microbatch = "auto"')
