"""The measurement of degrees at toy size: a case is read and built as it says, and splitting rows leaves the loss alone."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.harness import run_distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

TOY = ["--model.config.vocab_size", "64", "--model.config.hidden_size", "64", "--model.config.intermediate_size", "96"]


def measured(out: Path) -> None:
    from degrees import measure_case, read_case

    options = argparse.Namespace(layers=1, seq=[48], steps=1, out=str(out))
    for case in ("qwen2.5-0.5b", "qwen2.5-0.5b@1", "qwen2.5-0.5b:12/2@2"):
        measure_case(case, *read_case(case), options, TOY)


def test_cases_are_built_as_they_say(tmp_path: Path) -> None:
    run_distributed(measured, 4, tmp_path / "rows", cpu=True, with_zero=True)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(r["heads"], r["ranks"]) for r in rows] == [("14/2", "2 x 2"), ("14/2", "1 x 4"), ("12/2", "2 x 2")]
    assert all(r["tokens"] == 48 and r["sp"] == 4 and r["seconds"] > 0 for r in rows)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=2e-4)


def test_shares_are_of_the_first_case_at_that_length() -> None:
    from degrees import read_case, with_share

    rows = [{"tokens": t, "model_tflops_gpu": f} for t, f in ((64, 500.0), (128, 400.0), (64, 475.0), (128, 0.0))]
    assert [with_share(row, rows).get("share") for row in rows] == ["100.0%", "100.0%", "95.0%", None]
    assert read_case("llama3-8b") == ("llama3-8b", 0, 0, 0) and read_case("qwen2.5-7b:14/2@2") == ("qwen2.5-7b", 14, 2, 2)
    with pytest.raises(SystemExit, match="is not ARCH"):
        read_case("llama3-8b:32")
