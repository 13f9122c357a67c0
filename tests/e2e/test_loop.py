"""What a run leaves behind (its best checkpoint, metrics, Weights & Biases), and what stops it at step 1."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

import numpy as np
import pytest
import torch

from models.folders import read_json
from tests.e2e.launch import metrics, rows
from tests.e2e.test_stage_runs import on_ranks, settings, train
from tests.engine_case import Case, build_trainer
from tests.harness import run_distributed
from ulysses.config.schema import RunSection
from ulysses.disk import digest_of


def with_stand_in(line):
    """Run with a W&B that only remembers; returns this rank's calls of it: what was called, with what."""
    stand_in = mock.MagicMock(__spec__=ModuleSpec("wandb", None))
    sys.modules["wandb"] = stand_in
    train(line)
    assert torch.get_deterministic_debug_mode() == 2
    return [tuple(call) for call in stand_in.mock_calls]


def test_what_a_run_leaves_behind_that_ends_when_evaluations_stop_improving(tmp_path):
    """And a resumed one knows that it has ended."""
    # so large a learning rate that an early evaluation stays the best
    typed = """
    --run.steps 40 --run.eval_every 1 --run.patience 2 --run.save_every 100 --run.keep 1 --run.deterministic true
    --run.wandb project --optimizer.warmup 2 --optimizer.lr 3
    """
    line = settings("sft", tmp_path / "run", typed)
    told, silent = run_distributed(with_stand_in, 2, line, cpu=True)
    lines, checkpoints = metrics(tmp_path / "run"), tmp_path / "run/checkpoints"
    losses, last = [line["eval/loss"] for line in lines], len(lines)
    best = 1 + int(np.argmin(losses))
    assert last == best + 2 < 40, losses
    assert {p.name for p in checkpoints.iterdir()} == {f"step-{best}", f"step-{last}"}
    assert (tmp_path / "run/export/config.json").exists()
    state = read_json(checkpoints / f"step-{last}/run.json")
    assert state["best"] == [best, pytest.approx(losses[best - 1])]
    for rank in (0, 1):  # every slice's own record tells where it came from
        record = read_json(checkpoints / f"step-{last}/rank-0000{rank}.json")
        assert (record["run"], record["step"]) == (state["run"], last)

    (_, _, options), *logs, (end, _, _) = told
    assert (options["project"], options["name"]) == ("project", "run")
    assert options["config"]["stage"] == "sft"
    assert end == "init().finish" and silent == []
    assert {line.pop("run") for line in lines} == {state["run"]}
    assert [{**more, **values} for _, (values,), more in logs] == lines

    again = settings("sft", tmp_path / "run", f"{typed} --run.wandb= --run.resume auto")
    assert len(on_ranks(1, again)) == last


@pytest.mark.parametrize("other", [f"--data.eval {rows('sft_eval', 12)}", "--sft.z_loss 1"])
def test_the_best_evaluation_is_one_of_the_same_data_and_loss(other, tmp_path):
    """A resumed run whose held-out data or loss are others neither ends by the old ones nor keeps their best."""
    typed = (
        "--optimizer.lr 0 --run.eval_every 1 --run.save_every 9 --run.patience 2 --run.steps"
    )
    easier = f"--data.eval {rows('sft_eval', 3)}"
    first = on_ranks(1, settings("sft", tmp_path, f"{typed} 2 {easier}"))
    again = f"{typed} 4 {easier} {other} --run.resume auto --run.export false"
    lines = on_ranks(1, settings("sft", tmp_path, again))
    losses = [line["eval/loss"] for line in lines]
    assert losses[:2] == [line["eval/loss"] for line in first] and losses[2] > losses[1]
    assert len(lines) == 4
    assert read_json(tmp_path / "checkpoints/step-4/run.json")["best"] == [3, losses[2]]


def evaluated(losses):
    """Train with a patience of two evaluations, which give these losses; return the last step and the best."""
    trainer, _ = build_trainer(Case("sft", steps=len(losses)))
    given = iter(losses)
    trainer.eval_loader, trainer.evaluate = trainer.loader, lambda: {"eval/loss": next(given)}
    trainer.save = lambda: None
    trainer.run = RunSection(steps=len(losses), eval_every=1, patience=2)
    trainer.train()
    return trainer.step, trainer.best


def test_an_evaluation_that_is_not_finite_is_never_the_best():
    losses = [math.nan, 1.0, 0.9, math.inf, math.nan, 0.1]
    assert run_distributed(evaluated, 1, losses) == [(5, [3, 0.9])]


def test_a_cache_of_other_values_stops_the_first_step(tmp_path):
    cache = tmp_path / "cache"
    typed = f"--data.cache {cache} --run.steps 1 --run.export false --run.save_last false"
    line = settings("dpo", tmp_path / "run", typed)
    assert on_ranks(1, line)[0]["reference_gap"] < 1e-5
    # only a stop would have saved one
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert not list(cache.rglob("*.lock"))
    caches = list(cache.glob("reference-*.bin"))
    for path in caches:
        np.memmap(path, dtype=np.float32, mode="r+")[:] += 0.01
    sentence = r"data.cache: .*reference-.*.bin .*does not hold what was written there"
    with pytest.raises(AssertionError, match=sentence):
        on_ranks(1, line)
    for path in caches:  # as if a run from other weights had written them
        path.with_suffix(".json").write_text(json.dumps({path.name: digest_of(path)}))
    sentence = r"(?s)at step 0 the policy is the reference, but .* differ by 0.01 per token .*other weights.*\nstep 1"
    with pytest.raises(AssertionError, match=sentence):
        on_ranks(1, line)
    [free] = on_ranks(1, [*line, "--dpo.loss_type", "simpo"])
    assert "reference_gap" not in free, "a loss without reference asks nobody"
