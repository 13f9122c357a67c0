"""What a hybrid's config.json and settings may say, and what is refused in one sentence."""

import json

import pytest
import torch
from torch import nn

from models.arch import ModelConfig, architecture
from models.decoder import CausalLM
from models.kinds import count_parameters
from models.lora import LoraLinear, add_adapters
from tests import rows_of
from tests.family_case import FAMILIES, raw
from ulysses.check.adapter_settings import check_adapters, choose_targets
from ulysses.check.preflight import prepare
from ulysses.config.command_line import check
from ulysses.options import stage_of
from ulysses.plan.hardware import GIB, Machine
from ulysses.plan.layer_cost import plain_model
from ulysses.plan.planner import choose_memory, memory_line, planner_model
from ulysses.plan.step_cost import Question


def test_an_interval_arranges_the_layers_that_no_list_arranges():
    config = raw("qwen3_5_text", num_hidden_layers=7, full_attention_interval=3)
    mixers = [kind.mixer for kind in ModelConfig.from_hf(config).layers]
    assert [i for i, mixer in enumerate(mixers) if mixer == "full_attention"] == [2, 5]


LINEAR_LAYER, FULL_LAYER = "linear_attention", "full_attention"
ARRANGED = [
    ([LINEAR_LAYER, LINEAR_LAYER, FULL_LAYER] * 2 + [LINEAR_LAYER], 3),
    ([LINEAR_LAYER] * 4, 5),
    ([LINEAR_LAYER, FULL_LAYER, LINEAR_LAYER, LINEAR_LAYER], None),
    ([FULL_LAYER, LINEAR_LAYER], None),
]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("layers, interval", ARRANGED)
def test_the_interval_of_full_attention_is_written_where_there_is_one(family, layers, interval):
    """SGLang's configuration of these models has no default for it, and reads no list."""
    changes = {
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "mlp_only_layers": [],
    }
    config = ModelConfig.from_hf(FAMILIES[family] | changes)
    written = config.to_hf()
    assert written.get("full_attention_interval") == interval
    assert ModelConfig.from_hf(written) == config
    if interval:
        del written["layer_types"]
        assert ModelConfig.from_hf(written) == config


def test_a_multimodal_config_keeps_what_is_around_the_text_model():
    text = {k: v for k, v in FAMILIES["qwen3_5"].items() if k != "model_type"}
    rope = text["rope_parameters"] | {"mrope_section": [1, 1, 0]}
    whole = {
        "model_type": "qwen3_5",
        "text_config": text | {"rope_parameters": rope, "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 3},
        "tie_word_embeddings": True,
    }
    config = ModelConfig.from_hf(whole, rope_type="yarn", factor=4.0)
    assert (
        config.tie_word_embeddings and config.rope_scaling and config.rope_scaling.factor == 4
    )
    written = config.to_hf(dtype="float32")
    assert ModelConfig.from_hf(written).to_hf(dtype="float32") == written
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf(
        ModelConfig.from_hf(written).to_hf(dtype="float32")
    )
    assert written["vision_config"] == {"depth": 3} and written["model_type"] == "qwen3_5"
    inner = written["text_config"]
    assert inner["mtp_num_hidden_layers"] == 1 and inner["rope_parameters"]["factor"] == 4
    assert inner["rope_parameters"]["mrope_section"] == [1, 1, 0]
    # transformers and vLLM read this one where both are
    assert inner["rope_scaling"] == inner["rope_parameters"]
    assert inner["full_attention_interval"] == 4
    with pytest.raises(
        ValueError, match="text_config = None but it must be the text model's table"
    ):
        ModelConfig.from_hf({"model_type": "qwen3_5"})
    sentence = "is of qwen3_5_moe but its text_config of 'qwen3_5_text', which must be qwen3_5_moe_text; correct"
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(written | {"model_type": "qwen3_5_moe"})


TARGETS = """
qwen3_5 => in_proj_qkv in_proj_ba => has in_proj_ba, which this model lacks
qwen3_next => in_proj_z => it has in_proj_ba, in_proj_qkvz, out_proj
olmo2 => q_proj out_proj => it has no linear attention
qwen3_5 => in_proj_qkv in_proj_z out_proj q_proj =>
"""


@pytest.mark.parametrize("family, targets, complaint", rows_of(TARGETS))
def test_targets_that_the_model_lacks_are_refused(family, targets, complaint):
    targets = targets.split()
    settings = {"model": {"path": "x", "lora": {"rank": 2, "targets": targets}}}
    config = check(
        {"stage": "sft", "data": {"train": ["x"]}, "run": {"output": "y"}} | settings
    )
    shape = ModelConfig.from_hf(FAMILIES[family])
    assert choose_targets(config, shape) is config
    found = [*check_adapters(config, shape)]
    assert bool(found) == bool(complaint) and complaint in "".join(found)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo2"])
def test_every_projection_has_an_adapter_by_default(family):
    shape = ModelConfig.from_hf(FAMILIES[family])
    settings = {"path": "x", "lora": {"rank": 2}}
    config = check({"stage": "sft", "data": {"train": ["x"]}, "model": settings})
    chosen = choose_targets(config, shape)
    model = add_adapters(CausalLM(shape), chosen.model.lora)
    lacking = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, LoraLinear)
        and ".layers." in name
        and not name.endswith("shared_expert_gate")
    ]
    assert not lacking
    planned = planner_model(stage_of(chosen), shape)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.trained == adapters
    assert planned.parameters == adapters + count_parameters(shape)
    # a resumed run reads what was chosen, and changes nothing
    again = check(json.loads(chosen.model_dump_json()))
    assert choose_targets(again, shape) == chosen


def test_a_run_without_adapters_writes_a_configuration_that_is_accepted_again():
    model = {"config": FAMILIES["qwen3_5"], "init": "random"}
    values = {"stage": "sft", "data": {"train": [__file__]}, "model": model}
    config = check(values | {"run": {"steps": 1}})
    found = prepare(config, 1, findings := []).config  # the tokenizer is absent, too
    assert len(findings) == 1
    assert not found.model.lora.model_dump(exclude_defaults=True)


def test_small_hybrids_are_planned_and_run_without_graphs():
    """The kernels' launches depend on the chunks of a packing; a small dense model has graphs on the same GPU."""
    found = {}
    for name in ("qwen2.5-0.5b", "qwen3.5-0.8b"):
        case = Question(plain_model(architecture(name)), Machine(1, 80 * GIB), 2048)
        found[name] = choose_memory(case)
        assert {*found[name].levels} == {"none"}
    assert [plan.graphs for plan in found.values()] == [True, False]
    assert "CUDA graphs" not in memory_line(found["qwen3.5-0.8b"])
    rule = CausalLM(ModelConfig.from_hf(FAMILIES["qwen3_5"])).model.layers[0].mixer
    assert not rule.fits_graphs(torch.device("cuda"), torch.bfloat16)
