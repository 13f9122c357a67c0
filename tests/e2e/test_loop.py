"""What a run leaves behind (best checkpoint, TensorBoard, Weights & Biases), and what stops it at step 1."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.e2e.launch import metrics
from tests.e2e.test_stage_runs import demo, on_ranks, settings, train  # noqa: F401 (a fixture)
from tests.engine_case import Case, build_trainer
from tests.harness import run_distributed
from ulysses.config.schema import RunSection
from ulysses.disk import digest_of


def with_stand_in(config: dict[str, Any]) -> list[Any]:
    """Run with a W&B that only remembers; returns this rank's calls of it: what was called, with what."""
    stand_in = mock.MagicMock(__spec__=ModuleSpec("wandb", None))
    sys.modules["wandb"] = stand_in
    train(config)
    assert torch.get_deterministic_debug_mode() == 2
    return [tuple(call) for call in stand_in.mock_calls]


def test_what_a_run_leaves_behind(demo, tmp_path):  # noqa: F811
    config = settings(
        demo, "sft", tmp_path / "run", run__steps=4, run__eval_every=1, run__save_every=100, run__keep=1,
        run__wandb="project", run__deterministic=True, optimizer__warmup=2,
        optimizer__lr=3.0,  # so large that the first evaluation stays the best
    )  # fmt: skip
    told, silent = run_distributed(with_stand_in, 2, config, cpu=True)
    lines = metrics(tmp_path / "run")
    losses = [line["eval/loss"] for line in lines]
    best = 1 + int(np.argmin(losses))
    assert best < 4, losses
    assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {
        f"step-{best}",
        "step-4",
    }
    state = json.loads((tmp_path / "run/checkpoints/step-4/run.json").read_text())
    assert state["best"] == [best, pytest.approx(losses[best - 1])]
    for rank in (0, 1):  # every slice's own record tells where it came from
        saved = tmp_path / f"run/checkpoints/step-4/rank-0000{rank}.json"
        record = json.loads(saved.read_text())
        files = {
            path.name: digest_of(path)
            for path in saved.parent.glob(f"{saved.stem}.*.safetensors")
        }
        assert (record["run"], record["step"], record["digests"]) == (
            state["run"],
            4,
            files,
        ) and len(files) == 3

    (_, _, options), *logs, (last, _, _) = told
    assert (options["project"], options["name"], options["config"]["stage"]) == (
        "project",
        "run",
        "sft",
    )
    assert last == "init().finish" and silent == []
    assert {line.pop("run") for line in lines} == {state["run"]}
    assert [{**more, **values} for _, (values,), more in logs] == lines

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    for name in ("loss", "eval/loss", "grad_norm", "lr"):
        events = board.Scalars(name)
        assert [e.step for e in events] == [1, 2, 3, 4]
        assert [e.value for e in events] == pytest.approx(
            [line[name] for line in lines], rel=1e-6
        )


def test_a_run_ends_when_evaluations_stop_improving(demo, tmp_path):  # noqa: F811
    """And a resumed one knows that it has ended; the best checkpoint and the export are there."""
    config = settings(
        demo, "sft", tmp_path / "run", run__steps=40, run__eval_every=1, run__save_every=0, run__patience=2,
        optimizer__warmup=2, optimizer__lr=3.0,
    )  # fmt: skip
    lines = on_ranks(2, config)
    losses = [line["eval/loss"] for line in lines]
    best = 1 + int(np.argmin(losses))
    assert len(lines) == best + 2 < 40
    kept = {int(p.name.removeprefix("step-")) for p in (tmp_path / "run/checkpoints").iterdir()}
    assert {best, best + 2} <= kept
    assert (tmp_path / "run/export/config.json").exists()
    config["run"]["resume"] = "auto"
    assert on_ranks(1, config) == lines


def evaluated(losses: list[float]) -> tuple[int, list[float]]:
    """Train with a patience of two evaluations, which give these losses; return the last step and the best."""
    trainer, _ = build_trainer(Case("sft", steps=len(losses)))
    given = iter(losses)
    trainer.evaluate = lambda: {"eval/loss": next(given)}
    trainer.save = lambda: None
    trainer.run = RunSection(steps=len(losses), eval_every=1, patience=2)
    trainer.train()
    return trainer.step, trainer.best


def test_an_evaluation_that_is_not_finite_is_never_the_best():
    losses = [math.nan, 1.0, 0.9, math.inf, math.nan, 0.1]
    assert run_distributed(evaluated, 1, losses) == [(5, [3, 0.9])]


def test_a_cache_of_other_values_stops_the_first_step(demo, tmp_path):  # noqa: F811
    cache = {
        "data__cache": str(tmp_path / "cache"),
        "run__steps": 1,
        "run__overwrite": True,
        "run__export": False,
    }
    config = settings(demo, "dpo", tmp_path / "run", **cache, run__save_last=False)
    assert on_ranks(1, config)[0]["reference_gap"] < 1e-5
    assert not list(
        (tmp_path / "run").glob("checkpoints/*")
    )  # only a stop would have saved one
    caches = list((tmp_path / "cache").glob("reference-*.bin"))
    for path in caches:
        np.memmap(path, dtype=np.float32, mode="r+")[:] += 0.01
    with pytest.raises(
        AssertionError,
        match=r"data.cache: .*reference-.*.bin .*does not hold what was written there",
    ):
        on_ranks(1, config)
    for path in caches:  # as if a run from other weights had written them
        path.with_suffix(".json").write_text(json.dumps({path.name: digest_of(path)}))
    sentence = r"(?s)at step 0 the policy is the reference, but .* differ by 0.01 per token .*other weights.*\nstep 1"
    with pytest.raises(AssertionError, match=sentence):
        on_ranks(1, config)
    free = settings(demo, "dpo", tmp_path / "run", **cache, dpo__loss_type="simpo")
    assert "reference_gap" not in on_ranks(1, free)[0], "a loss without reference asks nobody"
