"""Every recompute level, with or without tiles and offload, has ordinary autograd's gradients, at its own cost."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ulysses.parallel.attention as attention_module
from models import half_blocks
from models.rope import inverse_frequencies, rotary_table
from tests.memory_case import CONFIG, TILED, assert_same, batch, build, gradients
from ulysses.memory.case import Machine, Model, Options, Work
from ulysses.memory.levels import AUTOGRAD, LEVELS, kept_bytes, kept_tensors
from ulysses.memory.pairs import in_pairs
from ulysses.memory.peak import kept_per_layer
from ulysses.memory.plan import FILL, choose_level, predict
from ulysses.memory.tiling import TilingOptions, run_tiles, tile_gradients, tiled, tiles
from ulysses.training.config import LoraConfig as Adapters
from ulysses.training.lora import add_adapters


@pytest.mark.parametrize("tiling", [None, TILED], ids=["whole", "tiled"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_those_of_ordinary_autograd(level: str, tiling: TilingOptions | None) -> None:
    expected_logps, expected = gradients(build())
    logps, found = gradients(build(recompute=level, tiling=tiling))
    torch.testing.assert_close(logps, expected_logps, rtol=1e-6, atol=1e-6)
    assert_same(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_tiles_sum_in_float32(level: str) -> None:
    exact = gradients(build())[1]
    whole = gradients(build(torch.bfloat16))[1]
    found = gradients(build(torch.bfloat16, recompute=level, tiling=TILED))[1]
    for name, gradient in found.items():
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - exact[name]).norm()
        assert error <= 1.01 * (whole[name].float() - exact[name]).norm(), name  # sums in bfloat16 would add 2 to 6 %


def test_levels_may_differ_by_layer_and_are_checked() -> None:
    expected = gradients(build())[1]
    assert_same(gradients(build(recompute=["block", "none", "keep_exchange"], tiling=TILED))[1], expected)
    with pytest.raises(ValueError, match="lists 2 layers but the model has 3"):
        build(recompute=["block", "none"])
    with pytest.raises(ValueError, match="'full' but must be one of pair, block, keep_attention"):
        build(recompute="full")


def _counted(calls: Counter[str], name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
    calls[name] += 1
    return real(*args, **kwargs)


def test_each_level_runs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("varlen_forward", "varlen_backward"):
        monkeypatch.setattr(attention_module, name, partial(_counted, calls, name, getattr(attention_module, name)))
    gate_up, project = half_blocks._gate_up, half_blocks._Project.forward
    monkeypatch.setattr(half_blocks, "_gate_up", partial(_counted, calls, "mlp", gate_up))
    monkeypatch.setattr(half_blocks._Project, "forward", staticmethod(partial(_counted, calls, "projection", project)))
    table = {"block": (2, 2), "keep_attention": (1, 2), "keep_exchange": (1, 1), "mlp": (1, 1), "none": (1, 1)}
    for level, (attends, projections) in table.items():
        for tiling, mlps in ((None, 1 if level == "none" else 2), (TILED, 2 * 4)):  # 26 rows: 4 tiles of 7 or fewer
            for hooked in (False, True):  # the fused halves, and the modules' own forward
                model = build(recompute=level, tiling=tiling)
                if hooked:
                    for layer in model.model.layers:
                        layer.mlp.register_forward_hook(lambda *_: calls.update(mlp=1))
                        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.update(projection=1))
                calls.clear()
                gradients(model)
                again = 2 if level == "keep_exchange" and hooked else projections
                expected = {"varlen_forward": attends, "varlen_backward": 1, "projection": again, "mlp": mlps}
                assert {name: count / 3 for name, count in calls.items()} == expected, (level, tiling, hooked)


def test_a_planned_mixture_runs_what_each_layer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's levels for a GPU that is too small for one level and larger than the next one needs."""
    shape = Model(24, 40, 4, 2, 6, 67, CONFIG.num_hidden_layers, 10_000, 10_000)
    work, options = Work(1 << 20), Options(element_size=4)
    small, large = (predict(shape, Machine(1, 1), work, options._replace(level=level)).gpu_bytes for level in ("block", "keep_attention"))
    machine = Machine(1, ((large - small) * 0.8 + small) / FILL)
    choice = choose_level(shape, machine, work, options, levels=("keep_attention", "block"))
    assert choice is not None and choice.levels == ("block", "keep_attention", "keep_attention")
    calls: Counter[str] = Counter()
    for name in ("varlen_forward", "varlen_backward"):
        monkeypatch.setattr(attention_module, name, partial(_counted, calls, name, getattr(attention_module, name)))
    project = half_blocks._Project.forward
    monkeypatch.setattr(half_blocks._Project, "forward", staticmethod(partial(_counted, calls, "projection", project)))
    expected = gradients(build())[1]
    for levels, attends, projections in ((choice.levels, 2 + 1 + 1, 6), (("block", "keep_exchange", "none"), 2 + 1 + 1, 2 + 1 + 1)):
        calls.clear()
        assert_same(gradients(build(recompute=levels))[1], expected)
        assert calls == {"varlen_forward": attends, "varlen_backward": 3, "projection": projections}


@pytest.mark.parametrize("hooked", [False, True], ids=["fused", "modules"])
def test_whole_and_tiled_mlps_mix(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's choice between "none" and "mlp": the first layers in tiles (26 rows: 4 of 7), the last one whole."""
    shape = Model(24, 40, 4, 2, 6, 67, CONFIG.num_hidden_layers, 10_000, 10_000)
    work, options = Work(1 << 20), Options(element_size=4)
    sizes = [predict(shape, Machine(1, 1), work, Options("mlp", "none", n, element_size=4)).gpu_bytes for n in (1, 2)]
    choice = choose_level(shape, Machine(1, sum(sizes) / 2 / FILL), work, options, levels=("none", "mlp"))
    assert choice is not None and choice.levels == ("mlp", "mlp", "none")
    expected = gradients(build(tiling=TilingOptions(mlp_rows=0)))[1]
    calls: Counter[str] = Counter()
    monkeypatch.setattr(half_blocks, "_gate_up", partial(_counted, calls, "mlp", half_blocks._gate_up))
    for auto_rows, count in ((7, 2 * 2 * 4 + 1), (8192, 2 * 2 + 1)):  # short ones are not cut, but run again
        model = build(recompute=choice.levels, tiling=TilingOptions(auto_rows=auto_rows))
        if hooked:
            for layer in model.model.layers:
                layer.mlp.register_forward_hook(lambda *_: calls.update(mlp=1))
        calls.clear()
        assert_same(gradients(model)[1], expected)
        assert calls == {"mlp": count}, auto_rows


def layer_nodes(loss: torch.Tensor) -> list[Any]:
    nodes, function = [], loss.grad_fn
    while function is not None:
        if type(function).__name__ == "_LayerBackward":
            nodes.append(function)
        function = next(
            (f for f, _ in function.next_functions if f is not None and "Accumulate" not in type(f).__name__), None
        )
    return nodes


def layer_output(model: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a rotary table and the first layer's output."""
    packed = batch()
    rope = rotary_table(packed.positions, inverse_frequencies(CONFIG))
    hidden = torch.randn(len(packed.tokens), CONFIG.hidden_size, requires_grad=True)
    return rope, model.model.layers[0](hidden, rope, packed.attention_plan)


def held_bytes(level: str, rank: int = 0, tiling: TilingOptions | None = None) -> int:
    """Bytes of distinct storages that one layer's graph holds, weights and rotary table aside; rank: of adapters."""
    model: Any = build(recompute=level, tiling=tiling)
    if rank:
        add_adapters(model, Adapters(rank=rank))
    storages: dict[int, int] = {}
    shared = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in shared:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        rope, out = layer_output(model)
    for x in rope:
        storages.pop(x.untyped_storage().data_ptr(), None)
    for node in layer_nodes(out):
        for kept in node.group._kept.values():
            note(kept.tensor)
    return sum(storages.values())


def test_each_level_keeps_what_it_says() -> None:
    shape = {"width": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 6}
    for level in LEVELS[1:]:  # of "pair" no layer keeps anything by itself
        assert held_bytes(level) == 26 * kept_bytes(level, **shape, element_size=4, exchanged=False)
    llama = {"width": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
    assert [round(kept_bytes(level, **llama) / 1024) for level in LEVELS] == [4, 8, 16, 36, 44, 100]


def test_no_level_keeps_more_tensors_than_are_planned_for() -> None:
    """Each may leave a chunk of pinned memory part empty. On one rank the exchanged output is the output itself."""
    for level in ("block", "keep_attention", "keep_exchange"):
        for chunks in (1, 2):
            model: Any = build(recompute=level, tiling=TilingOptions(head_chunks=chunks))
            (node,) = layer_nodes(layer_output(model)[1])
            assert len(node.group._kept) == kept_tensors(level, chunks) - (level == "keep_exchange" and chunks == 1), (level, chunks)


def test_the_plan_counts_what_adapters_keep() -> None:
    """Ordinary autograd keeps the adapters' inputs too; beside them their own r numbers and the norms' scales, not planned."""
    adapted = Model(24, 40, 4, 2, 6, 67, 3, 10_000, 500)
    for level in LEVELS[1:]:
        for tiling, adapters, norms in ((TilingOptions(), 7, 2), (TILED, 4, 1)):
            options = Options(element_size=4, tiling=tiling)
            if level == "mlp":
                adapters, norms = 4, 1
            small = 4 * (adapters * 2 + norms) if level in AUTOGRAD else 0
            assert held_bytes(level, 2, tiling) == kept_per_layer(adapted, 1, 26, options, level) + 26 * small, (level, tiling)


def test_a_backward_frees_what_its_layers_kept() -> None:
    model = build(recompute="keep_exchange")
    loss = model(batch()).logps.sum()
    nodes = layer_nodes(loss)
    assert len(nodes) == 3 and all(node.kept for node in nodes)
    loss.backward(retain_graph=True)
    assert all(node.kept is None and node.group is None for node in nodes)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


@pytest.mark.parametrize("level", ["block", "keep_attention", "keep_exchange"])
def test_heads_in_chunks(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = TilingOptions(mlp_rows=7, head_chunks=2)
    assert_same(gradients(build(recompute=level, tiling=chunked))[1], gradients(build())[1])
    calls: Counter[str] = Counter()
    for name in ("varlen_forward", "varlen_backward"):
        real = getattr(attention_module, name)
        monkeypatch.setattr(attention_module, name, partial(_counted, calls, name, real))
    gradients(build(recompute=level, tiling=chunked))
    assert calls == {"varlen_forward": 3 * 2 * (2 if level == "block" else 1), "varlen_backward": 3 * 2}
    with pytest.raises(ValueError, match="can be cut into 1, 2; set one"):
        build(recompute=level, tiling=TilingOptions(head_chunks=4))
    for whole in AUTOGRAD:
        with pytest.raises(ValueError, match=f'recompute "{whole}" keeps all heads'):
            build(recompute=whole, tiling=chunked)


def test_pairs_keep_one_input_and_run_the_first_layer_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers: a pair, and one that is left over and has the level "block"."""
    calls: Counter[str] = Counter()
    for name in ("varlen_forward", "varlen_backward"):
        monkeypatch.setattr(attention_module, name, partial(_counted, calls, name, getattr(attention_module, name)))
    monkeypatch.setattr(half_blocks, "_gate_up", partial(_counted, calls, "mlp", half_blocks._gate_up))
    model = build(recompute="pair")
    loss = model(batch()).logps.sum()
    assert calls == {"varlen_forward": 3, "mlp": 3}
    (alone,) = layer_nodes(loss)
    pair = next(f for f, _ in alone.next_functions if "Accumulate" not in type(f).__name__)
    assert type(pair).__name__ == "_PairBackward" and len(pair.group._kept) == len(alone.group._kept) == 1
    calls.clear()
    loss.backward(retain_graph=True)
    assert calls == {"varlen_forward": 3 + 1, "varlen_backward": 3, "mlp": 3 + 1}
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    assert not any(layer.puts_off for layer in model.model.layers)
    calls.clear()
    gradients(build(recompute="pair", tiling=TilingOptions(head_chunks=2)))
    # without a graph all heads run at once: two layers forward, the first once more; with one, two groups each
    assert calls["varlen_forward"] == 2 + 1 + 2 * (1 + 3) and calls["varlen_backward"] == 2 * 3


def test_neighbours_of_level_pair_go_two_by_two() -> None:
    layers = [nn.Identity() for _ in range(6)]
    levels = ["pair", "pair", "block", "pair", "pair", "pair"]
    assert [[layers.index(x) for x in run] for run in in_pairs(layers, levels)] == [[0, 1], [2], [3, 4], [5]]
    assert [len(run) for run in in_pairs(layers, ["none"] * 6)] == [1] * 6


def test_a_pair_that_fails_is_whole_afterwards() -> None:
    """An error inside backward must not leave a layer that puts off its forward pass."""
    model = build(recompute="pair")
    loss = model(batch()).logps.sum()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(half_blocks, "_gate_up", lambda *_: 1 / 0)
        loss.backward()
    model.zero_grad()
    assert_same(gradients(model)[1], gradients(build())[1])


def test_watched_modules_see_every_use_and_compute_the_same() -> None:
    expected = gradients(build())[1]
    for level in LEVELS:
        model = build(recompute=level, tiling=TILED)
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_hook(lambda *_: None)
        assert_same(gradients(model)[1], expected)


def test_frozen_weights_and_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(**memory: Any) -> nn.Module:
        torch.manual_seed(0)
        model = build(**memory)
        targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
        wrapped = get_peft_model(model, LoraConfig(r=3, target_modules=targets, lora_dropout=dropout))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
        return model

    dropout = 0.0
    expected = gradients(adapted())[1]
    assert expected and all("lora_" in name for name in expected)
    for level in LEVELS:
        assert_same(gradients(adapted(recompute=level, tiling=TILED))[1], expected)
    dropout = 0.4
    for level in LEVELS:
        model = adapted(recompute=level, tiling=TILED)
        torch.manual_seed(9)
        first = gradients(model)[1]
        probe = next(iter(first))
        parameter = dict(model.named_parameters())[probe]
        index = first[probe].abs().argmax()
        difference = []
        for step in (1e-2, -1e-2):  # the repeated run must draw the first run's dropout: check against differences
            with torch.no_grad():
                parameter.view(-1)[index] += step
                torch.manual_seed(9)
                logps = _forward_only(model)
                parameter.view(-1)[index] -= step
            difference.append(float((logps * torch.linspace(0, 1, len(logps))).sum()))
        slope = (difference[0] - difference[1]) / 2e-2
        assert abs(slope - float(first[probe].view(-1)[index])) < 2e-2 * abs(slope), level


def _forward_only(model: nn.Module) -> torch.Tensor:
    with torch.enable_grad():
        return model(batch()).logps.detach()


def test_tiles_cover_all_rows_once() -> None:
    assert [(t.start, t.stop) for t in tiles(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert [(t.start, t.stop) for t in tiles(0, 4)] == [(0, 0)]
    assert TilingOptions(mlp_rows=4).rows(10) == 4 and TilingOptions(mlp_rows=6).rows(10) == 5
    assert TilingOptions(mlp_rows=0).rows(10**6) == 10**6
    automatic = TilingOptions()
    assert automatic.rows(16384) == 16384 and automatic.rows(131072) == 8192
    assert automatic.rows(131072, "none") == 131072 and automatic.rows(131072, "mlp") == 8192
    assert TilingOptions(mlp_rows=4).rows(10, "none") == 4
    with pytest.raises(ValueError, match="mlp_rows"):
        TilingOptions(mlp_rows=-1)


def test_tiled_runs_a_module_without_rows_and_gives_unused_parameters_zeros() -> None:
    linear, unused = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
    parameters = [*linear.parameters(), unused]
    for rows in (0, 5):
        x = torch.randn(rows, 3, requires_grad=True)
        run = partial(run_tiles, linear, tile_rows=2)
        gradients = partial(tile_gradients, linear, parameters=parameters, tile_rows=2)
        tiled(run, gradients, x, parameters).sum().backward()
        assert x.grad.shape == x.shape and unused.grad is not None and not unused.grad.any()
    torch.testing.assert_close(linear.bias.grad, torch.full((3,), 5.0))
