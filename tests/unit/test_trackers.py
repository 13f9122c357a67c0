"""What every tracker is told: packages that are not installed are small modules here, which remember their calls."""

import json
import math
import sys
import tracemalloc
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock
from unittest.mock import MagicMock, call

import pytest

from tests.own_tracker import Remembers
from ulysses.check.setting_checks import check_trackers
from ulysses.config.command_line import check
from ulysses.config.section import ConfigError
from ulysses.disk import DiskError
from ulysses.options import TRACKERS
from ulysses.run.metrics import METRICS, MetricsLog, logged
from ulysses.run.trackers import TrackedRun

SETTINGS = {"run_id": "1a2b", "stage": "sft", "optimizer": {"lr": 1e-3}}
FOLDER = Path("run")
# the calls by which each service starts, takes a step, and ends well or badly, in its own documented names; two of them
# know no run that has failed
TOLD_LITTLE = (
    [call.log({"loss": 2.5}, step=4)],
    [call.finish()],
    [call.log({"failed": 1}), call.finish()],
)
CALLS = {
    "wandb": (
        [call.init(project="lab", config=SETTINGS, name="run", dir=FOLDER, resume="allow")],
        [call.init().log({"loss": 2.5, "reward/a:b": None}, step=4)],
        [call.init().finish(exit_code=0)],
        [call.init().finish(exit_code=1)],
    ),
    "mlflow": (
        [
            call.set_experiment("lab"),
            call.start_run(run_name="run", tags={"run_id": "1a2b"}),
            call.log_dict(SETTINGS, "settings.json"),
        ],
        [call.log_metrics({"loss": 2.5}, step=4)],
        [call.end_run("FINISHED")],
        [call.end_run("FAILED")],
    ),
    "trackio": (
        [call.init(project="lab", name="run", config=SETTINGS, resume="allow")],
        *TOLD_LITTLE,
    ),
    "swanlab": (
        [
            call.init(
                project="lab",
                experiment_name="run",
                config=SETTINGS,
                logdir=f"{FOLDER}/swanlab",
            )
        ],
        *TOLD_LITTLE,
    ),
}


@pytest.fixture
def package(monkeypatch):
    """Put a module that remembers its calls in the place of a package, and return it."""

    def stand_in(name):
        module = MagicMock(__spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
        forget(name)
        return module

    def forget(name):
        """The next import of the tracker finds what then stands for its package."""
        sys.modules.pop(f"ulysses.run.trackers.{name}", None)

    yield stand_in
    for name in TRACKERS:
        forget(name)


@pytest.fixture(autouse=True)
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir()


assert {*CALLS, "tensorboard"} == {*TRACKERS}


def followed(*names, step=0):
    return MetricsLog(TrackedRun(FOLDER, "lab", "1a2b", step, SETTINGS), names, 6)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_service_is_told_of_the_run_its_steps_and_its_end(name, fails, package):
    service, (start, step, well, badly) = package(name), CALLS[name]
    log = followed(name, name)  # run.wandb may name one of run.trackers again
    log.report(4, {"loss": 2.5, "reward/a:b": math.nan}, due=True)
    if fails:
        log.fail()
    log.close()
    assert service.mock_calls == [*start, *step, *(badly if fails else well)]
    [line] = logged(FOLDER / METRICS)
    assert line == {"step": 4, "run": "1a2b", "loss": 2.5, "reward/a:b": None}


def test_a_long_log_is_continued_without_holding_it_as_objects():
    line = {"step": 1, "run": "1a2b", **{f"metric {n}": n / 3 for n in range(20)}}
    (FOLDER / METRICS).write_text(f"{json.dumps(line)}\n" * 2000)
    tracemalloc.start()
    followed(step=1).close()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * (FOLDER / METRICS).stat().st_size
    assert [*logged(FOLDER / METRICS)] == [line] * 2000


def test_tensorboard_and_the_file_hold_steps_and_settings():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 4), (3, 6)):  # the second run continues after step 2
        log = followed("tensorboard", step=first - 1)
        for step in range(first, last + 1):
            log.report(step, {"loss": float(step)}, due=True)
        log.close()
    assert [line["step"] for line in logged(FOLDER / METRICS)] == [*range(1, 7)]
    board = EventAccumulator("run/tensorboard").Reload()
    assert [event.value for event in board.Scalars("loss")] == [*range(1, 7)]
    text = board.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "run_id = 1a2b" in text and "0.001" in text


def test_mlflow_gets_names_that_it_takes(package):
    service, log = package("mlflow"), followed("mlflow")
    log.report(1, {"objective/scores/http://host:80/a": 1.0, "eval/loss": 2.0}, due=True)
    log.close()
    [(names,)] = (args for name, args, _ in service.mock_calls if name == "log_metrics")
    assert {*names} == {"objective/scores/http_/_host_80/a", "eval/loss"}


def test_a_tracker_that_fails_loses_neither_the_run_nor_the_others(capsys):
    Remembers.steps.clear()
    log = followed("tests.own_tracker:Remembers")
    for step in (1, 2, 3):
        log.report(step, {"loss": 1.0}, due=True)
    log.close()
    assert Remembers.steps == [1, 2] and log.failure is None
    assert [line["step"] for line in logged(FOLDER / METRICS)] == [1, 2, 3]
    said = capsys.readouterr()
    [line] = [x for x in (said.out + said.err).splitlines() if "has failed" in x]
    assert "Remembers has failed and gets no more metrics; metrics.jsonl does" in line
    assert "\x1b" not in line and "no answer from" in line
    for secret in ("sk-0123", "abc.def", "0123456789abcdef", "wandb_v1"):
        assert secret not in line


def test_a_tracker_changes_no_settings_and_ends_no_run(capsys):
    Remembers.steps.clear()
    names = "tests.own_tracker:Meddles", "tests.own_tracker:Remembers"
    before = deepcopy(SETTINGS)
    log = followed(*names)
    log.report(1, {"loss": 1.0}, due=True)
    log.close()
    assert SETTINGS == before and Remembers.steps == [1]
    assert [*logged(FOLDER / METRICS)] == [{"step": 1, "run": "1a2b", "loss": 1.0}]
    said = capsys.readouterr()
    assert "Meddles has failed and gets no more metrics" in said.out + said.err
    with (
        mock.patch.object(Remembers, "start", side_effect=SystemExit(0)),
        pytest.raises(ConfigError, match="Remembers does not start .SystemExit"),
    ):
        followed("tests.own_tracker:Remembers")


def test_a_run_goes_on_whose_file_a_crash_has_cut():
    """At its end, or in its middle, where another line follows the beginning of one."""
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 3, 4)]
    torn = lines[0] + lines[1][:15] + lines[2] + "\0\xff\n" + lines[3] + lines[1][:15]
    (FOLDER / METRICS).write_text(torn, "latin-1")  # a byte that is no text
    log = followed(step=4)
    log.report(5, {"loss": 1.0}, due=True)
    log.close()
    text = (FOLDER / METRICS).read_text()
    assert text.startswith(lines[0] + lines[3]) and text.count("\n") == 3
    assert [line["step"] for line in logged(FOLDER / METRICS)] == [1, 4, 5]


@pytest.mark.parametrize("name", ["tensorbord", "my_trackre:Mine"])
def test_nobody_is_told_to_install_a_package_by_a_mistaken_name(name):
    """Which may be anybody's package; that of a known tracker is another matter."""
    values = {"stage": "sft", "model": {"path": "m"}, "run": {"steps": 1, "trackers": [name]}}
    for strict in (False, True):
        [sentence] = check_trackers(check(values), strict)
        assert f"run.trackers has {name!r}, which cannot be imported" in sentence
        assert "pip install" not in sentence and "name tensorboard, wandb, " in sentence


def test_a_file_that_cannot_be_written_is_told_once_the_run_has_saved():
    log = followed()
    (FOLDER / METRICS).unlink()
    for step in (1, 2):
        log.report(step, {"loss": 1.0}, due=True)
        assert "was moved or deleted while the run wrote there" in str(log.failure)
    with pytest.raises(DiskError, match="was moved or deleted while the run wrote there"):
        log.close()


def test_a_tracker_that_does_not_start_refuses_the_run(package):
    """Which has then dropped no line: the steps of a checkpoint that it does not continue stay.

    A tracker that had started is told that the run has failed.
    """
    lines = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 3))
    (FOLDER / METRICS).write_text(lines)
    package("wandb").init.side_effect = RuntimeError("no key")
    other = package("mlflow")
    with pytest.raises(ConfigError, match=r"run.trackers: wandb does not start .*no key"):
        followed("mlflow", "wandb", step=1)
    assert other.mock_calls[-1] == call.end_run("FAILED")
    assert (FOLDER / METRICS).read_text() == lines
