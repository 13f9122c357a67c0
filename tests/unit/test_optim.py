"""The learning rate as a function of the step, and what decays."""

import math

import pytest

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.scored import PolicyValue
from tests.family_case import FAMILIES
from tests.model_folder import tiny_config
from ulysses.config.schema import OptimizerSection
from ulysses.run.build import parameter_groups
from ulysses.run.trainer import learning_rate

TOTAL = 100


def rates(**settings):
    config = OptimizerSection(lr=2.0, **settings)
    return [learning_rate(step, TOTAL, config) for step in range(TOTAL + 1)]


@pytest.mark.parametrize("warmup", [10, 0.1])
def test_warm_up_rises_evenly_to_the_peak(warmup):
    found = rates(schedule="constant", warmup=warmup)
    assert found[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)]) and set(
        found[10:]
    ) == {2.0}
    assert set(rates(schedule="constant", warmup=0)) == {2.0}


def test_linear_and_cosine_fall_to_their_floor():
    """At step 10 + k of 90 steps after the warm-up; the floor itself would be step 100."""
    for schedule, share in (
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
    ):
        found = rates(schedule=schedule, warmup=10, min_lr=0.1)[10:]
        assert found == pytest.approx([0.2 + 1.8 * share(k / 90) for k in range(91)])
    assert rates(schedule="linear", warmup=0)[-2] == pytest.approx(0.02)


def test_wsd_is_constant_then_falls():
    found = rates(schedule="wsd", warmup=10, decay_fraction=0.2, min_lr=0.5)
    assert found[9:81] == [2.0] * 72
    assert found[80:] == pytest.approx([2 - k / 20 for k in range(21)])


def test_matrices_decay_and_norms_and_biases_do_not():
    qwen = tiny_config(model_type="qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    model = CausalLM(ModelConfig.from_hf(qwen))
    decay, rest = parameter_groups(model, 0.3)
    assert (decay.weight_decay, rest.weight_decay) == (0.3, 0.0)
    names = ".bias", "norm.weight"
    without = {id(p) for n, p in model.named_parameters() if n.endswith(names)}
    assert {id(p) for p in rest.parameters} == without and len(without) == 6
    assert {id(p) for p in decay.parameters} == {id(p) for p in model.parameters()} - without
    experts = CausalLM(ModelConfig.from_hf(FAMILIES["gpt-oss"]))
    _, rest = parameter_groups(experts, 0.3)
    names = "bias", "norm.weight", "sinks"  # a bias of every expert has two axes
    without = {id(p) for n, p in experts.named_parameters() if n.endswith(names)}
    assert {id(p) for p in rest.parameters} == without
    model.requires_grad_(False).lm_head.weight.requires_grad_(True)
    [only] = parameter_groups(model, 0.3)
    assert only.parameters == [model.lm_head.weight], (
        "frozen parameters are in no group, and an empty group is left out"
    )


def test_a_value_is_a_scope_with_its_own_rate():
    model = PolicyValue(ModelConfig.from_hf(tiny_config(num_hidden_layers=1)))
    *policy, value = parameter_groups(model, 0.3, {"policy": 1.0, "value": 0.5})
    assert (value.scope, value.lr_factor, value.weight_decay) == ("value", 0.5, 0.3)
    assert value.parameters == [model.value["score"].weight]
    assert {(g.scope, g.lr_factor) for g in policy} == {("policy", 1.0)}
    assert sum(len(g.parameters) for g in policy) == len(list(model.parameters())) - 1
