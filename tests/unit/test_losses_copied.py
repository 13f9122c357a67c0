"""losses/ works where it is copied, and needs nothing but torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import losses


def test_folder_works_when_copied_and_imports_torch_alone(tmp_path):
    shutil.copytree(Path(losses.__file__).parent, tmp_path / "elsewhere" / "my_losses")
    code = (
        "import sys, torch; from my_losses import dpo_loss; z = torch.zeros(1); print(dpo_loss(z, z, z, z)[0].item());"
        "bad = {'deepspeed', 'transformers', 'datasets', 'pydantic', 'losses', 'ulysses', 'models'} & set(sys.modules);"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.693")
