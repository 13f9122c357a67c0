"""The measuring programs at toy size: they measure what they were told to measure."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.harness import run_distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16,
}  # fmt: skip


def measured() -> list[dict[str, Any]]:
    from throughput import work

    options = argparse.Namespace(
        arch="qwen2.5-0.5b", layers=2, sp=0, seq=[48, 48, 48], documents=2, recompute=["none", "block", "block"],
        offload=["none", "none", "checkpoints"], steps=1, warm=0, skip_attention=False, profile="", out="",
    )  # fmt: skip
    rest = [part for name, value in SHAPE.items() for part in (f"--model.config.{name}", str(value))]
    plain = work(options, rest)
    options.skip_attention, options.seq, options.recompute, options.offload = True, [48], ["block"], ["none"]
    return plain + work(options, rest)


def test_steps_are_measured_as_set() -> None:
    for first, second, third, fit in run_distributed(measured, 2, cpu=True, with_zero=True):
        assert [row["recompute"] for row in (first, second, third, fit)] == ["none*2", "block*2", "block*2", "block*2"]
        assert [row["offload"] for row in (first, second, third)] == [0, 0, 2]
        assert first["tokens"] == 96 and first["sp"] == 2 and first["dp"] == 1 and first["seconds"] > 0
        assert first["loss"] > second["loss"] > third["loss"] > 0  # the same tokens, one engine, step after step
        assert fit["note"] == "fit mode: not a training step" and "seconds" not in fit and "loss" not in fit
