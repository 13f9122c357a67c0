"""Killed at any moment, also while saving, a run continues to the same bytes as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, Ranks, metrics, ranks, tiny
from ulysses.zero.state import KINDS, SavedSlices

STEPS, PROCESSES = 8, 2


def arguments(output: Path, cache: Path, **settings: object) -> list[str]:
    held_out = json.dumps([str(cache.parent / "held_out.jsonl")])
    options = {
        "run__steps": STEPS, "run__save_every": 1, "run__keep": 2, "run__resume": "auto", "run__eval_every": 3,
        "data.eval": held_out, "batch__examples": 16, "optimizer__lr": 1e-2, "parallel__sequence_parallel_size": 2,
    }  # fmt: skip
    return tiny("sft", output, cache, **(options | settings))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A whole run, the cache of its data, and how long it took."""
    folder = tmp_path_factory.mktemp("whole")
    rows = (ROOT / "configs/demo/data/sft_eval.jsonl").read_text().splitlines()[:40]
    (folder / "held_out.jsonl").write_text("\n".join(rows))
    began = time.monotonic()
    ranks(arguments(folder / "run", folder / "cache"), PROCESSES, folder / "logs").check()
    return folder / "run", folder / "cache", time.monotonic() - began


def kill_at(place: str, step: int):
    """Plant a kill of rank 0 inside the saving of checkpoint `step` or the export, or let every save take longer."""

    def before(rank: int) -> None:
        import ulysses.run.checkpoint as checkpoint
        import ulysses.zero.state as state

        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        written, renamed = state.write_digested, os.rename

        def slow(path: Path, parts: object) -> str:
            time.sleep(0.03)  # so that moments at random often lie inside a save
            digest = written(path, parts)
            if place == "files" and rank == 0 and f".step-{step}.tmp" in str(path):
                die()
            return digest

        def rename(source: object, target: object) -> None:
            final, old = f"checkpoints/step-{step}", f"checkpoints/.step-{step - 2}.old.tmp"
            ends = {
                "before rename": final,
                "after rename": final,
                "rotation": old,
                "export": "run/export",
            }.get(place)
            mine = rank == 0 and ends is not None and str(target).endswith(ends)
            if mine and place in ("before rename", "export"):
                die()
            renamed(source, target)
            if mine:
                die()

        state.write_digested = slow
        checkpoint.os.rename = rename

    return before


def assert_complete(checkpoints: Path, expected: dict[str, int]) -> None:
    """Whatever looks like a checkpoint holds every element of every parameter."""
    for folder in checkpoints.glob("step-*"):
        state = json.loads((folder / "run.json").read_text())
        assert state["step"] == int(folder.name.removeprefix("step-"))
        saved = SavedSlices(folder)
        assert {name: saved.numel(name) for name in saved.places} == expected
        assert len(list(folder.glob("rank-*.safetensors"))) == PROCESSES * len(KINDS)


def wait_until_dead(run: Ranks, seconds: float) -> bool:
    """Wait for the end, and return whether it came by itself; one dead process ends the others, as under a launcher."""
    run.until(lambda: -signal.SIGKILL in run.codes, seconds)
    assert {*run.codes} <= {0, None, -signal.SIGKILL}, "it failed by itself"
    finished = not any(run.codes) and None not in run.codes
    run.send(signal.SIGKILL)
    run.wait()
    return finished


def assert_same_run(found: Path, whole: Path) -> None:
    """Loss, gradient norm and evaluation of every step, the last checkpoint and the export, to the last bit."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "eval/loss")
    table = [[line.get(n) for n in names] for line in metrics(found)]
    assert table == [[line.get(n) for n in names] for line in metrics(whole)]
    for part in (f"checkpoints/step-{STEPS}", "export"):
        files, same = (
            sorted(p.name for p in (run / part).iterdir() if p.name != "run.json")
            for run in (whole, found)
        )
        assert same == files
        for name in files:
            contents = [(run / part / name).read_bytes() for run in (whole, found)]
            if name.startswith("rank-") and name.endswith(".json"):  # all but the run's id
                contents = [{**json.loads(content), "run": ""} for content in contents]
            assert contents[0] == contents[1], (part, name)


def test_killed_runs_continue_bit_identically(tmp_path, uninterrupted):
    whole, cache, duration = uninterrupted
    saved = SavedSlices(whole / f"checkpoints/step-{STEPS}")
    expected = {name: saved.numel(name) for name in saved.places}
    draw, output, logs = random.Random(1), tmp_path / "run", tmp_path / "logs"
    # places of death inside a save, in the order of the steps, then a moment at random; then to the end
    places = ("files", "before rename", "after rename", "rotation")
    plan = [(place, 1 + i, 60.0) for i, place in enumerate(places)]
    plan.append(("", 0, draw.uniform(0.4, 1.0) * duration))
    # while an export takes the place of an earlier one
    plan.append(("export", STEPS, 60.0))
    (output / "export/earlier").mkdir(parents=True)
    kills = 0
    for place, step, seconds in plan:
        run = Ranks(arguments(output, cache), PROCESSES, logs, before=kill_at(place, step))
        finished = wait_until_dead(run, seconds)
        kills += not finished
        assert not (finished and place), f"nothing died at {place!r}"
        assert_complete(output / "checkpoints", expected)
    ranks(arguments(output, cache), PROCESSES, logs).check()
    assert_same_run(output, whole)
    assert not list((output / "checkpoints").glob(".*")), "what killed saves left is removed"
    assert kills >= 5


def test_sigterm_to_one_process_saves_and_ends_all(tmp_path, uninterrupted):
    """It comes just after a step's metrics were reduced: nobody may stop a step before the others."""

    def before(rank: int) -> None:
        from ulysses.stages.base import MetricSums

        reduce, count = MetricSums.reduce, [0]

        def reduced(self: object) -> object:
            values = reduce(self)
            count[0] += 1
            if rank == 1 and count[0] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

        MetricSums.reduce = reduced

    whole, cache, _ = uninterrupted
    output, logs = tmp_path / "run", tmp_path / "logs"
    line = arguments(output, cache, run__save_every=0)  # saves only because it is told to stop
    outcome = ranks(line, PROCESSES, logs, before=before, timeout=60).check()
    assert "continues with --run.resume auto" in outcome.stdout + outcome.stderr
    assert [p.name for p in (output / "checkpoints").iterdir()] == ["step-3"] and not (
        output / "export"
    ).exists()
    ranks(line, PROCESSES, logs).check()
    assert_same_run(output, whole)


def test_going_back_deletes_what_came_after(tmp_path, uninterrupted):
    """A later checkpoint is gone before the first step, so that "auto" cannot continue what was left."""
    whole, cache, _ = uninterrupted
    shutil.copytree(whole, tmp_path / "run")
    older = tmp_path / f"run/checkpoints/step-{STEPS - 1}"

    def before(rank: int) -> None:
        from ulysses.run.trainer import Trainer

        Trainer.train_step = lambda self: os.kill(os.getpid(), signal.SIGKILL)

    back = arguments(tmp_path / "run", cache, run__resume=older, run__overwrite=True)
    wait_until_dead(Ranks(back, PROCESSES, tmp_path / "logs", before=before), 60)
    assert older.exists() and not (older.parent / f"step-{STEPS}").exists()
    output = ranks(arguments(tmp_path / "run", cache), PROCESSES, tmp_path / "logs").check()
    assert f"resumed {older} at step {STEPS - 1}" in output.stdout + output.stderr
    assert_same_run(tmp_path / "run", whole)
