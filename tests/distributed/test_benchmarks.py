"""The measuring programs at toy size: they measure what they were told to measure."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.launch import ROOT, environment
from tests.harness import run_distributed

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
        micro_batches=2,
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


def test_a_longer_context_is_compared_with_and_without_yarn(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for name in ("one.txt", "three.txt", "two.txt"):
        words = (f"{name} says {i * i} and goes on to {i}.\n" for i in range(400))
        (tmp_path / "books" / name).write_text("".join(words))
    toy = "--short 512 --long 2048 --steps 3 --more 2 --tokens 2048 --vocabulary 300 --width 64 --layers 1"
    arguments = [*toy.split(), "--held-out", "three.txt", "--optimizer.lr", "2e-3"]
    printed("long_context.py", tmp_path / "books", "--out", tmp_path / "out", *arguments)
    header, _, *rows = (tmp_path / "out/table.md").read_text().splitlines()
    runs = [
        "as it is, before",
        "as it is, after 2 steps",
        "YaRN, before",
        "YaRN, after 2 steps",
    ]
    assert re.findall(r"\w[^|]*\w", header) == ["position", *runs]
    assert [row.split()[1] for row in rows] == ["0-1k", "1k-2k"]
    yarn = json.loads((tmp_path / "out/YaRN/config.json").read_text())
    assert (
        yarn["model"]["rope"]["factor"] == 4
        and yarn["optimizer"]["lr"] == 2e-3
        and "one.txt" in str(yarn["data"])
    )
    assert (
        "three.txt" not in str(yarn["data"]["train"])
        and (tmp_path / "out/long_context.png").stat().st_size > 10_000
    )


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
