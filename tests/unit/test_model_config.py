"""config.json in both styles, with transformers' defaults."""

import json

import pytest

from models.arch import ModelConfig
from models.families import RopeScaling
from models.published import ARCHITECTURES
from tests.model_folder import tiny_config
from ulysses.check.input_files import read_shape
from ulysses.config.command_line import check

LLAMA = tiny_config()
QWEN = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}


def test_old_and_new_rope_styles_agree():
    numbers = """"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192"""
    for style in (
        '{"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", NUMBERS}}',
        '{"rope_theta": 5e5, "rope_scaling": {"type": "llama3", NUMBERS}}',
        '{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"type": "llama3", NUMBERS}}',
        '{"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", NUMBERS}}',
    ):
        given = json.loads(style.replace("NUMBERS", numbers))
        config = ModelConfig.from_hf(LLAMA | given)
        assert config.rope_theta == 5e5
        assert config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


@pytest.mark.parametrize(
    "arch, key, value, read",
    [
        ("qwen3-30b-a3b", "num_experts", 16, lambda shape: shape.moe.num_experts),
        ("qwen3-30b-a3b", "num_local_experts", 16, lambda shape: shape.moe.num_experts),
        ("gemma3-1b", "sliding_window_pattern", 3, lambda shape: len(shape.pattern)),
        ("smollm3-3b", "no_rope_layer_interval", 2, lambda shape: len(shape.pattern)),
        ("qwen3.5-0.8b", "full_attention_interval", 2, lambda shape: len(shape.pattern)),
    ],
)
def test_a_changed_key_counts_whatever_else_says_the_same_of_the_shape(arch, key, value, read):
    model = {"arch": arch, "init": "random", "config": {key: value}}
    shape, _ = read_shape(check({"stage": "sft", "run": {"steps": 1}, "model": model}))
    assert read(shape) == value


def test_defaults_are_those_of_transformers():
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    for raw, cls in (
        (LLAMA, LlamaConfig),
        (QWEN, Qwen2Config),
        (QWEN3, Qwen3Config),
        (MISTRAL, MistralConfig),
    ):
        ours = ModelConfig.from_hf(raw)
        theirs = cls(**{k: v for k, v in raw.items() if k != "model_type"})
        names = """max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings
            bos_token_id eos_token_id"""
        for name in names.split():
            assert ours.to_hf()[name] == getattr(theirs, name), name
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_config_survives_a_round_trip_through_transformers(name):
    from transformers import AutoConfig

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
    from transformers import Gemma3TextConfig

    given = {"sliding_window_pattern": 3, "num_hidden_layers": 7}
    theirs = Gemma3TextConfig(**given).layer_types
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
