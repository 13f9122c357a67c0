"""Attention over NCCL with every kernel that this machine has, against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("processes", sorted({2, 3, 4, 8} & set(range(GPUS + 1))) or [2])
def test_kernels_over_nccl(processes, head_dim):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(ROOT / "benchmarks/attention.py"), "--check", "--head-dim", str(head_dim)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference (14, 2) float32" in done.stdout
