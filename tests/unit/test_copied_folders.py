"""losses/ and ulysses/parallel/ on their own: copied elsewhere they work, and they need nothing but torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {
    "losses": "from copied import dpo_loss; z = torch.zeros(1); assert 0.693 < dpo_loss(z, z, z, z)[0].item() < 0.694",
    "ulysses/parallel": """
from copied import ParallelMesh, Sequence, UlyssesAttention, pack_shard
batch = pack_shard([Sequence(range(5), [1] * 5), Sequence([1], [1])], ParallelMesh())
q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
out = UlyssesAttention(batch.mesh, 4, 2, 8)(q, k, k, plan=batch.attention_plan)
torch.testing.assert_close(out[5], k[5].repeat_interleave(2, 0))
""",
}


OTHERS = {*"losses ulysses models flash_attn deepspeed transformers datasets pydantic".split()}


@pytest.mark.parametrize("folder", SCRIPTS)
def test_folder_works_when_copied_and_needs_torch_alone(tmp_path, folder):
    source = Path(__file__).resolve().parents[2] / folder
    shutil.copytree(source, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys, torch\n{SCRIPTS[folder]}\nfound = set(sys.modules) & {OTHERS}; assert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
