"""What `ulysses demo` does in an empty folder, and what the shipped configurations say before they run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    env = environment() | {
        "HOME": str(home),
        "HF_HOME": os.environ.get("HF_HOME", str(home / "hf")),
    }
    line = [sys.executable, "-m", "ulysses.cli", "demo", "--ranks", "2"]
    env |= {"PYTHONPATH": str(installed)}
    env.pop("VIRTUAL_ENV", None)  # where it is active, no line says how to activate it
    done = subprocess.run(
        line, cwd=folder, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "runs/demo", done.stdout


def test_held_out_accuracy(demo):
    folder, text = demo
    assert len(metrics(folder / "sft")) == 75
    found = [
        m["eval/rewards/accuracies"]
        for m in metrics(folder / "dpo")
        if "eval/rewards/accuracies" in m
    ]
    assert 0.80 <= found[-1] <= 0.97, "one question in twenty is judged the other way around"
    assert len(found) == 7 and found[0] < found[-1] - 0.03, "learning is visible"
    [n] = re.findall(r"held-out preference accuracy: \d\.\d+ \+- \d\.\d+ \(n = (\d+)\)", text)
    assert int(n) >= 200


def test_three_answers_before_and_after(demo):
    _, text = demo
    before, after = (
        re.findall(r"^  before DPO  (.+)$", text, re.M),
        re.findall(r"^  after DPO   (.+)$", text, re.M),
    )
    assert len(before) == len(after) == len(re.findall(r"^  question    .+$", text, re.M)) == 3
    assert before != after


def test_printed_paths_exist(demo):
    folder, text = demo
    paths = [
        word
        for line in re.findall(r"^(?:metrics|checkpoint|export|plot) +(.+)$", text, re.M)
        for word in line.split()
        if "/" in word
    ]
    assert len(paths) == 5
    assert all((folder.parents[1] / path).exists() for path in paths), paths
    assert (folder / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_printed_commands_run_as_they_are(demo, tmp_path, monkeypatch, capfd):
    """Checked by dry runs, in the order in which they are printed, with a model and data of the user's names."""
    folder, text = demo
    shutil.copytree(folder.parents[1] / "configs", tmp_path / "configs")
    for model in (tmp_path / "YOUR_MODEL", tmp_path / "runs/sft/export"):
        shutil.copytree(folder / "sft/export", model)
        config = json.loads((model / "config.json").read_text()) | {
            "max_position_embeddings": 1 << 17
        }
        (model / "config.json").write_text(
            json.dumps(config)
        )  # a window like that of models people train
    for name, stage in (("chats", "sft"), ("pairs", "dpo")):
        shutil.copy(
            tmp_path / f"configs/demo/data/{stage}_eval.jsonl", tmp_path / f"{name}.jsonl"
        )
    activate, *lines = re.findall(
        r"^  (source .*|torchrun (?:.*\\\n)*.*)", text.partition("next, with")[2], re.M
    )
    assert Path(activate.split()[1]).parent == Path(sys.executable).parent and len(lines) == 2
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line.replace("\\\n", ""))
        assert words[:2] == ["torchrun", "--standalone"] and words[3:5] == [
            "-m",
            "ulysses.train",
        ]
        assert main([*words[5:], "--data.cache", "cache", "--dry-run"]) == 0, (
            capfd.readouterr().err
        )
        assert "steps per epoch" in capfd.readouterr().out


@pytest.mark.parametrize("path", sorted(DEMO.glob("*.toml")), ids=lambda path: path.stem)
def test_dry_run_and_inspection_of_the_demo(path, tmp_path, capsys):
    # a demo may read what another one exports
    needs = re.findall(r'^\w+ = "(runs/demo/\w+/export)"', path.read_text(), re.M)
    absent = sum(not (ROOT / name).exists() for name in needs)

    def said(*options: object, code: int = 0) -> str:
        line = [
            "--config",
            path,
            "--run.output",
            tmp_path / "run",
            "--data.cache",
            tmp_path / "cache",
            *options,
        ]
        assert main([*map(str, line)]) == code
        return capsys.readouterr().out

    plan = said("--dry-run", "--gpus", 2, "--debug", code=3 if absent else 0)
    assert f'"stage": "{path.stem.replace("grpo", "ppo")}' in plan
    assert "2 processes: data parallel 1 x sequence parallel 2" in plan
    ready = f"the settings are right; absent on this machine: {absent}, see the findings above"
    verdict = ready if absent else "the run can start"
    assert plan.splitlines()[-1] == f"verdict: {verdict}"
    # data are read where nothing is absent
    assert absent or re.search(r"\d+ examples, \d+ steps per epoch, \d+ steps", plan)
    shown = said("--inspect", 2, "--parallel.sequence_parallel_size", 1)
    assert (
        len(shown.splitlines()) >= 2 and "tokens" in shown and not (tmp_path / "run").exists()
    )
