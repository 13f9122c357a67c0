"""The measuring programs at toy size: they measure what they were told to measure."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from models.arch import ModelConfig
from tests.e2e.launch import ROOT, environment
from tests.harness import run_distributed
from tests.model_folder import write_model

sys.path.insert(0, str(ROOT / "benchmarks"))

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16,
}  # fmt: skip


def measured() -> list[dict[str, Any]]:
    from throughput import work

    options = argparse.Namespace(
        arch="qwen2.5-0.5b", layers=2, sp=0, seq=[48, 48, 48], documents=2, recompute=["none", "block", "block"],
        offload=["none", "none", "checkpoints"], steps=1, warm=0, skip_attention=False, profile="", out="", watch=0,
        micro_batches=2, gpu_memory=0.0,
    )  # fmt: skip
    rest = [
        part for name, value in SHAPE.items() for part in (f"--model.config.{name}", str(value))
    ]
    plain = work(options, rest)
    options.skip_attention, options.seq, options.recompute, options.offload = (
        True,
        [48],
        ["block"],
        ["none"],
    )
    return plain + work(options, rest)


def test_steps_are_measured_as_set() -> None:
    for first, second, third, fit in run_distributed(measured, 2, cpu=True, with_zero=True):
        assert [row["recompute"] for row in (first, second, third, fit)] == [
            "none*2",
            "block*2",
            "block*2",
            "block*2",
        ]
        assert [row["offload"] for row in (first, second, third)] == [0, 0, 2]
        assert first["weights"] == "resident" and first["micro_batches"] == 2
        assert (
            first["tokens"] == 96
            and first["sp"] == 2
            and first["dp"] == 1
            and first["seconds"] > 0
        )
        assert (
            first["loss"] > second["loss"] > third["loss"] > 0
        )  # the same tokens, one engine, step after step
        assert (
            fit["note"] == "fit mode: not a training step"
            and "seconds" not in fit
            and "loss" not in fit
        )


def printed(program: str, *arguments: object) -> str:
    line = [sys.executable, f"benchmarks/{program}", *map(str, arguments)]
    return subprocess.run(
        line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_preferences_of_a_model_are_judged_before_and_after(tmp_path: Path) -> None:
    """The study of DPO: its held-out pairs rank better after training, with all weights and with adapters."""
    demo, model = ROOT / "configs/demo", tmp_path / "model"
    shutil.copytree(demo / "data/tokenizer", model)
    write_model(
        model, ModelConfig.from_hf(json.loads((demo / "model/config.json").read_text()))
    )
    rows = (demo / "data/dpo_train.jsonl").read_text().splitlines()[:200]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    toy = "--batch.examples 8 --model.dtype float32 --optimizer.lr 1e-2 --optimizer.warmup 2 --run.seed 0"
    printed(
        "real_model.py", "dpo", model, tmp_path / "pairs.jsonl", "--out", tmp_path, *toy.split()
    )
    header, _, *lines = (tmp_path / "dpo/table.md").read_text().splitlines()
    assert "pairs ranked right (%)" in header and "gain in log-odds" in header
    assert [re.split(r" *\| *", line)[1] for line in lines] == [
        "ours, all weights, seed 0",
        "ours, LoRA, seed 0",
    ]
    gains = [re.findall(r"(-?[\d.]+) ± ([\d.]+)", line) for line in lines]
    assert all(float(gain) > 2 * float(error) > 0 for (_, (gain, error)) in gains), gains
    assert (tmp_path / "dpo/dpo.png").stat().st_size > 10_000


def test_tokenising_is_compared_with_datasets_map() -> None:
    lines = printed(
        "tokenising.py", "--rows", "40", "--rounds", "1", "--pattern", "qwen2.5"
    ).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["who"], row["workers"]) for row in rows] == [
        (who, n) for n in (1, 2) for who in ("ours", "datasets.map")
    ]
    ours, theirs = (
        {row["tokens"] for row in rows if row["who"] == who} for who in ("ours", "datasets.map")
    )
    assert ours == {min(ours)} and theirs == {min(ours) + 40}, (
        "the newline after the last turn is not trained"
    )
