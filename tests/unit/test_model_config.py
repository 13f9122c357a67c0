"""config.json in both styles, with transformers' defaults."""

import json
from operator import attrgetter

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from models.arch import ARCHITECTURES, ModelConfig
from models.families import FAMILIES, RopeScaling
from tests import rows_of
from tests.family_case import FAMILIES as CASES
from tests.model_folder import tiny_config
from ulysses.check.input_files import read_shape
from ulysses.config.command_line import check
from ulysses.disk import write_json

LLAMA = tiny_config()
QWEN = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3"}
CASES_BY_TYPE = {raw["model_type"]: raw for raw in CASES.values()}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}


def test_old_and_new_rope_styles_agree():
    numbers = """"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192"""
    for style in (
        '{"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", NUMBERS}}',
        '{"rope_theta": 5e5, "rope_scaling": {"type": "llama3", NUMBERS}}',
        '{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"type": "llama3", NUMBERS}}',
        '{"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", NUMBERS}}',
        '{"rope_theta": 5e5, "rope_parameters": {"rope_theta": null, "rope_type": "llama3", NUMBERS}}',
    ):
        given = json.loads(style.replace("NUMBERS", numbers))
        config = ModelConfig.from_hf(LLAMA | given)
        assert config.rope_theta == 5e5
        assert config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


CHANGED = """
qwen3-30b-a3b => num_experts => 16 => moe.num_experts
qwen3-30b-a3b => num_local_experts => 16 => moe.num_experts
gemma3-1b => sliding_window_pattern => 3 => pattern
smollm3-3b => no_rope_layer_interval => 2 => pattern
qwen3.5-0.8b => full_attention_interval => 2 => pattern
"""


@pytest.mark.parametrize("arch, key, value, read", rows_of(CHANGED))
def test_a_changed_key_counts_whatever_else_says_the_same_of_the_shape(arch, key, value, read):
    model = {"arch": arch, "init": "random", "config": {key: int(value)}}
    shape, _ = read_shape(check({"stage": "sft", "run": {"steps": 1}, "model": model}))
    found = attrgetter(read)(shape)
    assert (len(found) if read == "pattern" else found) == int(value)


def test_a_changed_key_brings_no_scaling_back_that_the_file_does_not_have(tmp_path):
    """gpt-oss has one by default."""
    plain = CASES_BY_TYPE["gpt_oss"] | {"rope_scaling": None, "rope_parameters": {}}
    write_json(tmp_path / "config.json", plain)
    model = {"path": str(tmp_path), "init": "random", "config": {"num_hidden_layers": 2}}
    shape, _ = read_shape(check({"stage": "sft", "run": {"steps": 1}, "model": model}))
    assert shape.num_hidden_layers == 2 and shape.rope_scaling is None


def test_defaults_are_those_of_transformers():
    for raw in (LLAMA, QWEN, QWEN3, MISTRAL):
        ours, theirs = ModelConfig.from_hf(raw), AutoConfig.for_model(**raw)
        names = """max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings
            bos_token_id eos_token_id"""
        for name in names.split():
            assert ours.to_hf()[name] == getattr(theirs, name), name
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


OF_SOME = json.loads("""{
    "norm_topk_prob": false, "mlp_only_layers": [1], "decoder_sparse_step": 2, "rope_local_base_freq": 77.0,
    "full_attention_interval": 3, "sliding_window_pattern": 3, "no_rope_layer_interval": 2, "no_rope_layers": [1, 0],
    "sliding_window": 5, "use_sliding_window": true, "attention_bias": true, "mlp_bias": true, "head_dim": 4,
    "embedding_multiplier": 3.0, "logits_scaling": 3.0, "query_pre_attn_scalar": 3, "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 7, "linear_key_head_dim": 6, "swiglu_limit": 3.0, "num_local_experts": 9,
    "final_logit_softcapping": 3.0
}""")
# what a class reads and does not declare: from its keywords, or with a default where it builds the layers
READ = {
    "gemma3_text": ("rope_local_base_freq", "sliding_window_pattern"),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("full_attention_interval",)
    ),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_counts_that_transformers_class_does_not_have(model_type):
    """It is refused, or changes nothing."""
    cls = CONFIG_MAPPING[model_type]
    own = {*cls().to_dict(), *cls.attribute_map, *READ.get(model_type, ()), "head_dim"}
    raw = CASES_BY_TYPE.get(model_type, LLAMA | {"model_type": model_type})
    raw = {name: x for name, x in raw.items() if name != "layer_types"}
    for name in OF_SOME.keys() - own:
        try:
            found = ModelConfig.from_hf(raw | {name: OF_SOME[name]})
        except ValueError as error:
            assert f"config.json has {name} = " in str(error)
        else:
            assert found == ModelConfig.from_hf(raw), name


YARN = {"rope_type": "yarn", "factor": 4.0}


# the family, what its file says besides, and why that is refused; TABLE is either name of the rotary table
REFUSED = r"""
gpt_oss => {"norm_topk_prob": false} => norm_topk_prob = .*, which these models do not compute
gpt_oss => {"mlp_only_layers": [1]} => mlp_only_layers = .*, which these models do not compute
gpt_oss => {"decoder_sparse_step": 2} => decoder_sparse_step = .*, which these models do not compute
qwen3_5_moe_text => {"norm_topk_prob": false} => norm_topk_prob = .*, which these models do not compute
qwen3_5_moe_text => {"mlp_only_layers": [1]} => mlp_only_layers = .*, which these models do not compute
qwen3_5_moe_text => {"decoder_sparse_step": 2} => decoder_sparse_step = .*, which these models do not compute
llama => {"TABLE": {"type": null, "factor": 4.0}} => rotary scaling .* without a rope_type; name it, or remove the scal
llama => {"TABLE": {"factor": 4.0}} => rotary scaling .*'factor': 4.0} without a rope_type
llama => {"TABLE": {"rope_type": 5, "factor": 4.0}} => rotary scaling .* without a rope_type
llama => {"TABLE": {"type": "yarn", "factor": 4.0, "truncate": "maybe"}} \
=> truncate = 'maybe' but it must be true or false; correct
llama => {"TABLE": {"type": "yarn", "factor": 1e308}} => factor = 1e.308 but it must be a number above 0 and below 1e.38
llama => {"TABLE": {"type": "yarn", "factor": 1e37}} \
=> max_position_embeddings = 2.* but it must be a whole number above 0 and below
llama => {"TABLE": {"type": "linear", "factor": LONG}} => factor = 9{60} but it must be a number above 0 and below
llama => {"vocab_size": LONG} => vocab_size = 9{60} but it must be a
llama => {"rms_norm_eps": LONG} => rms_norm_eps = 9{60} but it must be a
llama => {"initializer_range": LONG} => initializer_range = 9{60} but it must be a
llama => {"num_hidden_layers": LONG} => num_hidden_layers = 9{60} but it must be a
qwen3_moe => {"num_experts": 8, "num_local_experts": 16} => .*under another name, .*; correct one of them
qwen3_moe => {"num_local_experts": 16, "num_experts": 8} => .*under another name, .*; correct one of them
llama => {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "type": "linear"}} => .*under another name, .*; correct
llama => {"rope_parameters": {"type": "yarn", "factor": 4.0}, "rope_scaling": {"type": "yarn", "factor": 8.0}} \
=> .*under another name, .*; correct one of them
llama => {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, "rope_theta": 1e6} \
=> .*under another name, .*; correct one of them
llama => {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}} \
=> rope_parameters = .*, where all layers share one table;
mistral => {"rope_parameters": {"full_attention": LOCAL}} => rope_parameters = .*, where all layers share one table;
gemma3_text => {"rope_parameters": {"sliding_attention": LOCAL}} \
=> rope_parameters = .*, where each kind of layers must have a table;
olmo3 => {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": null}} \
=> rope_parameters = .*, where each kind of layers must have a table;
qwen3_5_text => {"linear_num_value_heads": 4} => linear_num_value_heads is 4 but must be a multiple of
qwen3_5_text => {"linear_conv_kernel_dim": 0} => linear_conv_kernel_dim = 0 but it must be a whole number
qwen3_5_text => {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]} \
=> layer_types of .* has layers of linear_attention, full_attention here
qwen3_5_text => {"hidden_act": "gelu"} => hidden_act = 'gelu', which these models do not compute
qwen3_5_text => {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}} \
=> .* partial_rotary_factor 2, so that 32 columns would turn
qwen3_5_text => {"head_dim": 12} => head_dim is 12 and partial_rotary_factor 0.25, so that 3 columns would turn
qwen3 => {"head_dim": 15} => head_dim is 15 and partial_rotary_factor 1, so that 15 columns would turn
qwen3_moe => {"mlp_only_layers": "0"} => mlp_only_layers = '0' but it must be a list of
qwen3_moe => {"mlp_only_layers": ["0"]} => mlp_only_layers = .'0'. but it must be a list of the numbers
qwen3_moe => {"mlp_only_layers": [0, 1]} => mlp_only_layers = .0, 1. .* leave no layer with experts
qwen3_moe => {"decoder_sparse_step": 0} => decoder_sparse_step = 0 but it must be a whole number
qwen3_moe => {"decoder_sparse_step": 9} => .* decoder_sparse_step = 9, which leave no layer with experts
llama => {"quantization_config": {"quant_method": "gptq"}} => quantization_config .* by gptq, but only bitsandbytes' NF4
llama => {"quantization_config": {"quant_method": "awq"}} => quantization_config .* by awq, but only bitsandbytes' NF4
llama => {"quantization_config": {"quant_method": "fp8"}} => quantization_config .* by fp8, but only bitsandbytes' NF4
llama => {"quantization_config": {"quant_method": "mxfp4"}} \
=> quantization_config .* by mxfp4, but only bitsandbytes' NF4
llama => {"quantization_config": {"quant_method": "compressed-tensors"}} \
=> quantization_config .* quantised by compressed-tensors, but only bitsandbytes' NF4
"""
SHORT = {"LOCAL": '{"rope_type": "default", "rope_theta": 77.0}', "LONG": "9" * 400}


@pytest.mark.parametrize("model_type, fields, sentence", rows_of(REFUSED))
def test_a_file_that_says_what_cannot_be_is_refused(model_type, fields, sentence):
    base = LLAMA | {"model_type": model_type}
    if model_type == "qwen3_5_text":
        base = CASES["qwen3_5"]
    for name, text in SHORT.items():
        fields = fields.replace(name, text)
    for table in ("rope_scaling", "rope_parameters"):
        changes = json.loads(fields.replace("TABLE", table))
        with pytest.raises(ValueError, match=f"^(config.json has )?{sentence}") as caught:
            ModelConfig.from_hf(base | changes)
        assert len(str(caught.value)) < 300


def test_a_file_may_say_one_thing_twice():
    fields = json.loads("""{
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 8, "num_local_experts": 8, "rope_theta": null,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "type": "yarn"}
    }""")
    shape = ModelConfig.from_hf(LLAMA | fields)
    assert shape.moe.num_experts == 8 and shape.rope_scaling.factor == 4.0


def test_key_value_heads_that_a_file_omits_are_transformers():
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo2"):
        raw = {**LLAMA, "model_type": model_type, "num_attention_heads": 64, "hidden_size": 128}
        null = raw | {"num_key_value_heads": None}
        del raw["num_key_value_heads"]
        there = AutoConfig.for_model(**raw).num_key_value_heads
        assert ModelConfig.from_hf(raw).num_key_value_heads == there, model_type
        assert ModelConfig.from_hf(null).num_key_value_heads == 64, model_type


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_config_survives_a_round_trip_through_transformers(name):
    config = ARCHITECTURES[name]
    raw = config.to_hf()
    assert ModelConfig.from_hf(raw) == config
    loaded = AutoConfig.for_model(**raw)
    assert ModelConfig.from_hf(loaded.to_dict()) == config


def test_biases_of_attention_are_those_of_transformers():
    biased = LLAMA | {"attention_bias": True}
    for raw, written, output in ((biased, True, True), (QWEN3 | {"attention_bias": True}, True, True),
                                 (QWEN, None, False), (LLAMA, False, False)):  # fmt: skip
        config = ModelConfig.from_hf(raw)
        assert config.to_hf().get("attention_bias") == written and config.output_bias == output
        assert config.attention_bias == (raw is not LLAMA)


def test_the_window_of_chunked_attention_is_the_one_that_was_trained():
    chunks = json.loads("""{
        "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144
    }""")
    raw = QWEN | {"max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks}
    assert ModelConfig.from_hf(raw).max_position_embeddings == 262144


def test_gemma3s_pattern_is_that_of_transformers():
    """Also beside layer_types, which decide."""
    given = {"sliding_window_pattern": 3, "num_hidden_layers": 7}
    theirs = AutoConfig.for_model("gemma3_text", **given).layer_types
    assert theirs.count("full_attention") == 2
    for more in ({}, {"layer_types": theirs}):
        config = ModelConfig.from_hf(LLAMA | {"model_type": "gemma3_text"} | given | more)
        assert [kind.mixer for kind in config.layers] == theirs == config.to_hf()["layer_types"]


def test_gemma3s_window_counts_its_scaling():
    """The files of 4B to 27B have a factor of 8 and 131,072 tokens, by default; a setting stretches the 16,384."""
    raw = LLAMA | {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8}}
    config = ModelConfig.from_hf(raw)
    assert config.max_position_embeddings == config.to_hf()["max_position_embeddings"] == 131072
    assert (
        ModelConfig.from_hf(raw, rope_type="yarn", factor=16.0).max_position_embeddings
        == 262144
    )
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_no_token_stays_none_beside_a_default():
    """SmolLM3's config.json has "bos_token_id": null, where transformers' default is a token."""
    raw = LLAMA | {"model_type": "smollm3", "bos_token_id": None, "eos_token_id": None}
    config = ModelConfig.from_hf(raw)
    assert config.bos_token_id is None and config.eos_token_id == ()
    assert config.pad_token_id == 128004 and ModelConfig.from_hf(config.to_hf()) == config


BESIDE = json.loads("""{
    "rope_type": "linear", "factor": 8.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.5, "mscale": 2.0,
    "mscale_all_dim": 0.5, "truncate": false, "low_freq_factor": 2.0, "high_freq_factor": 3.0
}""")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rotary_fields_outside_their_tables_count_as_in_transformers(model_type):
    """Only the original window does, so that two of them are refused."""
    raw = LLAMA | {"model_type": model_type, "rope_scaling": None, "rope_parameters": {}}
    if FAMILIES[model_type].rotary:
        del raw["rope_parameters"]
    for table in ({}, {"rope_scaling": YARN | {"original_max_position_embeddings": 64}}):
        given = {**CASES_BY_TYPE.get(model_type, {}), **raw, **table}
        assert ModelConfig.from_hf(given | BESIDE) == ModelConfig.from_hf(given)
    with pytest.raises(
        ValueError, match="has original_max_position_embeddings = 32 and, in an"
    ):
        ModelConfig.from_hf(given | {"original_max_position_embeddings": 32})


def test_nulls_and_empty_tables_of_positions_are_transformers():
    scaling = YARN | {"truncate": None}
    assert ModelConfig.from_hf(LLAMA | {"rope_scaling": scaling}).rope_scaling.truncate is False
    raw = LLAMA | {"model_type": "gpt_oss"}
    assert ModelConfig.from_hf(raw).rope_scaling.factor == 32
    assert ModelConfig.from_hf(raw | {"rope_parameters": {}}).rope_scaling is None
    gemma = LLAMA | {"model_type": "gemma3_text", "rope_local_base_freq": 33.0}
    tables = {f"{x}_attention": {"rope_type": "default"} for x in ("full", "sliding")}
    assert ModelConfig.from_hf(gemma | {"rope_parameters": tables}).rope_local_theta == 33
    # for yarn transformers takes the window of the file for the original one, in Gemma too
    scaled = ModelConfig.from_hf(gemma | {"rope_scaling": YARN, "max_position_embeddings": 64})
    assert scaled.rope_scaling.original_max_position_embeddings == 64


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_mask_that_is_not_causal_is_refused(model_type):
    raw = {**CASES_BY_TYPE.get(model_type, LLAMA), "model_type": model_type}
    assert ModelConfig.from_hf(raw | {"is_causal": True}) == ModelConfig.from_hf(raw)
    with pytest.raises(
        ValueError, match="config.json has is_causal = False, which these models"
    ):
        ModelConfig.from_hf(raw | {"is_causal": False})


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "gpt_oss"])
def test_exports_without_a_layer_that_has_a_window_are_transformers(model_type):
    raw = {**CASES_BY_TYPE[model_type], "layer_types": ["full_attention"] * 2}
    config = ModelConfig.from_hf(raw | {"num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    assert model(torch.arange(3)[None]).logits.isfinite().all()
    assert ModelConfig.from_hf(config.to_hf()) == config
