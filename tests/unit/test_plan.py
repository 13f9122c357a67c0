"""What the planner chooses for a run, what it refuses, and that every rank and layer gets what was chosen."""

import json
import os
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.arch import ModelConfig, architecture
from tests import rows_of
from tests.engine_case import SHAPE
from tests.harness import run_distributed
from ulysses.config.command_line import check
from ulysses.config.schema import Options
from ulysses.config.section import ConfigError
from ulysses.data.serve.steps import StepLoader
from ulysses.disk import write_json
from ulysses.memory.levels import LEVELS, LayerMemory
from ulysses.options import stage_of
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.hardware import GIB, Machine, planned_machine, this_machine
from ulysses.plan.layer_cost import plain_model
from ulysses.plan.planner import (
    PlannedStep,
    choose,
    choose_memory,
    cut_steps,
    longest_sequence,
    memory_line,
    micro_batch_line,
    planned_step,
    planner_question,
)
from ulysses.plan.step_cost import Plan, Question, fits, predict, step_flops, step_seconds
from ulysses.run.build import InitialWeights, frozen_engine, layer_memory, trained_engine

LLAMA = architecture("llama3-8b")
WHOLE, SCORES = plain_model(LLAMA), plain_model(LLAMA, reward=True)
SMALL = ModelConfig.from_hf(
    LLAMA.to_hf()
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
CPU = torch.device("cpu")


def node(gpus=8, gib=139.8, host_gib=0.0):
    return Machine(gpus, gib * GIB, host_gib * GIB)


def config(
    stage="sft", lora=0, sp=1, dtype="float32", table=None, examples=8, run=None, **memory
):  # fmt: skip
    model = {"arch": "llama3-8b", "init": "random", "dtype": dtype, "lora": {"rank": lora}}
    given = {
        "stage": stage,
        "model": model,
        "data": {"train": "none.jsonl"},
        "batch": {"examples": examples},
        "parallel": {"sequence_parallel_size": sp},
        "memory": memory,
        "run": {"steps": 1, **(run or {})},
    }
    return check(given | {stage: table} if table else given)


def asked(tokens, gib=139.8, host_gib=0.0, *, gpus=8, sp=0, **settings):
    settings = config(sp=sp or gpus, dtype="bfloat16", **settings)
    return planner_question(stage_of(settings), LLAMA, node(gpus, gib, host_gib), tokens)


def chosen(*given, **settings):
    return choose_memory(asked(*given, **settings))


# ---------------------------------------------------------------- levels, offload, the place of weights


def test_the_fastest_level_that_fits_and_the_next_one_on_the_last_layers():
    case = Question(WHOLE, node(), 1 << 17, sp=8)
    assert choose(case).name == "none"
    for tokens, level, upper in (
        (1 << 19, "keep_attention", "none"),
        (1 << 21, "block", "keep_attention"),
    ):
        plan = choose(case._replace(tokens_per_microbatch=tokens))
        count = plan.levels.count(upper)
        assert plan.levels == (level,) * (32 - count) + (upper,) * count and 0 <= count < 32
        assert plan.name == (f"{level}*{32 - count}+{upper}*{count}" if count else level)
        assert fits(plan)
        for levels in ((*plan.levels[1:], upper), (upper,) * 32):
            assert not fits(plan._replace(levels=levels))
    assert not fits(choose(Question(WHOLE, node(1, 80), 4096)))


def test_weights_and_optimizer_that_the_memory_beside_cpus_cannot_hold_are_refused(
    monkeypatch,
):
    """Llama-3-8B in float32 takes 20 bytes for each of 8.03 billion parameters, on two processes as on one."""
    monkeypatch.setattr("ulysses.plan.hardware.free_host_bytes", lambda: 140 * GIB)
    said = (
        r"weights, optimizer and gradients take 149.6 GiB .* but 140.0 GiB are free; use GPUs"
    )

    def plan(processes, host_gib=0, **settings):
        machine = this_machine(CPU, host_gib)._replace(gpus=processes)
        stage = stage_of(config(weights="sharded", **settings))
        choose_memory(planner_question(stage, LLAMA, machine, 4096))

    for processes in (1, 2):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        with pytest.raises(ConfigError, match=said):
            plan(processes)
        plan(processes, host_gib=150)
        plan(processes, lora=8)


@pytest.mark.parametrize("gpus, gib", [(8, 139.8), (6, 139.8), (1, 80.0)])
def test_an_automatic_degree_is_the_smallest_that_fits(gpus, gib):
    found = []
    for tokens in (1 << 13, 1 << 19, 1 << 24):
        plans = {
            d: choose(asked(tokens, gib, gpus=gpus, sp=d))
            for d in range(1, gpus + 1)
            if gpus % d == 0
        }
        fitting = [degree for degree, plan in plans.items() if fits(plan)]
        found.append(asked(tokens, gib, gpus=gpus, sp="auto").sp)
        assert found[-1] == min(fitting, default=gpus)
    assert found == sorted(found) and not fitting  # no degree fits 16 million tokens
    assert len({*found}) > 1 or gpus == 1


def test_auto_on_cpu_keeps_everything():
    for offload in ("none", "auto"):
        settings = config(sp="auto", offload=offload)
        plan = choose_memory(
            planner_question(stage_of(settings), LLAMA, this_machine(CPU, 1000), 1 << 20)
        )
        assert memory_line(plan) == "memory: recompute none (auto: CPU)"
        assert layer_memory(plan) == LayerMemory(("none",) * 32, offloaded_layers=0)
        assert plan.resident


def test_a_level_set_by_hand_is_kept_while_it_may_fit():
    assert "may run out" not in memory_line(chosen(1 << 17, recompute="block"))
    need = predict(chosen(1 << 17, recompute="none", weights="sharded")).gpu / GIB
    plan = chosen(1 << 17, need + 0.5, recompute="none")
    assert plan.levels == ("none",) * 32 and memory_line(plan).endswith("may run out")
    said = r'GiB on each GPU with memory.recompute = "none" .*; set memory.recompute and memory.offload to "auto"'
    with pytest.raises(ConfigError, match=said):
        chosen(1 << 17, need - 0.5, recompute="none")


def test_weights_stay_where_that_is_faster_and_fits():
    """32 layers of short sequences wait for weights; of a longer one the room is worth more for activations."""
    short, long = chosen(1 << 15), chosen(1 << 20)
    assert short.resident and memory_line(short).endswith("; weights resident")
    assert not long.resident and long[1:] == chosen(1 << 20, weights="sharded")[1:]
    assert f"memory: recompute {long.name} (auto: " in memory_line(long)
    # what does not fit on every GPU is sharded, unless that is asked for
    assert not chosen(1 << 13, 30.0).resident and chosen(1 << 13, 30.0, recompute="block")
    with pytest.raises(ConfigError, match="weights, optimizer and gradients"):
        chosen(1 << 13, 30.0, weights="resident")
    assert chosen(1 << 13, gpus=1, gib=200.0, weights="sharded").resident  # nothing to share


def test_offload_auto_takes_the_fewest_layers():
    given = {"host_gib": 550, "recompute": "block"}
    assert not fits(choose(asked(3 << 20, **given)))
    plan = chosen(3 << 20, **given, offload="auto")
    away = plan.offloaded_layers
    assert 0 < away < 32 and predict(plan).host <= 0.9 * 550 * GIB / 8
    assert not fits(plan._replace(offloaded_layers=away - 1))
    assert f"; {away} of 32 layers' activations in host memory" in memory_line(plan)
    # the host is too small
    small = asked(3 << 20, host_gib=100, recompute="block", offload="auto")
    assert not fits(choose(small))
    assert not chosen(1 << 20, host_gib=550, offload="auto").offloaded_layers
    # a faster level, with some layers on the host
    assert chosen(1 << 21, host_gib=550, offload="auto").name == "keep_attention"


def test_longest_sequence_is_the_longest():
    case = Question(WHOLE, node(), 0, sp=8)
    length, small = longest_sequence(case), Question(WHOLE, node(1, 24), 0)
    assert length % 1024 == 0 and longest_sequence(small) == 0
    assert fits(choose(case._replace(tokens_per_microbatch=length)))
    assert not fits(choose(case._replace(tokens_per_microbatch=length + 1024)))
    assert longest_sequence(case._replace(documents=2)) <= length // 2
    large = case._replace(machine=node(8, 141, 550), offload="auto")
    assert longest_sequence(large) >= 3.5 * 2**20


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


# ---------------------------------------------------------------- what is counted


def predicted(**changed):
    return predict(
        Plan(Question(WHOLE, node(), 8192, sp=8)._replace(**changed), ("block",) * 32)
    )


def test_states_are_eighteen_bytes_per_trained_parameter_on_the_gpu_or_the_host():
    N, plain = WHOLE.parameters, predicted()
    assert plain.states == 18 * N / 8
    assert predicted(model=WHOLE._replace(trained=10**7)).states == (2 * N + 16e7) / 8
    away = predicted(offload_optimizer=True, offload_parameters=True)
    assert away.states == 0 and away.host - plain.host == 18 * N / 8
    assert predicted(others=(WHOLE,)).states == 20 * N / 8
    # processes on CPUs need what gloo copies, and not the buffers of NCCL
    small = {"model": plain_model(SMALL)}
    on_cpus, on_gpus = predicted(**small, machine=node(8, inf)), predicted(**small)
    assert on_cpus.allocated == on_gpus.allocated and on_cpus.gpu < on_gpus.gpu - 1e9


def test_rollouts_hold_the_whole_policy_and_its_cache():
    settings = config("ppo", table=PPO, dtype="bfloat16", sp=8)
    rollout = planner_question(stage_of(settings), LLAMA, node(), 8192).rollout
    rollout = rollout._replace(answers=512, batch=64, prompt_tokens=1024, new_tokens=7168)
    plain, more = predicted(), predicted(rollout=rollout)
    merged = predicted(rollout=rollout._replace(merged=True))
    cache = 2 * 2 * 32 * 64 * 8192 * 1024
    assert more.allocated > plain.states + 2 * WHOLE.parameters + cache > plain.allocated
    both = merged.allocated - more.allocated
    assert both == pytest.approx(2 * WHOLE.parameters, rel=1e-3)
    assert predicted(rollout=rollout._replace(batch=0)).allocated == plain.allocated  # servers


@pytest.mark.parametrize("stage, table", [("sft", None), ("dpo", {"reference": "live"})])
def test_models_that_answer_samples_are_whole_then(stage, table):
    """Sharded weights are gathered for run.samples: of the policy, and of a larger reference."""
    asking = {"samples": ["Who are you?", "And why?"]}
    settings = config(stage, dtype="bfloat16", sp=8, table=table, run=asking)
    case = planner_question(stage_of(settings), LLAMA, node(), 8192)
    assert case.samples[:4] == (2, 1, settings.data.max_length, 256)
    if stage == "dpo":
        case = case._replace(others=(plain_model(architecture("llama3-70b")),))
    plan = choose(case)._replace(resident=False)
    found, without = predict(plan), predict(plan._replace(question=case._replace(samples=None)))
    whole = max(m.weight_bytes(2) for m in (case.model, *case.others))
    assert found.allocated > found.states + whole > without.allocated


def test_passes_of_a_larger_model_are_planned_for():
    """Its gathered layers and its work may be the peak."""
    large = plain_model(architecture("llama3-70b"))._replace(parameters=0)  # its shards aside
    small = {
        "model": plain_model(architecture("qwen2.5-0.5b")),
        "tokens_per_microbatch": 1 << 19,
    }
    alone, other = predicted(**small), predicted(**small, others=(large,))
    gathered = 2 * 2 * large.layers[0].parameters
    assert other.states == alone.states and other.kept == alone.kept
    assert other.allocated - other.states > gathered + alone.kept
    assert alone.allocated - alone.states < 1.01 * (alone.kept + alone.working)


def test_links_between_nodes_are_slower():
    plans = (
        Plan(Question(WHOLE, Machine(16, GIB, 0, n), 1 << 15, sp=16), ("none",) * 32)
        for n in (8, 16)
    )
    slow, fast = map(step_seconds, plans)
    assert slow > 1.5 * fast


def stage_case(stage, lora=0, sp=1, **table):
    return planner_question(
        stage_of(config(stage, lora, sp, table=table)), LLAMA, Machine(8, GIB), 8192
    )


LIVE = {"reference": "live"}
PPO = {"reward": "ulysses.rl.rewards:gsm8k_reward", "epochs": 2, "minibatches": 3}
MODEL = PPO | {"reward": "some/reward", "kl_coefficient": 0.0}
# The stage, the rank of its adapters and its table; the model that stands beside, and the passes that are counted.
STAGE_PASSES = """
rm => 0 => {} => none => 0
dpo => 0 => {} => none => 0
dpo => 0 => {"reference": "live"} => whole => 1
dpo => 4 => {"reference": "live"} => none => 1
dpo => 0 => {"reference": "live", "loss_type": "simpo"} => none => 0
kto => 0 => {} => whole => 3
kto => 4 => {} => none => 3
kto => 0 => {"loss_type": "apo_zero_unpaired"} => whole => 1
ppo => 0 => {"reward": "math:sqrt", "epochs": 2, "minibatches": 3} => whole => 1
ppo => 4 => {"reward": "some/reward", "epochs": 2, "minibatches": 3, "kl_coefficient": 0} => scores => half
"""
BESIDE = {"none": (), "whole": (WHOLE,), "scores": (SCORES,)}
# the policy's pass and the reward model's, which has no head and so costs less, over two epochs
HALF = (1 + SCORES.forward_parameters / WHOLE.forward_parameters) / 2


@pytest.mark.parametrize("stage, lora, table, beside, forwards", rows_of(STAGE_PASSES))
def test_every_stage_counts_its_own_models_and_passes(stage, lora, table, beside, forwards):
    case = stage_case(stage, int(lora), **json.loads(table))
    assert case.others == BESIDE[beside]
    assert case.forwards == (HALF if forwards == "half" else int(forwards))


def test_the_planner_knows_the_trained_model_and_the_rollout():
    scored, pairs, ppo = stage_case("rm"), stage_case("dpo", lora=4), stage_case("ppo", **PPO)
    assert scored.model == SCORES and scored.documents == pairs.documents == 2
    N = WHOLE.parameters
    assert pairs.model.parameters == N + pairs.model.trained < 1.01 * N
    assert stage_case("dpo").model.trained == N
    assert ppo.model.parameters == N + LLAMA.hidden_size
    assert ppo.rollout[:4] == (1, 1, 4096, 256) and not ppo.rollout.merged
    assert stage_case("ppo", lora=4, **MODEL).rollout.merged


def test_as_many_answers_are_decoded_as_fit_unless_a_number_is_given():
    """A cache of 64 answers of 16k tokens takes 128 GiB beside the weights; a run asks its GPU for what is free."""
    table = {"reward": "math:sqrt", "max_new_tokens": 12288, "advantage": "group"}
    table["answers_per_prompt"] = 8

    def planned_for(batch):
        asked = table | {"generation_batch": batch}
        settings = config("ppo", dtype="bfloat16", table=asked, examples=64)
        return planner_question(stage_of(settings), LLAMA, node(8, 80), 16384)

    for batch in ("auto", 16):
        assert fits(choose_memory(planned_for(batch)))
    said = r"work [\d.]+; sampling or passes without gradient [\d.]+ above these, the rest for"
    with pytest.raises(ConfigError, match=said):
        choose_memory(planned_for(64))


def test_models_with_other_heads_share_the_mesh_and_change_its_split(tmp_path):
    other = architecture("qwen2.5-7b")  # 28 heads beside 32: 4 of 8 ranks exchange heads
    write_json(tmp_path / "config.json", other.to_hf())
    assert stage_case("dpo", sp=8, **LIVE).common_heads == 32
    for stage, table, passes in (
        ("dpo", {"reference": str(tmp_path)}, lambda size: size),
        # ppo trains on a rollout 4 times
        ("ppo", MODEL | {"reward": str(tmp_path), "epochs": 4}, lambda size: (1 + size) / 4),
    ):
        case = stage_case(stage, sp=8, **table)
        model = plain_model(other, reward=stage == "ppo")
        assert case.common_heads == 4 and case.others == (model,)
        # its passes are counted at its own size
        size = model.forward_parameters / WHOLE.forward_parameters
        assert case.forwards == pytest.approx(passes(size)) and size < 0.96


# ---------------------------------------------------------------- micro-batches


def step(*tokens):
    return PlannedStep([*tokens], [float(n * n) for n in tokens])


def planned(shape, examples, *, gpus=1, gib=80.0, sp=1, auto=True, tokens=0, **memory):
    settings, machine = config(sp=sp, dtype="bfloat16", **memory), node(gpus, gib)
    case = planner_question(stage_of(settings), shape, machine, tokens or max(examples.tokens))
    return choose_memory(cut_steps(case, examples, examples, auto))


@pytest.mark.parametrize("gib", [64, 141])
def test_no_other_level_is_faster_where_activations_wait_on_the_host(gib):
    """Copies of all but attention take longer than to compute a layer again."""
    settings = config(lora=16, dtype="bfloat16", offload="auto", weights="resident")
    case = planner_question(
        stage_of(settings), architecture("qwen3.5-35b-a3b"), node(1, gib, 2000), 1 << 16
    )
    case = case._replace(model=case.model._replace(quantize="nf4"))
    levels = [choose(case._replace(recompute=level)) for level in LEVELS]
    fastest = min(step_seconds(plan) for plan in levels if fits(plan))
    plan = choose_memory(case)
    assert fits(plan) and step_seconds(plan) <= fastest
    assert "(auto: " in memory_line(plan)


def test_a_small_model_takes_a_step_at_once():
    plan = planned(SMALL, step(*[215] * 31, 1024))
    assert (plan.question.tokens_per_microbatch, plan.question.micro_batches) == (
        31 * 215 + 1024,
        1,
    )
    assert plan.levels == ("none",) * 30 and fits(plan)
    text = micro_batch_line(plan.question, auto=True)
    assert text.startswith(
        "micro-batches: 1 in a typical step, each of at most 7,689 tokens (auto)"
    )


@pytest.mark.parametrize("gpus, sp", [(2, 1), (2, 2), (4, 2)])
def test_every_group_gets_its_share_of_a_step(gpus, sp):
    case = planned(SMALL, step(*[256] * 64), gpus=gpus, sp=sp).question
    assert (case.tokens_per_microbatch, case.micro_batches) == (64 * 256 * sp // gpus, 1)
    assert case.fill == 1


def step_products(plan):
    return sum(step_flops(plan)) * plan.question.micro_batches


def test_nothing_more_is_recomputed_for_a_larger_one():
    examples = step(*[2048] * 256)
    smallest = planned(SMALL, examples, auto=False)
    large = planned(SMALL, examples, auto=False, tokens=256 * 2048)
    plan = planned(SMALL, examples)
    assert {*smallest.levels} == {*plan.levels} == {"none"} and {*large.levels} != {"none"}
    assert 2048 < plan.question.tokens_per_microbatch < 256 * 2048 and fits(plan)
    assert step_seconds(plan) < step_seconds(smallest)
    assert step_products(plan) == pytest.approx(step_products(smallest))


def test_no_other_size_makes_steps_of_equal_examples_a_hundredth_faster():
    """A micro-batch holds a whole number of them: 16 of 2.7 examples' tokens are not enough for 43 of these."""
    shape = architecture("qwen3.5-0.8b")
    for gpus, count, tokens in ((1, 16, 16384), (1, 64, 2048), (8, 64, 16384)):
        examples = step(*[tokens] * count)
        seconds = [
            step_seconds(
                planned(shape, examples, gpus=gpus, gib=141, auto=False, tokens=n * tokens)
            )
            for n in (1, 2, 3, 4, 8)
        ]
        assert step_seconds(planned(shape, examples, gpus=gpus, gib=141)) <= 1.01 * min(seconds)


def test_a_long_example_stays_alone_and_what_fits_is_never_refused():
    # the longest example alone needs more than it would keep
    case = planned(LLAMA, step(*[65536] * 16), gpus=8, sp=8).question
    assert case.tokens_per_microbatch == 65536 and case.micro_batches == 16
    for gib in (50.0, 60.0, 80.0):
        examples = step(*[32768] * 8)
        smallest = planned(LLAMA, examples, gpus=8, sp=8, gib=gib, auto=False)
        plan = planned(LLAMA, examples, gpus=8, sp=8, gib=gib)
        assert step_products(plan) <= 8 * sum(step_flops(smallest))


def test_gradients_stay_where_no_step_has_a_second_micro_batch():
    found = []
    for largest in (4, 5):
        case = planner_question(stage_of(config(dtype="bfloat16")), SMALL, node(1), 1024)
        case = cut_steps(case, step(*[256] * 4), step(*[256] * largest), False)
        assert (case.tokens_per_microbatch, case.micro_batches) == (1024, 1)
        found.append(choose_memory(case))
    kept, added = found
    assert kept.keeps_gradients and not added.keeps_gradients
    assert predict(added).states - predict(kept).states == 4 * kept.question.model.trained
    assert step_seconds(kept) < step_seconds(added)
    # means of several processes, and what the host updates, are float32 numbers
    for change in ({"machine": node(2)}, {"offload_optimizer": True}):
        assert not kept._replace(question=kept.question._replace(**change)).keeps_gradients


def test_a_size_set_by_hand_stays():
    plan = planned(SMALL, step(*[215] * 32), auto=False, tokens=1024)
    assert (plan.question.tokens_per_microbatch, plan.question.micro_batches) == (1024, 8)
    assert "(auto)" not in micro_batch_line(plan.question, auto=False)


def test_a_cpu_takes_what_hides_its_overhead():
    machine, examples = this_machine(CPU), step(*[100] * 64)
    tiny = replace(SMALL, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    for shape, at_once in ((tiny, True), (LLAMA, False)):
        case = cut_steps(
            planner_question(stage_of(config()), shape, machine, 100), examples, examples, True
        )
        assert (case.tokens_per_microbatch > 1600) == at_once


class Data(SimpleNamespace):
    share_prompts = True

    def __len__(self):
        return len(self.lengths)


def test_the_typical_and_the_largest_step_are_those_of_the_data():
    lengths = np.array([1, 2, 3, 40, 5, 6, 7])
    data = Data(lengths=lengths, sources=0 * lengths, source_weights=[1.0])
    loader = StepLoader(data, 2, tokens_per_microbatch=64, shuffle=False)
    assert loader.planned_steps() == ([4, 5], [2, 3])


def test_answers_are_planned_as_long_as_they_may_be_and_prompts_once():
    """Two prompts of 11 and 21 tokens with 4 answers of 30, in two optimizer steps."""
    table = {
        "reward": "math:sqrt",
        "answers_per_prompt": 4,
        "max_new_tokens": 30,
        "minibatches": 2,
    }
    settings = config("ppo", table=table | {"advantage": "group"}, examples=2)
    lengths = np.array([[11], [21]])
    data = Data(
        kind="prompt",
        sequence_lengths=lengths,
        prefix_lengths=0 * lengths,
        lengths=lengths[:, 0],
    )
    shared = planned_step(stage_of(settings), LLAMA, data, [0, 1])
    assert sum(shared.tokens) == pytest.approx(10 + 4 * 31, abs=4)
    # each of its tokens sees the whole prompt nevertheless
    assert sum(shared.squares) < 4 * 41**2 < 1.1 * sum(shared.squares)
    data.share_prompts = False
    whole = planned_step(stage_of(settings), LLAMA, data, [0, 1])
    assert shared.shares and whole == ([41] * 4, [41.0**2] * 4, False)


# ---------------------------------------------------------------- one machine, one decision


def test_plan_and_run_ask_a_gpu_for_its_peaks_once(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0)
    options = Options(host_memory=1, gpus=1, dry_run=True)
    plan, run = planned_machine(config(), options, 1), this_machine(torch.device("cuda"), 1.0)
    assert plan[:3] == run[:3] and plan[4:] == run[4:] == (312e12, 2e12)


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


MIXED = ("keep_attention",) + ("none",) * (SHAPE.num_hidden_layers - 1)


def settings_of_layers(rank=0):
    from ulysses.zero.construct import initialize_distributed

    initialize_distributed()
    mesh, weights, found = ParallelMesh(1), InitialWeights(SHAPE, 0), []
    for settings, trainable, changed in (
        (
            config(lora=2, recompute="block"),
            True,
            {"offloaded_layers": SHAPE.num_hidden_layers},
        ),
        (config(recompute="keep_attention"), False, {}),
        (config(), True, {"levels": MIXED, "offloaded_layers": 1}),
    ):
        plan = choose_memory(planner_question(stage_of(settings), SHAPE, node(1, 80, 80), 64))
        plan = plan._replace(**changed)
        engine = (
            trained_engine(stage_of(settings), weights, mesh, plan, "auto")
            if trainable
            else frozen_engine(settings, weights, mesh, "auto")
        )
        layers = engine.module.model.layers
        found.append([(layer.recompute, layer.offloader is not None) for layer in layers])
        engine.destroy()
    return found


def test_every_setting_reaches_the_layers():
    (found,) = run_distributed(settings_of_layers, 1, cpu=True)
    block, frozen, mixed = found
    assert {*block} == {("block", True)} and {*frozen} == {("none", False)}
    assert mixed == [(level, level != "none") for level in MIXED]
