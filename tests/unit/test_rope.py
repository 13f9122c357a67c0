"""Rotary positions: transformers' frequencies bit by bit, angles exact at four million tokens."""

import math
from decimal import Decimal, getcontext

import pytest
import torch

from models.arch import ARCHITECTURES
from models.rope import inverse_frequencies, rotary_table


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "llama3.2-1b", "qwen2.5-7b"])
def test_frequencies_are_those_of_transformers(name):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = ARCHITECTURES[name]
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**config.to_hf()))
    assert torch.equal(inverse_frequencies(config), theirs.inv_freq)


def test_angles_are_exact_at_four_million_tokens():
    config = ARCHITECTURES["llama3.1-8b"]
    frequencies = inverse_frequencies(config)
    positions = torch.tensor([0, 1, 1_000_003, 4_194_303])
    cos, sin = rotary_table(positions, frequencies)
    assert cos.dtype == torch.float32 and cos.shape == (4, 64)
    for row, position in enumerate(positions.tolist()):
        for column in (0, 1, 17, 63):
            # exact integer arithmetic: the float32 frequency is a rational number
            numerator, denominator = float(frequencies[column]).as_integer_ratio()
            angle = sine_and_cosine(position * numerator, denominator)
            assert abs(float(sin[row, column]) - angle[0]) < 6e-8
            assert abs(float(cos[row, column]) - angle[1]) < 6e-8
    naive = (positions.float()[:, None] * frequencies).sin()
    assert (naive - sin).abs().max() > 0.01  # what float32 angles would do


def sine_and_cosine(numerator: int, denominator: int) -> tuple[float, float]:
    """sin and cos of a fraction, reduced modulo 2 pi with 60 digits."""
    getcontext().prec = 60
    two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    reduced = float((Decimal(numerator) / Decimal(denominator)) % two_pi)
    return math.sin(reduced), math.cos(reduced)
