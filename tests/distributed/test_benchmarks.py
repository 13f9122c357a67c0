"""The measuring programs at toy size: they measure what they were told to measure."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from models.arch import ModelConfig
from tests.e2e.launch import ROOT, environment, ranks
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
        offload=["none", "none", "checkpoints"], steps=1, warm=0, skip_attention=False, out="", watch=0,
        micro_batches=2, gpu_memory=0.0,
    )  # fmt: skip
    rest = [f"--model.config.{name}={value}" for name, value in SHAPE.items()]
    plain, fit = work(options, rest), {"seq": [48], "recompute": ["block"], "offload": ["none"]}
    vars(options).update(skip_attention=True, **fit)
    return plain + work(options, rest)


def test_steps_are_measured_as_set():
    for rows in run_distributed(measured, 2, cpu=True):
        *steps, fit = rows
        assert [row["recompute"] for row in rows] == ["none", "block", "block", "block"]
        assert [row["offload"] for row in steps] == [0, 0, 2]
        wanted = {"weights": "resident", "micro_batches": 2, "tokens": 96, "sp": 2, "dp": 1}
        assert steps[0] | wanted == steps[0] and steps[0]["seconds"] > 0
        # the same tokens, one engine, step after step
        losses = [row["loss"] for row in steps]
        assert losses == sorted({*losses}, reverse=True) and losses[-1] > 0
        assert fit["note"] == "fit mode: not a training step"
        assert not {"seconds", "loss"} & {*fit}


def test_preferences_of_a_model_are_judged_before_and_after(tmp_path, monkeypatch):
    """The study of DPO: its held-out pairs rank better after training, with all weights and with adapters."""
    import real_model

    def forked(line: list[str], **_: Any) -> None:
        launcher, arguments = line[: (at := line.index("ulysses.train"))], line[at + 1 :]
        assert launcher[-1] == "-m" and "--nproc_per_node=1" in launcher
        ranks(arguments, 1, tmp_path / "logs").check()

    demo, model = ROOT / "configs/demo", tmp_path / "model"
    shutil.copytree(demo / "data/tokenizer", model)
    write_model(
        model, ModelConfig.from_hf(json.loads((demo / "model/config.json").read_text()))
    )
    rows = (demo / "data/dpo_train.jsonl").read_text().splitlines()[:200]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    toy = "--batch.examples 8 --model.dtype float32 --optimizer.lr 1e-2 --optimizer.warmup 2 --run.seed 0"
    pairs = tmp_path / "pairs.jsonl"
    words = ["real_model.py", "dpo", model, pairs, "--out", tmp_path, *toy.split()]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    monkeypatch.setattr(real_model, "DEVICE", "cpu")
    monkeypatch.setattr(real_model, "DTYPE", torch.float32)
    stand_in = SimpleNamespace(run=forked, STDOUT=subprocess.STDOUT)
    if not torch.cuda.is_available():  # what has started CUDA cannot be forked
        monkeypatch.setattr(real_model, "subprocess", stand_in)
    real_model.main()
    header, _, *lines = (tmp_path / "dpo/table.md").read_text().splitlines()
    assert "pairs ranked right (%)" in header and "gain in log-odds" in header
    names = [re.split(r" *\| *", line)[1] for line in lines]
    assert names == ["ours, all weights, seed 0", "ours, LoRA, seed 0"]
    gains = [re.findall(r"(-?[\d.]+) ± ([\d.]+)", line) for line in lines]
    assert all(float(gain) > 2 * float(error) > 0 for (_, (gain, error)) in gains), gains
    assert (tmp_path / "dpo/dpo.png").stat().st_size > 10_000


def test_tokenising_is_compared_with_datasets_map():
    line = [sys.executable, "benchmarks/tokenising.py", *"--rows 40 --rounds 1".split()]
    text = subprocess.check_output(line, cwd=ROOT, env=environment(), text=True)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = [(row["workers"], row["who"]) for row in rows]
    assert found == [*product((1, 2), ("ours", "datasets.map"))]
    assert len({row["tokens"] for row in rows}) == 1
