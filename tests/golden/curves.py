"""The golden curves: loss and gradient norm of 20 deterministic CPU steps, SFT and DPO, one process.

python -m tests.golden.curves        writes tests/golden/*.json anew, after a change of the numerics that is meant
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.engine_case import Case, dataset, run_case
from tests.harness import run_distributed

FOLDER = Path(__file__).parent
STEPS = 20
CASES = {stage: Case(stage, steps=STEPS, lr=1e-3) for stage in ("sft", "dpo")}


def curve(name: str) -> list[list[float]]:
    """Run the case; [[loss, gradient norm] of each step]."""
    data = dataset(name, count=30, seed=7)
    metrics, _ = run_distributed(run_case, 1, CASES[name], data, cpu=True)[0]
    return [[m["loss"], m["grad_norm"]] for m in metrics]


def stored(name: str) -> list[list[float]]:
    return json.loads((FOLDER / f"{name}.json").read_text())["steps"]


def main() -> None:
    for name in CASES:
        content = {
            "columns": ["loss", "grad_norm"],
            "torch": torch.__version__,
            "steps": curve(name),
        }
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {FOLDER / name}.json")
    sys.stdout.flush()
    os._exit(0)  # the ranks' libraries leave threads behind


if __name__ == "__main__":
    main()
