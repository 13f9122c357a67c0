"""The measuring programs at toy size: what they count is right, what they build is what a run would build."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from models.arch import ModelConfig
from tests.harness import run_distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip


def counted() -> list[dict[str, Any]]:
    from collectives import count

    return count(ModelConfig.from_hf({**SHAPE, "model_type": "llama", "num_hidden_layers": 1}), 6, torch.device("cpu"), torch.float32)


def test_bytes_of_a_layer_are_those_of_the_formulas() -> None:
    """The program itself refuses if the two layers' outputs or gradients differ."""
    n, size, width, q, k = 4, 4, 64, 8 * 16, 4 * 16
    for ulysses, again, tensor in run_distributed(counted, n, cpu=True, with_zero=True):
        each = size * (2 * q + 2 * k) * (n - 1) / n
        assert ulysses["bytes_per_token"] == 2 * each and again["bytes_per_token"] == 3 * each
        assert tensor["bytes_per_token"] == 8 * (n - 1) * size * width
        assert ulysses["ratio"] == "2.7x fewer" and tensor["calls"] == "4 all_gather, 4 reduce_scatter_tensor"


def measured() -> list[dict[str, Any]]:
    from throughput import work

    options = argparse.Namespace(
        arch="qwen2.5-0.5b", layers=2, sp=0, seq=[48, 48, 48], documents=2, recompute=["none", "block", "block"],
        offload=["none", "none", "checkpoints"], steps=1, warm=0, skip_attention=False, profile="", out="",
    )  # fmt: skip
    rest = [part for name, value in SHAPE.items() for part in (f"--model.config.{name}", str(value))]
    plain = work(options, [*rest, "--memory.head_chunks", "1"])
    options.skip_attention, options.seq, options.recompute, options.offload = True, [48], ["block"], ["none"]
    return plain + work(options, [*rest, "--memory.head_chunks", "2"])


def test_steps_are_measured_as_set() -> None:
    for first, second, third, fit in run_distributed(measured, 2, cpu=True, with_zero=True):
        assert [row["recompute"] for row in (first, second, third, fit)] == ["none", "block", "block", "block"]
        assert [row["offload"] for row in (first, second, third)] == [0, 0, 2] and fit["head_chunks"] == 2
        assert first["tokens"] == 96 and first["sp"] == 2 and first["dp"] == 1 and first["seconds"] > 0
        assert first["loss"] > second["loss"] > third["loss"] > 0  # the same tokens, one engine, step after step
        assert fit["note"] == "fit mode: not a training step" and "seconds" not in fit and "loss" not in fit
