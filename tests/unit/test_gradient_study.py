"""The study of gradient policies: which runs it takes, what an arm is, and how its lines become a table."""

import argparse
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("gradient_study", ROOT / "benchmarks/gradient_study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gradient_study"] = module
    spec.loader.exec_module(module)
    return module


def test_runs_and_arms(study):
    a = argparse.Namespace(sizes=study.SIZES, seeds=3, tune=Path("t"), workers=8, large_workers=2)
    (small, _), (tune, _), (large, few) = study.phases(a)
    assert small[0] == study.Task("base", "10M", "clip", 0) and few == 2
    found = Counter((t.kind, t.size) for t in [*small, *tune, *large])
    assert found == {("base", "10M"): 1, ("scratch", "1M"): 24, ("scratch", "10M"): 12, ("scratch", "100M"): 12, ("tune", "10M"): 12}
    names = {arm: [p.name for p in study.chain_of(arm).policies] for arm in (*study.PRESETS, *study.SINGLES)}
    assert names["none"] == [] and names["clip"] == ["stop_on_non_finite", "clip_global_norm"]
    # a single strategy keeps the preset's condition and late settings
    assert all(names[arm] == ["stop_on_non_finite", "when"] for arm in study.SINGLES)
    for name, millions in (("1M", 1.07), ("10M", 10.1), ("100M", 99.5)):
        assert study.SIZES[name].shape().num_parameters() == pytest.approx(1e6 * millions, rel=0.01)


def test_a_run_of_each_kind(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "HELD_OUT", 6)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 300)
    tiny = study.Size(16, 1, 32, 1, lr=1e-2, steps=6, sequences=2)
    a = argparse.Namespace(sizes={"10M": tiny}, device="cpu", train=text, tune=text, tune_steps=3)
    torch.manual_seed(0)
    rows = [study.train(study.Task(kind, "10M", arm, 0), a, tmp_path / "base.pt")
            for kind, arm in (("base", "clip"), ("scratch", "clip"), ("tune", "none"), ("tune", "ulysses-pro"))]  # fmt: skip
    base, scratch, tune, pro = rows
    assert base["held_out"] == scratch["held_out"] < base["before"]
    assert tune["before"] == pro["before"] == pytest.approx(base["held_out"]) and tune["steps"] == 3
    assert tune["held_out"] < tune["before"] and tune["noisy"] == 0
    lines = [json.dumps(row | {"seed": seed, "held_out": row["held_out"] + seed}) for row in rows for seed in (0, 2)]
    lines.append(json.dumps({"kind": "scratch", "size": "10M", "arm": "none", "seed": 0, "error": "x"}))
    lines.append(json.dumps(tune | {"arm": "steady", "held_out": float("nan")}))
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(lines))
    loss, _ = study.table(file).split("\n\n")
    assert loss.splitlines() == [
        "| held-out loss, nats per byte | 10M from scratch | 10M fine-tuned |",
        "|---|---|---|",
        f"| none |  | {tune['held_out'] + 1:.3f} ± 1.414 (2) |",
        f"| clip | {scratch['held_out'] + 1:.3f} ± 1.414 (2) |  |",
        f"| ulysses-pro |  | {pro['held_out'] + 1:.3f} ± 1.414 (2) |",
        "| steady |  | diverged in 1 of 1 |",
    ]
