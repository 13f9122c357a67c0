"""What `ulysses demo` does in an empty folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.folders import read_json
from tests.e2e.launch import ROOT, environment, metrics
from tests.e2e.test_packaging import installed  # noqa: F401 (a fixture)
from ulysses.train import main

DEMO = ROOT / "configs/demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory, installed):  # noqa: F811
    """The demo's output folder and what it printed, run from the wheel; its caches go to a folder of the test.

    Only the settings of SFT are there already, with half the steps: what a user has changed is kept.
    """
    folder, home = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("home")
    (folder / "configs/demo").mkdir(parents=True)
    settings = (DEMO / "sft.toml").read_text().replace("steps = 150", "steps = 75")
    (folder / "configs/demo/sft.toml").write_text(settings)
    env = environment() | {"PYTHONPATH": str(installed), "HOME": str(home)}
    env["HF_HOME"] = os.environ.get("HF_HOME", str(home / "hf"))
    env.pop("VIRTUAL_ENV", None)  # where it is active, no line says how to activate it
    line = [sys.executable, "-m", "ulysses.cli", "demo", "--ranks", "2"]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "runs/demo", done.stdout


def test_held_out_accuracy_and_three_answers_before_and_after(demo):
    folder, text = demo
    assert [m["step"] for m in metrics(folder / "sft")] == [*range(5, 80, 5)]
    name = "eval/rewards/accuracies"
    found = [m[name] for m in metrics(folder / "dpo") if name in m]
    assert 0.80 <= found[-1] <= 0.97, "one question in twenty is judged the other way around"
    assert len(found) == 7 and found[0] < found[-1] - 0.03, "learning is visible"
    [n] = re.findall(r"held-out preference accuracy: \d\.\d+ \+- \d\.\d+ \(n = (\d+)\)", text)
    assert int(n) >= 200
    before, after = (
        re.findall(rf"^  {time} DPO +(.+)$", text, re.M) for time in ("before", "after")
    )
    assert len(before) == len(after) == 3 and before != after


def test_printed_paths_exist(demo):
    folder, text = demo
    lines = re.findall(r"^(?:metrics|checkpoint|export|plot) +(.+)$", text, re.M)
    paths = [word for line in lines for word in line.split() if "/" in word]
    assert len(paths) == 5
    assert all((folder.parents[1] / path).exists() for path in paths), paths


def test_printed_commands_run_as_they_are(demo, tmp_path, monkeypatch, capfd):
    """Checked by dry runs, in the order in which they are printed, with a model and data of the user's names."""
    folder, text = demo
    shutil.copytree(folder.parents[1] / "configs", tmp_path / "configs")
    for name, stage in (("chats", "sft"), ("pairs", "dpo")):
        rows = tmp_path / f"configs/demo/data/{stage}_eval.jsonl"
        shutil.copy(rows, tmp_path / f"{name}.jsonl")
    printed = r"^  (source .*|torchrun (?:.*\\\n)*.*)"
    activate, *lines = re.findall(printed, text.partition("next, with")[2], re.M)
    assert Path(activate.split()[1]).parent == Path(sys.executable).parent and len(lines) == 2
    monkeypatch.chdir(tmp_path)
    for line, model in zip(lines, (tmp_path / "YOUR_MODEL", tmp_path / "runs/sft/export")):
        shutil.copytree(folder / "sft/export", model)
        config = read_json(model / "config.json")
        config["max_position_embeddings"] = 1 << 17  # a window like that of models people train
        (model / "config.json").write_text(json.dumps(config))
        torchrun, arguments = line.replace("\\\n", "").split("-m ulysses.train")
        assert re.fullmatch(r"torchrun --standalone \S+ *", torchrun)
        again = [*shlex.split(arguments), "--data.cache", "cache", "--dry-run"]
        assert main(again) == 0, capfd.readouterr().err
        assert "steps per epoch" in capfd.readouterr().out


def test_a_folder_that_is_no_demo_is_kept(tmp_path):
    """One with a config.json may be a model's, or another run's."""
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/config.json").write_text('{"model_type": "llama"}')
    line = [sys.executable, "examples/demo.py", "--ranks", "1", "--output", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode and "holds config.json, but run.output needs a new" in done.stderr
    assert (tmp_path / "sft/config.json").exists()
