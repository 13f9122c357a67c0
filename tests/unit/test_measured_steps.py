"""The planner against measured steps: memory within 5%, time within 15%."""

import json
from dataclasses import replace

import numpy as np
import pytest

from models.arch import ModelConfig, architecture
from tests import ROOT
from tests.engine_case import Case as EngineCase
from tests.engine_case import build_trainer
from tests.harness import run_distributed
from tests.unit.test_plan import SMALL, Data, config, node
from ulysses.options import stage_of
from ulysses.plan.hardware import GIB, PEAKS, Machine
from ulysses.plan.layer_cost import plain_model
from ulysses.plan.planner import choose_memory, cut_steps, planned_step, planner_question
from ulysses.plan.step_cost import Plan, Question, predict, step_seconds

ROWS = ROOT / "benchmarks/measured.jsonl"


def measured(row):
    """Return the plan of a measured row; keys that are absent mean the plain case."""
    hf = {**architecture(row["arch"]).to_hf(), "num_hidden_layers": row["layers"]}
    hf |= {"vocab_size": row.get("vocab_size", hf["vocab_size"]), **row.get("config", {})}
    if "heads" in row:  # "query/kv", of the same size as the shape's own
        query, kv = map(int, row["heads"].split("/"))
        hf |= {"num_attention_heads": query, "num_key_value_heads": kv}
    model, others = plain_model(ModelConfig.from_hf(hf)), ()
    # "U x R": U ranks exchange heads, as another model's heads ask for, and R split rows
    if "ranks" in row:
        heads = int(row["ranks"].split(" x ")[0])
        shape = replace(model.shape, num_attention_heads=heads, num_key_value_heads=1)
        others = (model._replace(shape=shape, parameters=0),)
    if adapters := row.get("adapters"):
        base, total = row["quantize"], model.parameters + adapters
        unmet = row.get("unmet", 0)
        model = model._replace(
            parameters=total, trained=adapters, idle_adapters=unmet, quantize=base
        )
        model = model._replace(lora_rank=row.get("rank", 0))
    levels = ()
    for part in row["recompute"].split("+"):
        level, _, count = part.partition("*")
        levels += (level,) * int(count or row["layers"])
    names = "documents micro_batches whole_steps squares sp moment_bytes".split()
    given = {name: row[name] for name in names if name in row}
    given["fill"] = row.get("mean_tokens", row["tokens"]) / row["tokens"]
    flops, rate = PEAKS[row["gpu"]]
    machine = Machine(row["gpus"], 139.8 * GIB, peak_flops=flops, memory_rate=rate)
    stay = row.get("weights") == "resident" or row["gpus"] == 1
    question = Question(model, machine, row["tokens"], others=others, **given)
    return Plan(question, levels, row["offload"], stay)


def named(row):
    return " ".join(
        str(row.get(key, "")) for key in "arch layers tokens recompute quantize".split()
    )


@pytest.mark.parametrize("row", map(json.loads, ROWS.read_text().splitlines()), ids=named)
def test_measured_steps_are_predicted(row):
    """What a CUDA graph holds for itself counts as reserved only.

    Rows with `first_s` alone are first steps, which compile kernels and pin host memory as well.
    """
    plan = measured(row)
    if "seconds" in row:
        assert step_seconds(plan) == pytest.approx(row["seconds"], rel=0.15)
    assert not row.get("weights") or plan.graphs == row["graphs"]
    found = row.get("reserved_gib" if row.get("graphs") else "peak_gib")
    if found:
        assert predict(plan).allocated / GIB == pytest.approx(found, rel=0.05)


GRPO = {
    "reward": "math:sqrt", "advantage": "group", "answers_per_prompt": 8, "max_new_tokens": 256,
    "kl_coefficient": 0.04, "kl_in": "loss", "epochs": 1, "minibatches": 1,
}  # fmt: skip
# A model of 135M parameters, measured on one H100: the stage, its table, the examples of a step, the sequences of each
# and their tokens, and the seconds of a step without sampling.
STAGES = [
    ("sft", {}, 32, 1, 180, 0.0226),
    ("dpo", {}, 32, 2, 244, 0.0485),
    ("kto", {}, 32, 1, 222, 0.0666),
    ("ppo", GRPO, 64, 1, 150, 1.2),
]


@pytest.mark.parametrize("stage, table, examples, sides, tokens, seconds", STAGES)
def test_stages_are_predicted(stage, table, examples, sides, tokens, seconds):
    settings = config(stage, table=table, dtype="bfloat16", examples=examples)
    lengths = np.full((examples, sides), tokens)
    kind = "prompt" if stage == "ppo" else "sequence"
    data = Data(
        kind=kind, sequence_lengths=lengths, prefix_lengths=0 * lengths, share_prompts=True
    )
    machine = node(1, 79.6)._replace(memory_rate=PEAKS["H100"][1])
    longest = sides * tokens + table.get("max_new_tokens", 0)
    question = planner_question(stage_of(settings), SMALL, machine, longest)
    if (
        stage == "kto"
    ):  # measured with a cached reference: the baseline's pass alone came before the step's
        question = question._replace(forwards=1.0, others=())
    step = planned_step(stage_of(settings), SMALL, data, [*range(examples)])
    plan = choose_memory(cut_steps(question, step, step, True))
    assert plan.graphs != (stage == "ppo") and plan.question.micro_batches == 1
    assert step_seconds(plan) == pytest.approx(seconds, rel=0.15)


def told():
    """What a run says of its memory in two steps, on a GPU whose allocator took 2 GiB."""
    trainer, _ = build_trainer(EngineCase("sft"))
    said = []
    trainer.say, trainer.predicted_gib = said.append, 2.46
    trainer._measure = lambda values, seconds: values.update(peak_memory_gib=2.0, seconds=1.0)
    trainer.run = trainer.run.model_copy(update={"save_last": False, "save_minutes": 0.0})
    trainer.train()
    trainer.engine.destroy()
    return [line for line in said if line.startswith("memory")]


def test_the_first_step_says_what_was_predicted_and_what_was_measured():
    assert run_distributed(told, 1) == [["memory: predicted 2.5 GiB, measured 2.0 GiB"]]
