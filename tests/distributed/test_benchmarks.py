"""The measuring programs at toy size: they measure what they were told to measure."""

import argparse
import json
import re
import sys

import pytest

from tests.e2e.launch import ROOT, python
from tests.harness import run_distributed
from tests.model_folder import demo_model

sys.path.insert(0, str(ROOT / "benchmarks"))

SHAPE = """
--model.config.vocab_size=64 --model.config.hidden_size=64 --model.config.intermediate_size=96
--model.config.num_attention_heads=8 --model.config.num_key_value_heads=4 --model.config.head_dim=16
"""


OPTIONS = """{"arch": "qwen2.5-0.5b", "layers": 2, "sp": 0, "seq": [48, 48, 48, 24], "documents": [2, 2, 2, 4],
"recompute": ["none", "block", "block", "none"], "offload": ["none", "none", "auto", "none"],
"steps": 1, "warm": 0, "skip_attention": false, "out": "", "watch": 0, "micro_batches": 2, "gpu_memory": 0}"""


def measured():
    from throughput import work

    options = argparse.Namespace(**json.loads(OPTIONS))
    plain = work(options, SHAPE.split())
    vars(options).update(
        skip_attention=True, seq=[48], documents=[2], recompute=["block"], offload=["none"]
    )
    return plain + work(options, SHAPE.split())


def test_steps_are_measured_as_set():
    for rows in run_distributed(measured, 2, cpu=True):
        assert [row["documents"] for row in rows] == [2, 2, 2, 4, 2]
        *steps, others, fit = rows
        assert others["tokens"] == steps[0]["tokens"] and others["loss"] != steps[-1]["loss"]
        levels = "none block block none block".split()
        assert [row["recompute"] for row in rows] == levels
        assert [row["offload"] for row in steps] == [0, 0, 0]  # a CPU has room for all
        wanted = {"weights": "resident", "micro_batches": 2, "tokens": 96, "sp": 2, "dp": 1}
        assert steps[0] | wanted == steps[0] and steps[0]["seconds"] > 0
        # the same tokens, one engine, step after step
        losses = [row["loss"] for row in steps]
        assert losses == sorted({*losses}, reverse=True) and losses[-1] > 0
        assert fit["note"] == "fit mode: not a training step"
        assert not {"seconds", "loss"} & {*fit}


@pytest.mark.full
def test_preferences_of_a_model_are_judged_before_and_after(tmp_path):
    """The study of DPO: its held-out pairs rank better after training, with all weights and with adapters."""
    model, pairs = demo_model(tmp_path / "model"), tmp_path / "pairs.jsonl"
    rows = (ROOT / "configs/demo/data/dpo_train.jsonl").read_text().splitlines()[:200]
    pairs.write_text("\n".join(rows))
    toy = "--batch.examples 8 --model.dtype float32 --optimizer.lr 1e-2 --optimizer.warmup 2 --run.seed 0"
    study = f"benchmarks/real_model.py dpo {model} {pairs} --out {tmp_path} {toy}"
    python(*study.split()).check()
    header, _, *lines = (tmp_path / "dpo/table.md").read_text().splitlines()
    assert "pairs ranked right (%)" in header and "gain in log-odds" in header
    names = [re.split(r" *\| *", line)[1] for line in lines]
    assert names == ["ours, all weights, seed 0", "ours, LoRA, seed 0"]
    gains = [re.findall(r"(-?[\d.]+) ± ([\d.]+)", line) for line in lines]
    assert all(float(gain) > 2 * float(error) > 0 for (_, (gain, error)) in gains), gains
    assert (tmp_path / "dpo/dpo.png").stat().st_size > 10_000


def test_episodes_are_measured_whole_and_with_every_shared_turn_once(tmp_path):
    toy = "--layers 1 --episodes 2 --shortest 64 --longest 80 --prompt 90 --answers 3 --tokens 999"
    run = "-m torch.distributed.run --standalone benchmarks/episodes.py --steps 1 --out"
    python(*f"{run} {tmp_path / 'rows'} {toy} {SHAPE}".split()).check()
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["episodes", "flat"]
    for row in rows:
        assert row["shared_tokens"] < 0.9 * row["whole_tokens"]
        assert row["gain"] == pytest.approx(row["whole_s"] / row["shared_s"], rel=0.05)
    # three answers leave out the prompt twice, each but for its last token
    assert rows[1]["whole_tokens"] - rows[1]["shared_tokens"] == 2 * 2 * 89
