"""The parallel folder on its own: copied elsewhere it works, and it needs nothing but torch."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "ulysses" / "parallel"

SCRIPT = """
import sys, torch
from attention_parts import ParallelMesh, Sequence, UlyssesAttention, pack_shard
batch = pack_shard([Sequence(range(5), [1] * 5), Sequence([1], [1])], ParallelMesh())
attention = UlyssesAttention(batch.mesh, 4, 2, 8)
q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
out = attention(q, k, k, plan=batch.attention_plan)
torch.testing.assert_close(out[5], k[5].repeat_interleave(2, 0))
assert not {"ulysses", "losses", "models", "flash_attn"} & set(sys.modules)
"""


def test_folder_works_when_copied_elsewhere(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "attention_parts", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_folder_imports_torch_and_itself_only():
    allowed = {*sys.stdlib_module_names, "torch", ""}
    for path in FOLDER.glob("*.py"):
        found = {name.split(".")[0] for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.M)}
        assert found <= allowed, f"{path.name} imports {found - allowed}"
