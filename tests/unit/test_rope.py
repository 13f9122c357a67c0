"""Rotary positions: transformers' frequencies and factors bit by bit, angles exact at four million tokens."""

import json
import math
import tomllib
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from models.arch import ARCHITECTURES, ModelConfig
from models.families import RopeScaling
from models.ops.rotary import rope_parameters, rotary_table

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
SMALL = json.loads("""{
    "model_type": "qwen2", "vocab_size": 9, "hidden_size": 192, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 1e6
}""")
SCALINGS = tomllib.loads("""
"yarn" = {rope_type = "yarn", factor = 3.0}
"yarn, factor 4" = {type = "yarn", factor = 4.0, original_max_position_embeddings = 128}
"attention factor" = {rope_type = "yarn", factor = 3.0, attention_factor = 0.7}
"mscale alone" = {rope_type = "yarn", factor = 3.0, mscale = 0.5}
"mscale" = {rope_type = "yarn", factor = 3.0, mscale = 0.707, mscale_all_dim = 1.5}
"betas" = {rope_type = "yarn", factor = 3.0, beta_fast = 8.0, beta_slow = 2.0, truncate = true}
"not truncated" = {rope_type = "yarn", factor = 3.0, truncate = false}
"both limits in one dimension" = {rope_type = "yarn", factor = 3.0, original_max_position_embeddings = 7}
"linear" = {rope_type = "linear", factor = 3.3}

[llama3]
rope_type = "llama3"
factor = 3.3
low_freq_factor = 1.5
high_freq_factor = 6.0
original_max_position_embeddings = 100
""")


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_and_factors_are_those_of_transformers(name):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = SMALL | {"rope_scaling": SCALINGS[name]}
    config = ModelConfig.from_hf(raw)
    frequencies, factor = rope_parameters(config)
    # from the file as it came, and from the one that we write
    for file in (raw, config.to_hf()):
        theirs = AutoConfig.for_model(**file)
        expected, expected_factor = ROPE_INIT_FUNCTIONS[config.rope_scaling.rope_type](
            theirs, "cpu"
        )
        assert torch.equal(frequencies, expected)
        assert factor == pytest.approx(expected_factor, rel=1e-15)
    assert not torch.equal(frequencies, rope_parameters(replace(config, rope_scaling=None))[0])
    cos, sin = rotary_table(torch.arange(9), config)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, factor**2))


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-35b-a3b"])
def test_yarn_where_a_part_of_a_head_turns_is_that_of_transformers(name):
    """A million tokens from 262,144; their angles are float32's."""
    from transformers import AutoConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    written = ARCHITECTURES[name].to_hf()
    config = ModelConfig.from_hf(written, rope_type="yarn", factor=4.0)
    assert config.max_position_embeddings == 1_048_576
    theirs = Qwen3_5TextRotaryEmbedding(AutoConfig.for_model(**config.to_hf()))
    frequencies, factor = rope_parameters(config)
    assert torch.equal(frequencies, theirs.inv_freq) and len(frequencies) == 32
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-15)
    positions = torch.tensor([0, 1000, 262_143, 262_144, 1_048_575])
    for ours, wanted in zip(
        rotary_table(positions, config), theirs(frequencies, positions.expand(3, 1, -1))
    ):
        torch.testing.assert_close(ours, wanted[0, :, :32], rtol=0, atol=0.1)
        torch.testing.assert_close(ours[:2], wanted[0, :2, :32], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("yarn", 4.0, 32768), RopeScaling("linear", 8.0, 8192)]
)
def test_angles_are_exact_at_four_million_tokens(scaling):
    config = ARCHITECTURES["llama3.1-8b"]
    config = replace(config, rope_scaling=scaling or config.rope_scaling)
    frequencies, factor = rope_parameters(config)
    assert factor == (
        pytest.approx(0.1 * math.log(4) + 1) if scaling and scaling.rope_type == "yarn" else 1
    )
    positions = torch.tensor([0, 1, 1_000_003, 4_194_303])
    cos, sin = rotary_table(positions, config)
    assert cos.dtype == torch.float32 and cos.shape == (4, 64)
    for row, position in enumerate(positions.tolist()):
        for column in (0, 1, 17, 63):
            # a float32 frequency is a rational number: reduced modulo 2 pi exactly
            angle = float(position * Fraction(float(frequencies[column])) % (2 * PI))
            assert abs(float(sin[row, column]) - factor * math.sin(angle)) < 6e-8 * factor
            assert abs(float(cos[row, column]) - factor * math.cos(angle)) < 6e-8 * factor
    naive = (positions.float()[:, None] * frequencies).sin()
    assert (naive - sin / factor).abs().max() > (
        0.01 if scaling is None else 0.001
    )  # what float32 angles would do
