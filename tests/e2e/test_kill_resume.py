"""Killed at any moment, also while saving, a run continues to the same bytes as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from models.arch import ModelConfig
from models.folders import read_json
from models.kinds import empty_model
from tests.e2e.launch import Ranks, metrics, ranks, rows, tiny, without_times
from ulysses.zero.state import KINDS, SavedSlices

STEPS, PROCESSES = 8, 2


def arguments(output, typed=""):
    usual = f"""
    --run.steps {STEPS} --run.save_every 1 --run.keep 2 --run.resume auto --run.eval_every 3 --batch.examples 16
    --data.eval {rows("sft_eval", 40)} --optimizer.lr 1e-2 --parallel.sequence_parallel_size 2
    """
    return tiny("sft", output, f"{usual} {typed}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A whole run, and how long it took."""
    output, began = tmp_path_factory.mktemp("whole") / "run", time.monotonic()
    ranks(arguments(output), PROCESSES)
    return output, time.monotonic() - began


def kill_at(place, step):
    """Plant a kill of rank 0 inside the saving of checkpoint `step` or the export, or let every save take longer."""

    def before(rank):
        import ulysses.zero.state as state

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        written, renamed = state.write_digested, os.rename

        def slow(path, parts):
            time.sleep(0.03)  # so that moments at random often lie inside a save
            digest = written(path, parts)
            if place == "files" and rank == 0 and f".step-{step}.tmp" in str(path):
                die()
            return digest

        def rename(source, target):
            final, old = f"checkpoints/step-{step}", f"checkpoints/.step-{step - 2}.old.tmp"
            ends = {"rotation": old, "export": "run/export"}.get(place, final)
            mine = rank == 0 and place not in ("", "files") and str(target).endswith(ends)
            if mine and place in ("before rename", "export"):
                die()
            renamed(source, target)
            if mine:
                die()

        state.write_digested = slow
        os.rename = rename

    return before


def assert_complete(checkpoints):
    """Whatever looks like a checkpoint holds every element of every parameter."""
    for folder in checkpoints.glob("step-*"):
        state = read_json(folder / "run.json")
        assert state["step"] == int(folder.name.removeprefix("step-"))
        saved, model = SavedSlices(folder), empty_model(ModelConfig.from_hf(state["shape"]))
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        assert {name: saved.numel(name) for name in saved.places} == sizes
        assert len(list(folder.glob("rank-*.safetensors"))) == PROCESSES * len(KINDS)


def dies(output, line, place, step, *seconds):
    """Start a run and kill it there, or after some seconds, if it has not ended; its checkpoints are complete."""
    run = Ranks(line, PROCESSES, before=kill_at(place, step))
    assert not (wait_until_dead(run, *seconds) and place), f"nothing died at {place!r}"
    assert_complete(output / "checkpoints")


def wait_until_dead(run, *seconds):
    """Wait for the end, and return whether it came by itself; one dead process ends the others, as under a launcher."""
    run.until(lambda: -signal.SIGKILL in run.codes, *seconds)
    failed = {*run.codes} - {0, None, -signal.SIGKILL}
    finished = not any(run.codes) and None not in run.codes
    run.send(signal.SIGKILL)
    said = run.wait().stderr[-3000:]
    assert not failed, f"exit code {min(failed)}: {said}"
    return finished


def assert_same_run(found, whole):
    """All metrics of every step, the last checkpoint and the export, to the last bit."""
    assert without_times(metrics(found)) == without_times(metrics(whole))
    for part in (f"checkpoints/step-{STEPS}", "export"):
        names = {path.name for path in (whole / part).iterdir()} - {"run.json"}
        assert names == {path.name for path in (found / part).iterdir()} - {"run.json"}
        for name in names:
            ours, theirs = ((run / part / name).read_bytes() for run in (found, whole))
            if name.startswith("rank-") and name.endswith(".json"):  # all but the run's id
                ours, theirs = ({**json.loads(text), "run": ""} for text in (ours, theirs))
            assert ours == theirs, (part, name)


def test_killed_runs_continue_bit_identically(tmp_path, uninterrupted):
    whole, duration = uninterrupted
    output = tmp_path / "run"
    line = arguments(output)
    # places of death inside a save, in the order of the steps, then a moment at random; then to the end
    for step, place in enumerate(("files", "before rename", "after rename", "rotation"), 1):
        dies(output, line, place, step)
    dies(output, line, "", 0, random.Random(1).uniform(0.4, 1.0) * duration)
    shutil.rmtree(output / "export", ignore_errors=True)  # that moment may come after it
    dies(output, line, "export", STEPS)
    ranks(line, PROCESSES)
    assert_same_run(output, whole)
    assert not list((output / "checkpoints").glob(".*")), "what killed saves left is removed"


def test_sigterm_to_one_process_saves_and_ends_all(tmp_path, uninterrupted):
    """It comes just after a step's metrics were reduced: nobody may stop a step before the others."""

    def before(rank):
        from ulysses.stages.base import MetricSums

        reduce, steps = MetricSums.reduce, iter(range(1, STEPS))

        def reduced(self):
            values = reduce(self)
            if next(steps, 0) == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

        MetricSums.reduce = reduced

    whole, _ = uninterrupted
    output = tmp_path / "run"
    # saves only because it is told to stop
    line = arguments(output, "--run.save_every 0")
    outcome = ranks(line, PROCESSES, before=before)
    assert "continues with --run.resume auto" in outcome.stdout + outcome.stderr
    assert [p.name for p in output.glob("checkpoints/*")] == ["step-3"]
    assert not (output / "export").exists()
    ranks(line, PROCESSES)
    assert_same_run(output, whole)


def test_going_back_deletes_what_came_after(tmp_path, uninterrupted):
    """A later checkpoint is refused, so that "auto" cannot continue what was left; its owner deletes it."""
    whole, _ = uninterrupted
    shutil.copytree(whole, tmp_path / "run")
    older = tmp_path / f"run/checkpoints/step-{STEPS - 1}"

    def before(rank):
        from ulysses.run.trainer import Trainer

        Trainer.train_step = lambda self: os.kill(os.getpid(), signal.SIGKILL)

    back = arguments(tmp_path / "run", f"--run.resume {older}")
    ranks(back, PROCESSES, code=2).refused(f"delete step-{STEPS}, or set another run.output")
    shutil.rmtree(older.parent / f"step-{STEPS}")
    shutil.rmtree(tmp_path / "run/export")
    wait_until_dead(Ranks(back, PROCESSES, before=before))
    assert older.exists()
    output = ranks(arguments(tmp_path / "run"), PROCESSES)
    assert f"resumed {older} at step {STEPS - 1}" in output.stdout + output.stderr
    assert_same_run(tmp_path / "run", whole)
