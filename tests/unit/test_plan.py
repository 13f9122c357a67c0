"""The planner against measured steps, and its own arithmetic."""

import pytest

from models.arch import ARCHITECTURES
from ulysses.memory.plan import (
    FILL,
    GIB,
    Machine,
    Model,
    Options,
    Work,
    choose_level,
    longest_sequence,
    predict,
    recommend_degree,
)
from ulysses.memory.recompute import LEVELS
from ulysses.memory.tiling import TilingOptions

# Llama-3-8B layers, bf16, full fine-tune with AdamW, one packed sequence, FlashAttention-4, H200: GPUs (= sp), layers,
# tokens, level -> the allocator's peak in GiB and seconds per step.
MEASURED = [
    (4, 32, 65536, "none", 91.0, 3.21),
    (4, 32, 65536, "keep_attention", 49.0, 3.53),
    (4, 32, 16384, "none", 53.2, 0.592),
    (2, 4, 32768, "none", 30.9, 0.433),
    (2, 4, 32768, "keep_exchange", 24.3, 0.503),
    (2, 4, 32768, "keep_attention", 23.2, 0.502),
    (2, 4, 32768, "block", 23.3, 0.527),
    (1, 8, 4096, "none", 53.3, 0.171),
    (1, 8, 16384, "none", 62.3, 0.561),
    (1, 8, 16384, "keep_attention", 52.8, 0.636),
]
H200 = 139.8 * GIB


def llama(layers: int = 32, trained: int | None = None) -> Model:
    parameters = 2 * 128256 * 4096 + 4096 + layers * 218_112_000
    return Model(4096, 14336, 32, 8, 128, 128256, layers, parameters, parameters if trained is None else trained)


def node(gpus: int = 8, gib: float = 139.8, host_gib: float = 0) -> Machine:
    return Machine(gpus, gib * GIB, host_gib * GIB)


@pytest.mark.parametrize(("gpus", "layers", "tokens", "level", "gib", "seconds"), MEASURED)
def test_measured_steps(gpus: int, layers: int, tokens: int, level: str, gib: float, seconds: float) -> None:
    found = predict(llama(layers), Machine(gpus, H200), Work(tokens, gpus), Options(level))
    assert found.gpu_bytes / GIB == pytest.approx(gib, rel=0.05)
    assert found.seconds == pytest.approx(seconds, rel=0.08)


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
    assert away.states == 0 and away.host_bytes == 18 * model.parameters / 8
    beside = predict(model, node(), Work(8192, 8), Options(frozen_parameters=model.parameters))
    assert beside.states == 20 * model.parameters / 8


def test_lower_levels_keep_less_and_take_longer() -> None:
    found = [predict(llama(), node(), Work(1 << 18, 8), Options(level)) for level in reversed(LEVELS)]
    assert [f.kept for f in found] == sorted((f.kept for f in found), reverse=True) and len({f.kept for f in found}) == 4
    assert [f.seconds for f in found] == sorted(f.seconds for f in found)


def test_offloaded_layers_move_what_they_keep() -> None:
    stay = predict(llama(), node(), Work(1 << 20, 8), Options("block"))
    away = predict(llama(), node(), Work(1 << 20, 8), Options("block", offloaded_layers=32))
    assert away.host_bytes == stay.kept and away.kept == pytest.approx(stay.kept * 3 / 32)
    assert stay.kept == 8192 * 32 * (1 << 17)


def test_head_chunks_and_tiles_shrink_the_working_set() -> None:
    work = Work(1 << 22, 8)
    whole = predict(llama(), node(), work, Options("block", tiling=TilingOptions(mlp_rows=0))).working
    tiled = predict(llama(), node(), work, Options("block")).working
    chunked = predict(llama(), node(), work, Options("block", tiling=TilingOptions(head_chunks=8))).working
    assert whole > tiled > chunked


def test_more_ranks_than_kv_heads_keep_copies() -> None:
    few = llama()._replace(kv_heads=2)
    found = [predict(few, node(g), Work(4096 * g, g), Options("keep_exchange")).kept for g in (2, 8)]
    assert found[1] - found[0] == 2 * (2 * (8 - 2) * 128) * 4096 * 32


def test_choice_is_the_fastest_that_fits() -> None:
    choice = choose_level(llama(), node(), Work(1 << 20, 8), Options())
    assert choice is not None and choice.level == "keep_attention" and choice.offloaded_layers == 0
    assert choice.prediction.gpu_bytes <= FILL * H200
    higher = predict(llama(), node(), Work(1 << 20, 8), Options("keep_exchange"))
    assert higher.gpu_bytes > FILL * H200
    assert choose_level(llama(), node(1, 80), Work(4096), Options()) is None


def test_offload_auto_takes_the_fewest_layers() -> None:
    machine, work = node(host_gib=550), Work(3 << 20, 8)
    assert choose_level(llama(), machine, work, Options()) is None
    choice = choose_level(llama(), machine, work, Options(), offload="auto")
    assert choice is not None and 0 < choice.offloaded_layers < 32
    fewer = Options(choice.level, choice.offloaded_layers - 1)
    assert predict(llama(), machine, work, fewer).gpu_bytes > FILL * H200
    assert choice.prediction.host_bytes <= machine.host_bytes_per_gpu == 0.8 * 550 * GIB / 8


def test_longest_sequence_is_the_longest() -> None:
    length = longest_sequence(llama(), node(), 8, Options())
    assert length % 1024 == 0
    assert choose_level(llama(), node(), Work(length, 8), Options()) is not None
    assert choose_level(llama(), node(), Work(length + 1024, 8), Options()) is None
    assert longest_sequence(llama(), node(1, 24), 1, Options()) == 0
    assert longest_sequence(llama(), node(), 8, Options(), documents=2) <= length // 2


def test_recommended_degree() -> None:
    assert recommend_degree(llama(), node(), 4096, Options()) == 1
    assert recommend_degree(llama(), node(), 1 << 20, Options()) == 8
    assert recommend_degree(llama(), node(), 4096, Options(), groups=2) == 4
    assert recommend_degree(llama(), node(8, 24), 1 << 20, Options()) is None
