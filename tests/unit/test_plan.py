"""The planner against measured steps, and its own arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.arch import ARCHITECTURES, ModelConfig, architecture
from ulysses.memory.levels import LEVELS
from ulysses.memory.offload import CHUNK_BYTES
from ulysses.memory.plan import (
    GIB,
    PROCESS_BYTES,
    Case,
    Machine,
    MemorySettings,
    Model,
    PlannedRollout,
    Prediction,
    Work,
    choose,
    longest_sequence,
    one_level,
    predict,
    recommend,
    step_flops,
    step_seconds,
)
from ulysses.training.memory import plain_model

ROWS = Path(__file__).parents[2] / "benchmarks/measured.jsonl"
MEASURED = [json.loads(line) for line in ROWS.read_text().splitlines()]
LLAMA = plain_model(architecture("llama3-8b"))
QWEN = plain_model(architecture("qwen2.5-7b"))  # 28 query and 4 kv heads
ADAPTERS = LLAMA._replace(trained=10**7)
SETTINGS = {level: MemorySettings(level) for level in LEVELS}


def node(gpus: int = 8, gib: float = 139.8, host_gib: float = 0) -> Machine:
    return Machine(gpus, gib * GIB, host_gib * GIB)


NODE = node()


def predicted(work: Work, settings: MemorySettings, model: Model = LLAMA, world: int = 8) -> Prediction:
    return predict(Case(model, node(world), work, settings))


def seconds(work: Work, settings: MemorySettings, model: Model = LLAMA, machine: Machine = NODE) -> float:
    return step_seconds(Case(model, machine, work, settings))


def case_of(row: dict[str, Any]) -> Case:
    """Return what the planner is asked about a measured row; keys that are absent mean the plain case."""
    shape = architecture(row["arch"])
    changes = {
        "num_hidden_layers": row["layers"],
        "vocab_size": row.get("vocab_size", shape.vocab_size),
        "head_dim": shape.head_dim,
    }
    if "heads" in row:  # "query/kv", of the same size as the shape's own
        changes |= zip(("num_attention_heads", "num_key_value_heads"), map(int, row["heads"].split("/")))
    model = plain_model(ModelConfig.from_hf({**shape.to_hf(), **changes}))
    common = int(row.get("ranks", "0").split(" x ")[0])  # "U x R": ranks that exchange heads, that split rows
    level, _, upper = row["recompute"].partition("+")
    upper, _, count = upper.partition("*")
    settings = MemorySettings(level.split("*")[0], upper, int(count or 0), row["offload"])
    return Case(model, node(row["gpus"]), Work(row["tokens"], row["sp"], common_heads=common), settings)


@pytest.mark.parametrize(
    "row", MEASURED, ids=lambda r: f"{r['arch']} {r['layers']} layers {r['tokens']} tokens {r['recompute']}"
)
def test_measured_steps_are_predicted(row):
    """Memory within 5%, time within 15%."""
    case = case_of(row)
    assert step_seconds(case) == pytest.approx(row["seconds"], rel=0.15)
    if row.get("peak_gib"):
        assert predict(case).allocated / GIB == pytest.approx(row["peak_gib"], rel=0.05)


def test_states_are_eighteen_bytes_per_parameter():
    N, work = LLAMA.parameters, Work(8192, 8)
    assert N == ARCHITECTURES["llama3-8b"].num_parameters() and LLAMA.layer_parameters + 2 * 4096 == 218_112_000
    assert predicted(work, SETTINGS["none"]).states == 18 * N / 8
    assert predicted(work, SETTINGS["none"], ADAPTERS).states == (2 * N + 16e7) / 8
    away = predicted(work, MemorySettings(offload_optimizer=True, offload_parameters=True))
    assert away.states == 0 and away.host == PROCESS_BYTES + 18 * N / 8
    beside = predicted(work, MemorySettings(others=(LLAMA,), saves=True))
    assert beside.states == 20 * N / 8 and beside.host == PROCESS_BYTES + N / 2
    alone, several = predicted(work, SETTINGS["none"], world=1), predicted(work, SETTINGS["none"])
    outside = [p.gpu - 1.03 * p.allocated for p in (alone, several)]  # CUDA, NCCL
    assert outside == pytest.approx([1.3e9, 3.4e9])


def test_lower_levels_keep_less_and_take_longer():
    work = Work(1 << 18, 8)
    kept = [predicted(work, s).kept for s in SETTINGS.values()]
    times = [seconds(work, s) for s in SETTINGS.values()]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4 and times == sorted(set(times))


def test_executed_flops_of_full_training_and_adapters():
    """6 N per token, 8 N where the whole layer is recomputed; 4 N and 6 N with adapters, whose base has no gradient."""
    work, layers = Work(4096), LLAMA.layers
    N, down = LLAMA.layer_parameters, LLAMA.width * LLAMA.intermediate

    def per_token(model, level):
        rest = 2 * model.vocabulary_parameters * (4 if model.is_full else 3) + 6 * model.trained * (not model.is_full)
        return (step_flops(Case(model, node(), work, SETTINGS[level]))[0] / 4096 - rest) / layers

    assert per_token(LLAMA, "none") == pytest.approx(6 * N) and per_token(ADAPTERS, "none") == pytest.approx(4 * N)
    assert per_token(ADAPTERS, "block") == pytest.approx(6 * N)
    for level in ("keep_attention", "block"):  # our own backward of the plain MLP never repeats its last product
        assert per_token(LLAMA, level) == pytest.approx(8 * N - 2 * down)
    assert per_token(LLAMA, "pair") == pytest.approx(9 * N - 2 * down)
    forward = 2 * 4096**2 * 4096  # two products over half of the square, H * E = 4096
    units = [step_flops(Case(LLAMA, node(), work, s))[1] / forward / layers for s in SETTINGS.values()]
    assert units == pytest.approx([3.5, 3.5, 4.5, 5])
    pairs = [step_flops(Case(LLAMA, node(), Work(8192, 4, documents=d), SETTINGS["none"]))[1] for d in (1, 2)]
    assert pairs[0] == 2 * pairs[1] == pytest.approx(3.5 * layers * forward)


def test_offloaded_layers_move_what_they_keep():
    work = Work(1 << 20, 8)
    stay, away = predicted(work, SETTINGS["block"]), predicted(work, MemorySettings("block", offloaded_layers=32))
    assert stay.kept == 8192 * 32 * (1 << 17) and away.kept == pytest.approx(stay.kept * 2 / 32)
    assert away.offloaded == stay.kept + 32 * CHUNK_BYTES and away.host == away.offloaded + PROCESS_BYTES
    upper = predicted(work, MemorySettings("block", "none", 12, 32))
    assert upper.offloaded == pytest.approx(away.offloaded * 20 / 32)  # ordinary autograd's tensors stay


def test_a_second_decoder_keeps_and_computes_as_much_again():
    one, work = LLAMA._replace(has_head=False), Work(1 << 18, 8)
    two, s = one._replace(decoders=2), SETTINGS["keep_attention"]
    assert predicted(work, s, two).kept == 2 * predicted(work, s, one).kept
    assert 1.9 < seconds(work, s, two) / seconds(work, s, one) <= 2


def test_rollouts_hold_the_whole_policy_and_its_cache():
    rollout, work = PlannedRollout(128, 64, 1024, 1024, steps=4), Work(2048)
    plain, more, merged = (
        predicted(work._replace(rollout=r), SETTINGS["block"]) for r in (None, rollout, rollout._replace(merged=True))
    )
    cache = 2 * 2 * 32 * 64 * 2048 * 1024
    assert more.allocated > more.states + 2 * LLAMA.parameters + cache > plain.allocated
    assert merged.allocated - more.allocated == pytest.approx(2 * LLAMA.parameters, rel=1e-3)
    fewer = rollout._replace(answers=64)
    times = [seconds(work._replace(rollout=r), SETTINGS["none"]) for r in (None, fewer, rollout)]
    assert times == sorted(set(times))


def test_passes_without_gradient_are_planned_for():
    """A reference or reward model may be larger than the trained one: its gathered layers and its work are the peak."""
    small, work = plain_model(architecture("qwen2.5-0.5b")), Work(1 << 16)
    large = plain_model(architecture("llama3-70b"))._replace(parameters=0)  # its shards aside
    alone, other = (predicted(work, MemorySettings("block", others=o), small) for o in ((), (large,)))
    gathered, rows = 2 * 2 * large.layer_parameters, 2 * (1 << 16) * 3 * (large.query_width + 2 * large.kv_width)
    assert other.states == alone.states and other.kept == alone.kept
    assert other.allocated - other.states > gathered + rows > alone.allocated - alone.states
    untiled = predicted(work, MemorySettings("block", others=(large,), mlp_tile=0), small)
    assert untiled.allocated - untiled.states > gathered + 2 * (1 << 16) * 3 * large.intermediate


def test_tiles_shrink_the_working_set():
    whole, tiled = (predicted(Work(1 << 22, 8), MemorySettings("block", mlp_tile=t)).working for t in (0, "auto"))
    assert whole > tiled


def test_row_parallel_ranks_hold_and_are_sent_all_keys_of_their_heads():
    """28 query and 4 kv heads on 8 ranks: 4 head-parallel times 2 row-parallel ranks, 1 kv head on each."""
    splits = [(QWEN, Work(0, 4), (4, 1)), (QWEN, Work(0, 8), (4, 2)), (LLAMA, Work(0, 8, common_heads=4), (4, 2))]
    for model, work, split in splits:  # in the last one another model shares the mesh
        assert Case(model, node(), work, MemorySettings()).shards[:2] == split
    kept = [predicted(Work(8192 * g, g), SETTINGS["none"], QWEN).kept for g in (4, 8)]
    assert kept[1] - kept[0] == 2 * (2 * 4 * 128) * 8192 * 28  # per local token: keys of all T, not of T / 2
    narrow = QWEN._replace(intermediate=8, vocabulary=8)  # attention is the largest moment
    working = [predicted(Work(8192 * g, g), SETTINGS["block"], narrow).working for g in (4, 8)]
    assert working[1] - working[0] == pytest.approx(2 * (3 + 1) * 2 * 4 * 128 * 8192)
    few = LLAMA._replace(kv_heads=2)  # fewer than ranks: they keep copies
    kept = [predicted(Work(4096 * g, g), SETTINGS["none"], few).kept for g in (2, 8)]
    assert kept[1] - kept[0] == 2 * (2 * (8 - 2) * 128) * 4096 * 32


def test_links_between_nodes_are_slower():
    here, apart, work = Machine(16, GIB, gpus_per_node=16), Machine(16, GIB), Work(1 << 15, 16)
    slow, fast = (seconds(work, SETTINGS["none"], machine=machine) for machine in (apart, here))
    assert slow > 1.5 * fast


def asked(tokens: int, machine: Machine = NODE, **work: Any) -> Case:
    return Case(LLAMA, machine, Work(tokens, machine.gpus, **work), MemorySettings())


def chosen(tokens: int, machine: Machine = NODE, **more: Any) -> Case:
    choice = choose(asked(tokens, machine), **more)
    assert choice is not None and choice.fits()
    return choice


def test_the_fastest_level_that_fits_and_the_next_one_on_the_last_layers():
    assert chosen(1 << 17).name == "none"
    for tokens, level, upper in (
        (1 << 19, "keep_attention", "none"),
        (1 << 21, "block", "keep_attention"),
        (3 << 20, "pair", "block"),
    ):
        choice = chosen(tokens)
        count = choice.settings.upper_layers
        assert choice.levels == (level,) * (32 - count) + (upper,) * count and 0 <= count < 32
        assert choice.name == (f"{level}*{32 - count}+{upper}*{count}" if count else level)
        assert not choice.having(upper=upper, upper_layers=count + 1).fits()
        assert not one_level(asked(tokens), upper).fits()
    assert choose(asked(4096, node(1, 80))) is None


def test_upper_layers_are_done_when_the_others_begin():
    """Ordinary autograd works while all is kept, recomputed layers while only what they keep themselves is."""
    work = Work(1 << 17, 4)
    block, mixed, none = (
        predicted(work, s, world=4) for s in (SETTINGS["block"], MemorySettings("block", "none", 1), SETTINGS["none"])
    )
    assert mixed.kept == pytest.approx(block.kept + (none.kept - block.kept) / 32)
    assert mixed.working == pytest.approx(max(none.working, block.working - none.kept / 32))


def test_offload_auto_takes_the_fewest_layers():
    machine, levels = node(host_gib=550), ("none", "keep_attention", "block")
    assert choose(asked(3 << 20, machine), levels) is None
    choice = chosen(3 << 20, machine, levels=levels, offload="auto")
    away = choice.settings.offloaded_layers
    assert choice.name == "block" and 0 < away < 32 and predict(choice).host <= 0.9 * 550 * GIB / 8
    assert not choice.having(offloaded_layers=away - 1).fits_gpu()
    assert choose(asked(3 << 20, node(host_gib=100)), levels, "auto") is None  # the host is too small
    assert chosen(1 << 20, machine, offload="auto") == chosen(1 << 20, machine)
    assert (
        chosen(1 << 21, machine, offload="auto").name == "keep_attention"
    )  # a faster level, with some layers on the host
    everything = one_level(asked(1 << 17, machine), "block", "checkpoints")
    assert everything.settings.offloaded_layers == 32


def test_pairs_hold_half_and_reach_further():
    work, unit = Work(1 << 20, 8), 8192 * (1 << 17)
    one, odd = (predicted(work, SETTINGS["pair"], LLAMA._replace(layers=n)) for n in (32, 31))
    assert predicted(work, SETTINGS["block"]).kept == 32 * unit
    assert (
        one.kept == odd.kept == (16 + 1) * unit
    )  # 15 pairs and one alone; the second layer's input of the pair at work
    away = predicted(work, MemorySettings("pair", offloaded_layers=32))
    assert away.kept == (2 + 1) * unit and 16 * unit <= away.offloaded <= 16 * unit + 32 * CHUNK_BYTES
    longest = [longest_sequence(asked(0), levels) for levels in (LEVELS[:-1], LEVELS)]
    assert longest[1] > 1.4 * longest[0]


def test_longest_sequence_is_the_longest():
    def longest(machine, documents = 1, **more):
        return longest_sequence(asked(0, machine, documents=documents).having(saves=True), **more)

    length = longest(node())
    assert length % 1024 == 0 and chosen(length) and longest(node(1, 24)) == 0
    assert choose(asked(length + 1024)) is None
    assert longest(node(), documents=2) <= length // 2
    assert longest(node(8, 141, 550), offload="auto") >= 4 << 20


def test_recommended_settings():
    def degree(machine, tokens, batches = 1 << 10):
        found = recommend(asked(tokens, machine), batches)
        return (found[1].work.sp, found[0]) if found is not None else None

    assert degree(node(), 4096, batches=8) == (1, "none")
    assert degree(node(), 1 << 20) == (8, "none")
    assert degree(node(), 1 << 17, batches=1) == (8, "none")
    assert degree(node(8, 24), 1 << 20) is None
    assert degree(node(host_gib=550), 9 << 19) == (8, "auto")
