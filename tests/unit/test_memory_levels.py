"""Every recompute level, with or without tiles, has ordinary autograd's gradients, at its own cost; offload."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from models.lora import add_adapters
from tests.memory_case import (
    CONFIG,
    MOE,
    QWEN3,
    TILE,
    all_chunks_are_free,
    assert_same_gradients,
    batch,
    build,
    gradients,
)
from ulysses.config.schema import LoraSection as Adapters
from ulysses.memory.levels import LEVELS, TILE_ROWS
from ulysses.memory.offload import Offloader
from ulysses.plan.layer_cost import LayerSetup, layer_costs

MIXED = [["block", "none", "keep_attention"]]  # a level for each of the three layers
FAMILIES = pytest.mark.parametrize(
    "config", [CONFIG, QWEN3, MOE], ids=["qwen2", "qwen3", "qwen3_moe"]
)
DENSE = pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["qwen2", "qwen3"])


@FAMILIES
@pytest.mark.parametrize("tile", [TILE_ROWS, TILE], ids=["whole", "tiled"])
@pytest.mark.parametrize("level", [*LEVELS, *MIXED], ids=str)
def test_gradients_are_those_of_ordinary_autograd(level, tile, config):
    expected_logps, expected = gradients(build(config=config))
    logps, found = gradients(build(config=config, recompute=level, mlp_tile=tile))
    assert_close(logps, expected_logps, rtol=1e-6, atol=1e-6)
    assert_same_gradients(found, expected)


@FAMILIES
@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_tiles_sum_in_float32(level, config):
    exact = gradients(build(config=config))[1]
    whole = gradients(build(torch.bfloat16, config, recompute=level))[1]
    found = gradients(build(torch.bfloat16, config, recompute=level, mlp_tile=TILE))[1]
    for name, gradient in found.items():
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - exact[name]).norm()
        # sums in bfloat16 would add 2 to 6 %
        assert error <= 1.01 * (whole[name].float() - exact[name]).norm(), name


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_derivative_of_a_layer_is_refused(level):
    model = build(recompute=level)
    hidden = model.model(batch()).sum()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        hidden.backward(create_graph=True)


@pytest.mark.parametrize("wrong", ["full", ["block", "none"]])
def test_levels_that_are_unknown_or_too_few_are_refused(wrong):
    sentence = "one of none, keep_attention, block, or a list of one for each of the 3"
    with pytest.raises(ValueError, match=f"must be {sentence}"):
        build(recompute=wrong)


@DENSE
@pytest.mark.parametrize("level", LEVELS[1:])
def test_each_level_computes_again_what_it_says(level, config):
    """FLOPs of products and calls of the attention kernel, as torch counts them."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    config = replace(config, num_hidden_layers=4)

    def counted(level):
        model, calls = build(config=config, recompute=level), {attend: lambda *_, **__: 1}
        with FlopCounterMode(display=False, custom_mapping=calls) as counter:
            gradients(model)
        found = counter.get_flop_counts()["Global"]
        return found.pop(attend), sum(found.values())

    products, mixes = layer_costs(config, LayerSetup())[0].computed_again(level, True)
    (calls, flops), (plain_calls, plain_flops) = counted(level), counted("none")
    assert calls == plain_calls * (1 + mixes)
    assert flops - plain_flops == pytest.approx(2 * 26 * 4 * products)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_backward_that_fails_leaves_nothing_behind(level):
    model = build(recompute=level)
    loss = model(batch()).logps.sum()
    mlp = model.model.layers[0].mlp
    mlp.fused = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del mlp.fused
    model.zero_grad()
    assert_same_gradients(gradients(model)[1], gradients(build())[1])


@pytest.mark.parametrize("kind", "forward forward_pre full_backward full_backward_pre".split())
@pytest.mark.parametrize("level", LEVELS)
def test_every_hook_on_a_layer_runs(level, kind):
    expected = gradients(build())[1]
    model, seen = build(recompute=level, mlp_tile=TILE), []
    for number, layer in enumerate(model.model.layers):
        register = getattr(layer, f"register_{kind}_hook")
        register(lambda *_, number=number: seen.append(number))
    assert_same_gradients(gradients(model)[1], expected)
    assert {*seen} == {0, 1, 2}


@FAMILIES
@pytest.mark.parametrize("dropout, tile", [(0.0, TILE), (0.4, TILE_ROWS)])
def test_frozen_weights_and_adapters(dropout, tile, config):
    """Dropout is drawn once more as it was drawn; tiles draw other numbers than a whole."""

    def adapted(**memory):
        torch.manual_seed(0)
        model = build(config=config, **memory)
        # beside experts, gate and up have an adapter together, and none is dropped
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        add_adapters(model, Adapters(rank=3, targets=targets, dropout=dropout))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
        return gradients(model)[1]

    expected = adapted()
    assert expected and all("lora_" in name for name in expected)
    assert any("experts.lora_B" in name for name in expected) == (config is MOE)
    for level in LEVELS:
        assert_same_gradients(adapted(recompute=level, mlp_tile=tile), expected)


@FAMILIES
def test_a_layer_without_rows_gives_its_feed_forward_zeros(config):
    model = build(config=config, recompute="block", mlp_tile=TILE)
    rows = torch.zeros(0, model.config.hidden_size)
    for layer in model.model.layers:
        half = layer.second_half
        assert half.add_tiles(rows).shape == rows.shape
        grad_rows, found = half.gradients(rows, rows)
        assert grad_rows.shape == rows.shape and not any(x.any() for x in found)
        assert [x.shape for x in found] == [p.shape for p in half.tensors] != []


MIXTURES = [("block", "block", "block"), ("block", "block", "keep_attention"),
            ("keep_attention", "keep_attention", "none"), ("none", "none", "none")]  # fmt: skip


@pytest.mark.parametrize("away", [3, 2, 1])
@pytest.mark.parametrize("levels", MIXTURES, ids="+".join)
def test_offload_returns_every_byte(levels, away):
    expected = gradients(build())[1]
    offloader = Offloader("cpu", chunk_bytes=1024)
    model = build(recompute=levels, mlp_tile=TILE, offloader=offloader, offloaded_layers=away)
    for _ in range(2):
        model.zero_grad()
        assert_same_gradients(gradients(model)[1], expected)
    held = offloader.allocated
    assert (held > 0) == (levels[0] != "none")
    dropped = model(batch()).logps.sum()
    del dropped
    assert offloader.allocated == held and all_chunks_are_free(offloader)


def test_memory_that_cannot_be_pinned_says_what_to_change(monkeypatch):
    offloader = Offloader("cpu", chunk_bytes=64)
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError) as error:
        offloader.take(64)
    assert "lower memory.host_memory or raise the memlock limit" in error.value.__notes__[0]
