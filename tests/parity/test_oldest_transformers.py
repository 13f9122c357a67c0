"""The oldest transformers that the package states; this environment has the newest."""

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.conftest import OLD
from tests.e2e.launch import ROOT, environment


def test_chats_tokenizers_and_models_with_it(transformers4: Path) -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert OLD[0].replace("==", ">=") in needs
    tests = ["tests/unit/test_data_chat.py", "tests/parity/test_model_parity.py"]
    path = {"PYTHONPATH": f"{transformers4}:{ROOT}"}
    line = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
    done = subprocess.run(
        line, env=environment() | path, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
