"""The planner against measured steps, and its own arithmetic."""

import pytest

from benchmarks.plan_accuracy import (
    BYTES,
    MEASURED,
    MEMORY_LIMIT,
    SPEEDS,
    TIME_LIMIT,
    calibrate,
    errors,
    fit,
    predicted,
    read,
)
from benchmarks.plan_accuracy import seconds as time_of
from models.arch import ARCHITECTURES
from ulysses.memory.calibration import PRIOR, Calibration
from ulysses.memory.case import GIB, Machine, Model, Options, Rollout, Work, kept_kv_heads
from ulysses.memory.levels import LEVELS
from ulysses.memory.offload import CHUNK_BYTES
from ulysses.memory.peak import PROCESS_BYTES, peak_bytes
from ulysses.memory.plan import (
    FASTEST_FIRST,
    FILL,
    WORTH,
    Choice,
    choices,
    choose_level,
    host_budget,
    keep_gathered,
    level_list,
    level_name,
    longest_sequence,
    predict,
    recommend,
)
from ulysses.memory.step_time import attention_flops, exchanged_bytes, passes
from ulysses.memory.tiling import TilingOptions

ROWS = read([MEASURED])
H200 = 139.8 * GIB


def llama(layers: int = 32, trained: int | None = None) -> Model:
    parameters = 2 * 128256 * 4096 + 4096 + layers * 218_112_000
    return Model(4096, 14336, 32, 8, 128, 128256, layers, parameters, parameters if trained is None else trained)


def qwen() -> Model:
    shape = ARCHITECTURES["qwen2.5-7b"]
    return Model(3584, 18944, 28, 4, 128, 152064, 28, shape.num_parameters(), shape.num_parameters())


def node(gpus: int = 8, gib: float = 139.8, host_gib: float = 0) -> Machine:
    return Machine(gpus, gib * GIB, host_gib * GIB)


def test_constants_are_fitted_to_one_half_and_hold_on_the_other() -> None:
    assert len(ROWS) >= 10
    found = calibrate(ROWS[0::2])
    for name in Calibration._fields:
        assert getattr(Calibration(), name) == pytest.approx(getattr(found, name), rel=0.01), name
    for row in ROWS[1::2]:
        memory, time = errors(row, Calibration())
        assert abs(memory) <= MEMORY_LIMIT and abs(time) <= TIME_LIMIT, (row, memory, time)


def test_fitting_finds_the_constants_that_made_the_rows() -> None:
    """Rows made by the planner itself with other constants: what they determine is found, what they do not is left."""
    truth = PRIOR._replace(matrices=0.5, attention=0.7)
    wide = [row for row in ROWS if ARCHITECTURES[row["arch"]].head_dim == 128]  # they say nothing about narrow heads
    rows = [row | {"seconds": predicted(row, truth).seconds} for row in wide]
    found = fit(rows, SPEEDS, time_of, PRIOR)
    assert found.matrices == pytest.approx(0.5, rel=0.08) and found.attention == pytest.approx(0.7, rel=0.04)
    assert found.narrow_heads == pytest.approx(PRIOR.narrow_heads) and all(getattr(found, n) == getattr(PRIOR, n) for n in BYTES)


def test_parameters_are_counted_as_the_models_do() -> None:
    shape = ARCHITECTURES["llama3-8b"]
    assert llama().parameters == shape.num_parameters()
    norms = 2 * shape.hidden_size
    assert llama().layer_parameters + norms == 218_112_000


def test_states_are_eighteen_bytes_per_parameter() -> None:
    model = llama()
    assert predict(model, node(), Work(8192, 8), Options()).states == 18 * model.parameters / 8
    adapters = llama(trained=10**7)
    assert predict(adapters, node(), Work(8192, 8), Options()).states == (2 * adapters.parameters + 16e7) / 8
    away = predict(model, node(), Work(8192, 8), Options(offload_optimizer=True, offload_parameters=True))
    assert away.states == 0 and away.host_bytes == PROCESS_BYTES + 18 * model.parameters / 8
    beside = predict(model, node(), Work(8192, 8), Options(frozen_parameters=model.parameters, saves=True))
    assert beside.states == 20 * model.parameters / 8 and beside.host_bytes == PROCESS_BYTES + model.parameters / 2


def test_what_lies_outside_the_allocator() -> None:
    c = Calibration()
    one, two = (peak_bytes(llama(8), gpus, Work(8192), Options()) for gpus in (1, 2))
    assert one.device == one.allocated * (1 + c.slack) + c.context_bytes
    assert two.device == two.allocated * (1 + c.slack) + c.context_bytes + c.communicator_bytes


def test_lower_levels_keep_less_and_take_longer() -> None:
    found = [predict(llama(), node(), Work(1 << 18, 8), Options(level)) for level in reversed(LEVELS)]
    assert [f.kept for f in found] == sorted((f.kept for f in found), reverse=True) and len({f.kept for f in found}) == len(LEVELS)
    assert [f.seconds for f in found] == sorted(f.seconds for f in found)


def test_executed_flops_of_full_training_and_adapters() -> None:
    """6 N per token, 8 N where the whole layer is recomputed; adapters 4 N and 6 N: no gradient of the frozen matrices."""
    full, adapters, work = llama(), llama(trained=10**7), Work(4096)
    N = full.layer_parameters
    assert passes(full, work, Options(), "none").matrices == 6 * N
    assert passes(adapters, work, Options(), "none").matrices == 4 * N
    assert passes(adapters, work, Options(), "block").matrices == 6 * N
    down = full.width * full.intermediate  # our own backward of the plain MLP never repeats its last product
    assert passes(full, work, Options(), "block").matrices == 8 * N - 2 * down
    assert passes(full, Work(1 << 20), Options(), "none").matrices == 6 * N
    by_hand = Options(tiling=TilingOptions(mlp_rows=1024))
    for options, level in ((Options(), "mlp"), (by_hand, "none")):  # gate and up again
        assert passes(full, Work(1 << 20), options, level).matrices == 6 * N + 4 * down
        kept = predict(full, node(), Work(1 << 20), options._replace(level=level)).kept
        assert kept == 32 * (36 * 1024 + 4 * 32) * (1 << 20)  # on one rank there is no second out
    attention = [passes(full, work, Options(), level).attention for level in LEVELS]
    assert attention == [5, 4.5, 3.5, 3.5, 3.5, 3.5]
    layer = N - down  # of a pair's first layer once more: everything; 2 FLOPs per weight, half of the layers
    assert passes(full, work, Options(), "pair").matrices == passes(full, work, Options(), "block").matrices + layer + down
    assert passes(full, work, Options(), "pair").exchanges == passes(full, work, Options(), "block").exchanges + 0.5
    assert attention_flops(full, Work(8192, 4, documents=2)) == 4 * (2 * 4096**2 / 2) * 4096 / 4


def test_offloaded_layers_move_what_they_keep() -> None:
    stay = predict(llama(), node(), Work(1 << 20, 8), Options("block"))
    away = predict(llama(), node(), Work(1 << 20, 8), Options("block", offloaded_layers=32))
    assert away.offloaded == stay.kept + 32 * CHUNK_BYTES and stay.kept == 8192 * 32 * (1 << 17)
    assert away.host_bytes == away.offloaded + PROCESS_BYTES and away.kept == pytest.approx(stay.kept * 2 / 32)
    upper = predict(llama(), node(), Work(1 << 20, 8), Options("block", "none", 12, 32))
    assert upper.offloaded == pytest.approx(away.offloaded * 20 / 32)  # ordinary autograd's tensors stay


def test_a_second_decoder_keeps_and_computes_as_much_again() -> None:
    one = llama()._replace(has_head=False)
    two = one._replace(decoders=2)
    a, b = (predict(m, node(), Work(1 << 18, 8), Options("keep_attention")) for m in (one, two))
    assert b.kept == 2 * a.kept and 1.9 < b.seconds / a.seconds < 2


def test_rollouts_hold_the_whole_policy_and_its_cache() -> None:
    rollout, work = Rollout(128, 64, 1024, 1024, steps=4), Work(2048, 1)
    plain, more = (peak_bytes(llama(), 8, w, Options("block")) for w in (work, work._replace(rollout=rollout)))
    cache = 2 * 2 * 32 * 64 * 2048 * 1024
    assert more.allocated > more.states + 2 * llama().parameters + cache > plain.allocated
    merged = peak_bytes(llama(), 8, work._replace(rollout=rollout._replace(merged=True)), Options("block"))
    assert merged.allocated - more.allocated == pytest.approx(2 * llama().parameters, rel=1e-3)
    seconds = [predict(llama(), node(), work._replace(rollout=r), Options()).seconds for r in (None, rollout, rollout._replace(answers=64))]
    assert seconds[1] > seconds[2] > seconds[0]


def test_head_chunks_and_tiles_shrink_the_working_set() -> None:
    work = Work(1 << 22, 8)
    whole = predict(llama(), node(), work, Options("block", tiling=TilingOptions(mlp_rows=0))).working
    tiled = predict(llama(), node(), work, Options("block")).working
    chunked = predict(llama(), node(), work, Options("block", tiling=TilingOptions(head_chunks=4))).working
    assert whole > tiled > chunked


def test_more_ranks_than_kv_heads_keep_copies() -> None:
    few = llama()._replace(kv_heads=2)
    found = [predict(few, node(g), Work(4096 * g, g), Options("keep_exchange")).kept for g in (2, 8)]
    assert found[1] - found[0] == 2 * (2 * (8 - 2) * 128) * 4096 * 32


def test_row_parallel_ranks_hold_and_are_sent_all_keys_of_their_heads() -> None:
    """28 query and 4 kv heads on 8 ranks: 4 head-parallel times 2 row-parallel ranks, 1 kv head on each."""
    model = qwen()
    assert kept_kv_heads(model, 4) == 4 and kept_kv_heads(model, 8) == 8  # per local token: keys of all T, not of T / 2
    found = [predict(model, node(8), Work(8192 * g, g), Options("keep_exchange")).kept for g in (4, 8)]
    assert found[1] - found[0] == 2 * (2 * 4 * 128) * 8192 * 28
    narrow = model._replace(intermediate=8, vocabulary=8)  # attention is the largest moment
    found = [predict(narrow, node(8), Work(8192 * g, g), Options("block")).working for g in (4, 8)]
    assert found[1] - found[0] == pytest.approx(Options().calibration.working * 2 * (3 + 1) * 2 * 4 * 128 * 8192)
    assert exchanged_bytes(model, 4, 2) == 2 * 128 * (2 * 7 * 3 + 2 * 1 * 3)
    assert exchanged_bytes(model, 8, 2) == 2 * 128 * (2 * 7 * 3 + 2 * 1 * 7)  # queries stay in their row set
    assert exchanged_bytes(model, 1, 2) == 0


def test_links_between_nodes_are_slower() -> None:
    here, apart = Machine(16, H200, gpus_per_node=16), Machine(16, H200)
    work = Work(1 << 15, 16)
    assert predict(llama(), apart, work, Options()).seconds > 1.5 * predict(llama(), here, work, Options()).seconds


def test_level_names() -> None:
    mixed = ("block",) * 3 + ("none",) * 2
    assert level_name(mixed) == "block*3+none*2" and level_list("block*3+none*2", 5) == mixed
    assert level_name(("none",) * 4) == "none" and level_list("none", 4) == ("none",) * 4
    with pytest.raises(ValueError, match="lists 5 layers but the model has 6"):
        level_list("block*3+none*2", 6)


def test_choice_is_the_fastest_that_fits() -> None:
    work = Work(1 << 20, 8)
    choice = choose_level(llama(), node(), work, Options())
    assert choice is not None and choice.prediction.fits(node())
    kept = choice.options.upper_layers
    assert choice.levels == ("keep_attention",) * (32 - kept) + (choice.options.upper,) * kept and 0 < kept < 32
    one_more = predict(llama(), node(), work, choice.options._replace(upper_layers=kept + 1))
    assert one_more.gpu_bytes > FILL * H200
    alike = [c for c in choices(llama(), node(), work, Options(), levels=FASTEST_FIRST, offload="none") if c.prediction.fits(node())]
    assert choice.prediction.seconds < min(c.prediction.seconds for c in alike)
    assert choose_level(llama(), node(1, 80), Work(4096), Options()) is None
    short = choose_level(llama(), node(), Work(1 << 17, 8), Options())
    assert short is not None and set(short.levels) == {"none"}


def test_mlps_run_whole_where_that_fits_and_the_last_layers_where_it_does_not() -> None:
    """Ordinary autograd on every layer: the MLPs of the first ones are run again when their memory is needed."""
    found = [choose_level(llama(), node(4), Work(n << 10, 4), Options(), levels=("none", "mlp")) for n in (64, 96, 128, 160)]
    whole = [c.levels.count("none") for c in found if c is not None]
    assert len(whole) == 4 and whole[0] == 32 and whole == sorted(whole, reverse=True) and 0 < whole[2] < 32
    mixed = found[2]
    assert mixed is not None and mixed.levels == ("mlp",) * (32 - whole[2]) + ("none",) * whole[2]
    tiled, plain = (predict(llama(), node(4), Work(1 << 17, 4), Options(level)) for level in ("mlp", "none"))
    assert plain.gpu_bytes > FILL * H200 and plain.seconds < mixed.prediction.seconds < tiled.seconds


def test_upper_layers_are_done_when_the_others_begin() -> None:
    """A whole MLP's working set meets all that is kept, that of recomputed layers only what they keep themselves."""
    work = Work(1 << 17, 4)
    block, mixed = (peak_bytes(llama(), 4, work, options) for options in (Options("block"), Options("block", "none", 1)))
    none = peak_bytes(llama(), 4, work, Options())
    each = (none.kept - block.kept) / 32
    assert mixed.kept == pytest.approx(block.kept + each)
    assert mixed.working == pytest.approx(max(none.working, block.working - none.kept / 32))


def test_no_mixture_of_levels_beats_the_choice() -> None:
    work, machine = Work(1 << 20, 8), node()
    choice = choose_level(llama(), machine, work, Options())
    assert choice is not None
    for level in FASTEST_FIRST:
        for upper in FASTEST_FIRST[: FASTEST_FIRST.index(level)]:
            for count in range(33):
                p = predict(llama(), machine, work, Options(level, upper, count))
                assert not p.fits(machine) or p.seconds >= choice.prediction.seconds - 1e-3


def test_offload_auto_takes_the_fewest_layers() -> None:
    machine, work, levels = node(host_gib=550), Work(3 << 20, 8), FASTEST_FIRST[:-1]  # without pairs
    assert choose_level(llama(), machine, work, Options(), levels=levels) is None
    found = {c.level: c for c in choices(llama(), machine, work, Options(), levels=levels, offload="auto")}
    block = found["block"]
    assert 0 < block.offloaded_layers < 32 and block.prediction.fits(machine)
    fewer = Options("block", offloaded_layers=block.offloaded_layers - 1)
    assert predict(llama(), machine, work, fewer).gpu_bytes > FILL * H200
    choice = choose_level(llama(), machine, work, Options(), offload="auto")
    assert choice is not None and choice.prediction.seconds <= block.prediction.seconds
    assert choice.prediction.host_bytes <= host_budget(machine) == 0.9 * 550 * GIB / 8
    assert choose_level(llama(), node(host_gib=100), work, Options(), offload="auto", levels=levels) is None  # the host is too small


def test_pairs_hold_half_and_reach_further() -> None:
    one, odd = (predict(llama(n), node(), Work(1 << 20, 8), Options("pair")) for n in (32, 31))
    block = predict(llama(), node(), Work(1 << 20, 8), Options("block"))
    unit = 8192 * (1 << 17)
    assert block.kept == 32 * unit and one.kept == (16 + 1) * unit  # the second layer's input of the pair at work
    assert odd.kept == one.kept  # 15 pairs and one alone
    away = predict(llama(), node(), Work(1 << 20, 8), Options("pair", offloaded_layers=32))
    assert away.kept == (2 + 1) * unit and 16 * unit <= away.offloaded <= 16 * unit + 32 * CHUNK_BYTES
    longest = [longest_sequence(llama(), node(), 8, Options(), levels=levels) for levels in (FASTEST_FIRST[:-1], FASTEST_FIRST)]
    assert longest[1] > 1.4 * longest[0]
    for tokens, wanted in ((longest[0], "block"), (longest[1], "pair")):
        choice = choose_level(llama(), node(), Work(tokens, 8), Options())
        assert choice is not None and choice.level == wanted


def test_layers_that_keep_more_go_with_groups_of_heads() -> None:
    long, groups = Work(41 << 16, 8), Options(head_chunks=(1, 2, 4))
    whole = choose_level(llama(), node(), long, Options())
    choice = choose_level(llama(), node(), long, groups)
    assert whole is not None and choice is not None and choice.prediction.fits(node())
    assert choice.head_chunks > 1 and len(set(choice.levels)) == 2 and choice.prediction.seconds < whole.prediction.seconds
    assert "none" not in choice.levels and "mlp" not in choice.levels  # these keep all heads


def test_layers_leave_for_the_host_only_where_that_is_worth_it() -> None:
    def best(tokens: int, offload: str) -> Choice:
        choice = choose_level(llama(), node(host_gib=550), Work(tokens, 8), Options(), offload=offload)
        assert choice is not None
        return choice

    assert best(1 << 20, "auto") == best(1 << 20, "none")  # to keep the exchanges of more layers would save next to nothing
    here, away = best(7 << 18, "none"), best(7 << 18, "auto")  # whole blocks recomputed, or not
    assert away.offloaded_layers > 0 and away.prediction.seconds < (1 - WORTH) * here.prediction.seconds


def test_gathered_weights_stay_where_links_limit_the_step() -> None:
    nodes = node(16)._replace(node_link=10e9)
    short, long = Work(1 << 13, 1), Work(1 << 19, 16)
    for machine, work, stays in ((nodes, short, True), (nodes, long, False), (node(8), short, False)):
        choice = choose_level(llama(), machine, work, Options(), levels=("block",))
        assert choice is not None
        kept = keep_gathered(llama(), machine, work, choice)
        assert (kept.options.gathered_layers == 32) is stays and (kept.options.gathered_layers == 0) is not stays
        assert kept.prediction.fits(machine) and kept.prediction.seconds <= choice.prediction.seconds
    rollout = short._replace(rollout=Rollout(1, 1, 10, 10, 1))
    assert keep_gathered(llama(), nodes, rollout, choice) is choice  # the sampler holds the whole policy besides


def test_longest_sequence_is_the_longest() -> None:
    length = longest_sequence(llama(), node(), 8, Options())
    assert length % 1024 == 0
    assert choose_level(llama(), node(), Work(length, 8), Options()) is not None
    assert choose_level(llama(), node(), Work(length + 1024, 8), Options()) is None
    assert longest_sequence(llama(), node(1, 24), 1, Options()) == 0
    assert longest_sequence(llama(), node(), 8, Options(), documents=2) <= length // 2


def test_recommended_settings() -> None:
    def degree(machine: Machine, tokens: int, **limits: int) -> tuple[int, str] | None:
        found = recommend(llama(), machine, Work(tokens), Options(), **limits)
        return found[:2] if found is not None else None

    assert degree(node(), 4096, batches=8) == (1, "none")
    assert degree(node(), 1 << 20) == (8, "none")
    assert degree(node(), 1 << 17, batches=1) == (8, "none")
    assert degree(node(8, 24), 1 << 20) is None
    assert degree(node(host_gib=550), 3 << 20) == (8, "auto")
