"""Experts: the balance loss is that of transformers over the whole step, on every topology; what the metrics say."""

from dataclasses import replace

import pytest
import torch

from models.arch import ModelConfig
from models.hf_format import WeightFiles
from tests.e2e.launch import ranks, tiny
from tests.engine_case import MOE, Case, trained
from tests.family_case import FAMILIES
from tests.memory_case import assert_same_gradients
from tests.model_folder import demo_model
from tests.stage_case import Formula, compared

SMALL = replace(MOE, moe=replace(MOE.moe, num_experts=6, num_experts_per_tok=2))
CLAMPED = ModelConfig.from_hf(
    FAMILIES["gpt-oss"] | {"vocab_size": 97, "initializer_range": 0.1}
)
# both have a shared expert, and the second one a dense layer
SHARED, PARTLY_DENSE = (
    ModelConfig.from_hf(FAMILIES[name] | {"vocab_size": 97, "initializer_range": 0.1})
    for name in ("qwen3_5_moe", "qwen3_next")
)
COEFFICIENT = 0.7


def of_transformers(case):
    """Loss, balance loss and gradients of transformers' model in float64, over the step's sequences one by one."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    formula = Formula(case, 0)
    config = AutoConfig.for_model(**case.shape.to_hf(dtype="float32"))
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    twin = AutoModelForCausalLM.from_config(config, **how).double()
    twin.load_state_dict(formula.model.state_dict())
    total, count, logits = 0.0, 0.0, []
    for s in (s for example in formula.examples for s in example.sequences):
        tokens = torch.as_tensor(s.tokens)[None]
        out = twin(tokens, output_router_logits=True)
        weights = formula.weights(s)[:-1]
        logps = out.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        total, count = total - (logps * weights).sum(), count + weights.sum()
        logits.append(out.router_logits)
    layers = tuple(torch.cat(parts) for parts in zip(*logits))
    moe = case.shape.moe
    balance = load_balancing_loss_func(layers, moe.num_experts, moe.num_experts_per_tok)
    loss = total / count + COEFFICIENT * balance
    loss.backward()
    found = {name: p.grad for name, p in twin.named_parameters()}
    return float(loss), float(balance), found


@pytest.fixture(scope="module")
def exact():
    return of_transformers(Case("sft", shape=SMALL))


@pytest.mark.parametrize(
    "world, sp, budget, level",
    [
        (1, 1, 128, "none"),
        (4, 2, 1000, "block"),
        (3, 3, 128, "keep_attention"),
    ],
)
def test_the_balance_loss_is_that_of_transformers_over_the_whole_step(
    world, sp, budget, level, exact
):
    how = {"sp": sp, "budget": budget, "recompute": level, "packing_seed": 1}
    case = Case("sft", shape=SMALL, coefficient=COEFFICIENT, **how)
    (metrics,), (gradients,) = trained(case, world)
    loss, balance, wanted = exact
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["aux_loss"] == pytest.approx(balance, rel=1e-6)
    assert_same_gradients(gradients, wanted)


def test_metrics_name_the_busiest_expert_and_the_idle_ones():
    found = [
        trained(Case("sft", sp=sp, shape=MOE), world)[0][0] for world, sp in ((1, 1), (4, 2))
    ]
    for layer in range(MOE.num_hidden_layers):
        for name in (f"experts/busiest/{layer}", f"experts/idle/{layer}"):
            assert found[0][name] == found[1][name]
        assert 1 < found[0][f"experts/busiest/{layer}"] <= 128 / 3
        assert 0 < found[0][f"experts/idle/{layer}"] < 125


@pytest.mark.parametrize(
    "stage, world, sp, more",
    [
        ("sft", 2, 2, {"recompute": "keep_attention"}),
        ("sft", 4, 2, {"quantize": "nf4"}),
        ("sft", 2, 1, {"quantize": "nf4", "engine": {"resident": True}}),
        ("sft", 2, 2, {"shape": CLAMPED, "recompute": "block"}),
        ("dpo", 2, 2, {"shape": SHARED, "quantize": "nf4", "recompute": "block"}),
        (
            "dpo",
            3,
            3,
            {"shape": PARTLY_DENSE, "quantize": "nf4", "recompute": "keep_attention"},
        ),
    ],
)
def test_adapters_of_experts(stage, world, sp, more):
    """Over whole and over quantised bases; the formula has matrices in place of the bytes."""
    every = ("o_proj", "gate_proj", "up_proj", "down_proj")
    how = {"shape": MOE, "lora_rank": 3, "lora_targets": every, **more}
    compared(Case(stage, sp=sp, **how), world)


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_a_frozen_router_is_exported_as_it_was(tmp_path, frozen):
    """Everything else is trained, in the sparse layer and in the dense one."""
    shape = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    demo_model(tmp_path / "base", **shape, moe_intermediate_size=16, mlp_only_layers=[0])
    settings = (
        f"--model.path {tmp_path}/base --model.init pretrained --model.freeze_router {frozen}"
    )
    ranks(tiny("sft", tmp_path / "run", f"{settings} --run.steps 1 --optimizer.lr 0.01"), 2)
    before, after = (WeightFiles(tmp_path / name) for name in ("base", "run/export"))
    kept = {name for name in before.tensors if torch.equal(before.read(name), after.read(name))}
    routers = {name for name in before.tensors if name.endswith("mlp.gate.weight")}
    assert routers and kept == (routers if frozen == "true" else set())
