"""What a run shows of its progress: numbers beside their own step, plain lines in a file, and no silent start."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.harness import PATIENCE
from ulysses.progress import progress
from ulysses.run.metrics import MetricsLog

ROOT = Path(__file__).resolve().parents[2]


class Screen:
    """A terminal, or a file, in place of standard error."""

    encoding = "utf-8"

    def __init__(self, terminal: bool) -> None:
        self.text, self.isatty = "", lambda: terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What six steps show, each with a loss of its own number."""

    def steps(terminal: bool, log_every: int = 1, **more: float) -> str:
        monkeypatch.setattr(sys, "stderr", screen := Screen(terminal))
        log = MetricsLog(tmp_path, 6, 0, "run", None)
        for step in range(1, 7):
            values = {"loss": float(step), "lr": 1e-3, "tokens_per_second": 9.0, **more}
            log.report(step, values, due=step % log_every == 0)
            time.sleep(0.12)  # tqdm draws ten times a second
        log.close()
        return screen.text

    return steps


def test_numbers_stand_beside_their_step(shown):
    found = re.findall(r"(\d)/6 [^\r]*?loss=(\d)", shown(True))
    assert {step for step, _ in found} == {*"123456"}
    assert all(step == loss for step, loss in found)


def test_a_file_holds_a_line_for_every_logged_step(shown):
    text = shown(False, log_every=2)
    assert "\r" not in text
    assert re.findall(r"(?m)^(\d)/6 steps, .*, loss=(\d)", text) == [*zip("246", "246")]
    assert len(text.splitlines()) == 3


def test_the_bar_shows_the_scores_of_grpo(shown):
    assert "objective/scores=0.250" in shown(True, **{"objective/scores": 0.25})


def test_other_bars_write_lines_now_and_then(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen(False))
    for _ in progress(range(8), seconds=0.2, desc="tokenising: ", unit="rows", leave=False):
        time.sleep(0.05)
    lines = screen.text.splitlines()
    assert 0 < len(lines) < 4 and "\r" not in screen.text
    assert all(re.match(r"tokenising: \d/8 rows, 00:00<", line) for line in lines)


@pytest.fixture
def started(tmp_path):
    """Start a command whose torch takes a minute to import."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    path = f"{tmp_path}:{ROOT}"
    start = partial(subprocess.Popen, text=True, stdout=-1, stderr=-2)
    return lambda *line: start([sys.executable, *line], env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize(
    "line",
    ["-m ulysses.train --config configs/demo/sft.toml", "-m ulysses.cli export a b"],
)
def test_a_command_speaks_at_once_and_ends_in_one_line(line, started):
    process = started(*line.split())
    assert process.stdout.readline() == "loading the libraries ...\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=PATIENCE)[0]
    assert (rest.strip(), process.returncode) == ("interrupted", 130)
