"""A run prints its own lines and a progress bar, nothing that a library says about itself; --debug shows all."""

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.launch import ROOT, environment, tiny

OURS = re.compile(
    r"(attention kernel|training data|held-out data|memory|gradients|computing reference|step \d+|exported|resumed"
    r"|  [\d.]+% of the tokens are prompts)\b"
    r"|\s*\d+%\|.*step|\s*$"  # the progress bar, in pieces between carriage returns
)
LOUD = (
    "PYTHONWARNINGS",
    "DS_ACCELERATOR",
    "TOKENIZERS_PARALLELISM",
)  # what silences libraries in the other tests


def lines(tmp_path: Path, *more: str) -> list[str]:
    changes = {"run__steps": 2, "run__overwrite": True, "optimizer__warmup": 1}
    arguments = tiny("dpo", tmp_path / "run", **changes)
    loud = {name: value for name, value in environment().items() if name not in LOUD}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        [sys.executable, "train.py", *arguments, *more], cwd=ROOT, env=loud, **pipes
    )
    assert done.returncode == 0, done.stdout
    return re.split(r"[\r\n]", done.stdout)


def test_every_line_is_the_runs_own(tmp_path):
    found = lines(tmp_path)
    assert len([line for line in found if line.strip()]) >= 5
    assert not [line for line in found if not OURS.match(line)]
    assert any(
        "DeepSpeed" in line or "Warning" in line or "WARNING" in line
        for line in lines(tmp_path, "--debug")
    )
