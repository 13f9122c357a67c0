"""The library examples: the same numbers on every number of processes, under torchrun and without a launcher."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, environment, ranks


def forked(example: str, processes: int, logs: Path) -> str:
    return (
        ranks([], processes, logs / str(processes), script=f"examples/{example}").check().stdout
    )


def test_example_prints_the_one_process_gradient_norm(tmp_path):
    """Of 6 heads: 2 ranks, of torchrun, split heads; 4 also split rows."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "examples/library.py",
    ]
    two = subprocess.run(
        line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    alone = subprocess.run(
        [sys.executable, line[-1]],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    four = forked("library.py", 4, tmp_path)
    for processes, text in ((1, alone), (2, two), (4, four)):
        count, many, one = re.search(
            r"on (\d) processes ([\d.]+), on one process ([\d.]+)", text
        ).groups()
        assert int(count) == processes
        assert abs(float(many) - float(one)) <= 1e-5 * float(one) > 0


def test_transformers_with_fsdp2_gives_the_same_numbers_on_any_number_of_processes(
    tmp_path,
):
    texts = (forked("fsdp2.py", processes, tmp_path) for processes in (1, 2))
    one, two = (re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", text) for text in texts)
    assert len(one) == 5 and float(one[-1][0]) < float(one[0][0]) - 0.3
    for a, b in zip(one, two, strict=True):
        assert [float(x) for x in a] == pytest.approx([float(x) for x in b], rel=1e-5)
