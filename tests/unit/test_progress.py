"""What a run shows of its progress: numbers beside their own step, plain lines in a file, and no silent start."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests import ROOT, rows_of
from tests.harness import PATIENCE
from ulysses.progress import progress
from ulysses.run.metrics import MetricsLog
from ulysses.run.trackers import TrackedRun


@pytest.fixture
def screen(monkeypatch):
    """Put a terminal, or a file, in the place of standard error."""

    def shown(terminal):
        monkeypatch.setattr(sys, "stderr", found := io.StringIO())
        monkeypatch.setattr(found, "isatty", lambda: terminal)
        return found

    return shown


@pytest.fixture
def shown(tmp_path, screen):
    """What six steps show, each with a loss of its own number."""

    def steps(terminal, log_every=1, **more):
        written = screen(terminal)
        log = MetricsLog(TrackedRun(tmp_path, "project", "run", 0, {}), [], 6)
        for step in range(1, 7):
            values = {"loss": float(step), "lr": 1e-3, "tokens_per_second": 9.0, **more}
            log.report(step, values, due=step % log_every == 0)
            time.sleep(0.12)  # tqdm draws ten times a second
        log.close()
        return written.getvalue()

    return steps


def test_numbers_stand_beside_their_step(shown):
    text = shown(True, **{"objective/scores": 0.25})
    found = re.findall(r"(\d)/6 [^\r]*?loss=(\d)", text)
    assert {step for step, _ in found} == {*"123456"}
    assert all(step == loss for step, loss in found)
    assert "objective/scores=0.250" in text


def test_a_file_holds_a_line_for_every_logged_step(shown):
    text = shown(False, log_every=2)
    assert "\r" not in text and len(text.splitlines()) == 3
    assert re.findall(r"(?m)^(\d)/6 steps, .*, loss=(\d)", text) == [*zip("246", "246")]


@pytest.mark.parametrize("total", [8, None])
def test_other_bars_write_lines_now_and_then(screen, total):
    written = screen(False)
    for _ in progress(iter(range(8)), total=total, seconds=0.2, desc="reading", unit="rows"):
        time.sleep(0.05)
    lines = written.getvalue().split("\n")[:-1]
    assert 0 < len(lines) < 4
    shown = rf"reading: \d/{total or '[?]'} rows, 00:00<{'00:0' if total else '[?]$'}"
    assert all(re.match(shown, line) for line in lines)


def test_a_bar_inside_another_one_moves_no_cursor_in_a_file(shown, screen):
    written = screen(False)
    with progress(total=6, seconds=0.0) as outer, progress(desc="inner", seconds=0.0) as inner:
        for _ in range(4):
            inner.update(1)
            outer.write("a line")
            time.sleep(0.02)
    assert "inner: 2/?" in written.getvalue() and "\x1b" not in written.getvalue()


COMMANDS = """
ulysses.train --config configs/demo/sft.toml
ulysses.cli export a b
ulysses.cli report a
"""


def test_a_command_speaks_at_once_and_ends_in_one_line(tmp_path):
    """Also while a library is imported that takes the interrupt for an error of its own."""
    swallowing = (
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n"
    )
    for name in ("torch", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(swallowing)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *line.split()],
            text=True,
            stdout=-1,
            stderr=-2,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            # a background job of a shell ignores it
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        for [line] in rows_of(COMMANDS)
    ]
    for process in started:
        assert process.stdout.readline() == "loading the libraries ...\n"
    time.sleep(2)
    for process in started:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=PATIENCE)[0]
        assert (rest.strip(), process.returncode) == ("interrupted", 130)
