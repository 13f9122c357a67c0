"""Rotary positions: transformers' frequencies bit by bit, angles exact at four million tokens."""

import dataclasses

import pytest
import torch

from models.arch import ARCHITECTURES
from models.fused import rotate
from models.rope import inverse_frequencies, rotary_table


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "llama3.2-1b", "qwen2.5-7b"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = ARCHITECTURES[name]
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**config.to_hf()))
    assert torch.equal(inverse_frequencies(config), theirs.inv_freq)


def test_angles_are_exact_at_four_million_tokens() -> None:
    config = ARCHITECTURES["llama3.1-8b"]
    frequencies = inverse_frequencies(config)
    positions = torch.tensor([0, 1, 1_000_003, 4_194_303])
    cos, sin = rotary_table(positions, frequencies)
    assert cos.dtype == torch.float32 and cos.shape == (4, 64)
    for row, position in enumerate(positions.tolist()):
        for column in (0, 1, 17, 63):
            # exact integer arithmetic: the float32 frequency is a rational number
            numerator, denominator = float(frequencies[column]).as_integer_ratio()
            angle = _sine_argument(position * numerator, denominator)
            assert abs(float(sin[row, column]) - angle[0]) < 6e-8
            assert abs(float(cos[row, column]) - angle[1]) < 6e-8
    naive = (positions.float()[:, None] * frequencies).sin()
    assert (naive - sin).abs().max() > 0.01  # what float32 angles would do


def _sine_argument(numerator: int, denominator: int) -> tuple[float, float]:
    """sin and cos of a fraction, reduced modulo 2 pi with 60 digits."""
    import math
    from decimal import Decimal, getcontext

    getcontext().prec = 60
    two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    reduced = float((Decimal(numerator) / Decimal(denominator)) % two_pi)
    return math.sin(reduced), math.cos(reduced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotation_keeps_lengths_and_its_gradient_turns_back(dtype: torch.dtype) -> None:
    config = dataclasses.replace(ARCHITECTURES["llama3-8b"], head_dim=8)
    cos, sin = rotary_table(torch.arange(5), inverse_frequencies(config))
    q = torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
    k = torch.randn(5, 1, 8, dtype=dtype, requires_grad=True)
    rotated_q, rotated_k = rotate(q, k, cos, sin)
    assert rotated_q.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1), rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad((rotated_q, rotated_k), (q, k), (rotated_q.detach(), rotated_k.detach()))
    for grad, x in zip(grads, (q, k)):
        torch.testing.assert_close(grad, x.detach(), rtol=tolerance, atol=tolerance)
