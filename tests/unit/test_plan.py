"""The planner against measured steps, and its own arithmetic."""

import json
from math import inf
from pathlib import Path

import pytest

from models.arch import ARCHITECTURES, ModelConfig, architecture
from models.decoder import count_parameters
from ulysses.plan.memory_choice import choose, longest_sequence, plain_model
from ulysses.plan.planner import (
    GIB,
    PROCESS_BYTES,
    Machine,
    PlannedRollout,
    Workload,
    predict,
    step_seconds,
)
from ulysses.run.metrics import PEAKS

ROWS = Path(__file__).parents[2] / "benchmarks/measured.jsonl"
LLAMA = plain_model(architecture("llama3-8b"))
ADAPTERS = LLAMA._replace(trained=10**7)


def node(gpus=8, gib=139.8, host_gib=0):
    return Machine(gpus, gib * GIB, host_gib * GIB)


NODE = node()


def case(tokens, level="none", model=LLAMA, machine=NODE, sp=0, **more):
    more = {"levels": (level,) * model.layers, **more}
    return Workload(model, machine, tokens, sp or machine.gpus, **more)


def predicted(*arguments, **more):
    return predict(case(*arguments, **more))


def measured(row):
    """Return what the planner is asked about a measured row; keys that are absent mean the plain case."""
    hf = {**architecture(row["arch"]).to_hf(), "num_hidden_layers": row["layers"]}
    hf |= {"vocab_size": row.get("vocab_size", hf["vocab_size"]), **row.get("config", {})}
    if "heads" in row:  # "query/kv", of the same size as the shape's own
        query, kv = map(int, row["heads"].split("/"))
        hf |= {"num_attention_heads": query, "num_key_value_heads": kv}
    model, others = plain_model(ModelConfig.from_hf(hf)), ()
    # "U x R": U ranks exchange heads, as another model's heads ask for, and R split rows
    if "ranks" in row:
        heads = int(row["ranks"].split(" x ")[0])
        others = (model._replace(heads=heads, kv_heads=1, parameters=0),)
    if adapters := row.get("adapters"):
        base, total = row["quantize"], model.parameters + adapters
        model = model._replace(parameters=total, trained=adapters, quantize=base)
    levels = ()
    for part in row["recompute"].split("+"):
        level, _, count = part.partition("*")
        levels += (level,) * int(count or row["layers"])
    names = "weights documents micro_batches mean_tokens squares sp tokens".split()
    given = {name: row[name] for name in names if name in row}
    flops, rate = PEAKS[row["gpu"]]
    machine = node(row["gpus"])._replace(peak_flops=flops, memory_rate=rate)
    given |= {"model": model, "machine": machine, "levels": levels, "others": others}
    return case(**given, offloaded_layers=row["offload"])


def named(row):
    return " ".join(
        str(row.get(key, "")) for key in "arch layers tokens recompute quantize".split()
    )


@pytest.mark.parametrize("row", map(json.loads, ROWS.read_text().splitlines()), ids=named)
def test_measured_steps_are_predicted(row):
    """Memory within 5%, time within 15%. What a CUDA graph holds for itself counts as reserved only.

    Rows with `first_s` alone are first steps, which compile kernels and pin host memory as well.
    """
    asked = measured(row)
    if "seconds" in row:
        assert step_seconds(asked) == pytest.approx(row["seconds"], rel=0.15)
    assert not row.get("weights") or asked.graphs == row["graphs"]
    found = row.get("reserved_gib" if row.get("graphs") else "peak_gib")
    if found:
        assert predict(asked).allocated / GIB == pytest.approx(found, rel=0.05)


def test_states_are_eighteen_bytes_per_parameter():
    N, several = LLAMA.parameters, predicted(8192)
    assert N == count_parameters(ARCHITECTURES["llama3-8b"])
    assert LLAMA.layer_parameters + 2 * 4096 == 218_112_000
    assert several.states == 18 * N / 8
    assert predicted(8192, model=ADAPTERS).states == (2 * N + 16e7) / 8
    away = predicted(8192, offload_optimizer=True, offload_parameters=True)
    assert away.states == 0 and away.host == PROCESS_BYTES + 22 * N / 8
    beside = predicted(8192, others=(LLAMA,))
    assert beside.states == 20 * N / 8 and beside.host == PROCESS_BYTES + N / 2
    # CUDA, NCCL
    for p, outside in ((predicted(8192, machine=node(1)), 1.3e9), (several, 3.4e9)):
        assert p.gpu - 1.03 * p.allocated == pytest.approx(outside)


def test_rollouts_hold_the_whole_policy_and_its_cache():
    rollout = PlannedRollout(128, 64, 1024, 1024, 8192)
    asked = None, rollout, rollout._replace(merged=True)
    plain, more, merged = (predicted(2048, "block", rollout=r) for r in asked)
    cache = 2 * 2 * 32 * 64 * 2048 * 1024
    assert more.allocated > plain.states + 2 * LLAMA.parameters + cache > plain.allocated
    both = merged.allocated - more.allocated
    assert both == pytest.approx(2 * LLAMA.parameters, rel=1e-3)


def test_passes_without_gradient_are_planned_for():
    """A reference or reward model may be larger than the trained one: its gathered layers and its work are the peak."""
    small = plain_model(architecture("qwen2.5-0.5b"))
    large = plain_model(architecture("llama3-70b"))._replace(parameters=0)  # its shards aside
    alone, other = (predicted(1 << 19, "block", small, others=o) for o in ((), (large,)))
    gathered = 2 * 2 * large.layer_parameters
    rows = 2 * (1 << 16) * 3 * (large.query_width + 2 * large.kv_width)
    assert other.states == alone.states and other.kept == alone.kept
    assert other.allocated - other.states > gathered + rows > alone.allocated - alone.states


def test_links_between_nodes_are_slower():
    slow, fast = (step_seconds(case(1 << 15, machine=Machine(16, GIB, 0, n))) for n in (8, 16))
    assert slow > 1.5 * fast


def chosen(tokens, machine=NODE, **more):
    choice = choose(case(tokens, machine=machine, **more))
    assert predict(choice).fits
    return choice


def test_the_fastest_level_that_fits_and_the_next_one_on_the_last_layers():
    assert chosen(1 << 17).name == "none"
    for tokens, level, upper in (
        (1 << 19, "keep_attention", "none"),
        (1 << 21, "block", "keep_attention"),
        (3 << 20, "pair", "block"),
    ):
        choice = chosen(tokens)
        count = choice.levels.count(upper)
        assert choice.levels == (level,) * (32 - count) + (upper,) * count and 0 <= count < 32
        assert choice.name == (f"{level}*{32 - count}+{upper}*{count}" if count else level)
        assert not predicted(tokens, levels=(*choice.levels[1:], upper)).fits
        assert not predicted(tokens, upper).fits
    assert not predict(choose(case(4096, machine=node(1, 80)))).fits


def test_offload_auto_takes_the_fewest_layers():
    machine = node(host_gib=550)
    asked = case(3 << 20, machine=machine, recompute="block")
    assert not predict(choose(asked)).fits
    choice = chosen(3 << 20, machine, recompute="block", offload="auto")
    away = choice.offloaded_layers
    assert 0 < away < 32 and predict(choice).host <= 0.9 * 550 * GIB / 8
    assert not predict(choice._replace(offloaded_layers=away - 1)).fits_gpu
    # the host is too small
    small = choose(asked._replace(machine=node(host_gib=100), offload="auto"))
    assert not predict(small).fits
    needless = chosen(1 << 20, machine, offload="auto")
    assert needless._replace(offload="none") == chosen(1 << 20, machine)
    # a faster level, with some layers on the host
    assert chosen(1 << 21, machine, offload="auto").name == "keep_attention"


def test_longest_sequence_is_the_longest():
    def longest(machine=NODE, offload="none", documents=1):
        return longest_sequence(case(0, machine=machine, documents=documents, offload=offload))

    length = longest()
    assert length % 1024 == 0 and chosen(length) and longest(node(1, 24)) == 0
    assert not predict(choose(case(length + 1024))).fits and longest(documents=2) <= length // 2
    assert longest(node(8, 141, 550), "auto") >= 4 << 20


def test_processes_on_cpus_need_what_gloo_copies_and_not_the_buffers_of_nccl():
    small = LLAMA._replace(layers=2)
    alone, two = (predicted(512, model=small, machine=node(n, inf), sp=1) for n in (1, 2))
    nccl = predicted(512, model=small, machine=node(2), sp=1)
    copies = 2 * 2 * small.vocabulary_parameters  # of two threads, of two bytes
    slack = (alone.gpu - two.gpu + copies) / (alone.allocated - two.allocated)
    assert 1 <= slack < 1.2 and nccl.allocated == two.allocated
    assert nccl.gpu - two.gpu + copies == pytest.approx(2.1e9)
