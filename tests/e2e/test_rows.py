"""Trajectories from outside: rows of files and of a program train as the rollout that they were saved from."""

import math
import signal
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from pandas import DataFrame

from losses.ppo import group_advantages
from tests.e2e.launch import metrics, ranks, tiny, without_times
from tests.e2e.test_stage_runs import configured
from tests.harness import run_distributed
from tests.sampling_server import SamplingServer, load
from tests.tiny_tokenizer import write_rows
from ulysses.config.section import UserCodeError
from ulysses.disk import DiskError
from ulysses.plan.planner import planned_step
from ulysses.rl.ppo import PpoStage
from ulysses.run.training_run import TrainingRun

USUAL = """
--ppo.advantage group --ppo.answers_per_prompt 3 --ppo.epochs 2 --ppo.minibatches 1 --ppo.max_new_tokens 9
--ppo.importance_cap 2 --batch.examples 4 --optimizer.lr 1e-2 --run.steps 2 --run.seed 1 --run.export false
"""
PLACE = TemporaryDirectory(prefix="rows-", ignore_cleanup_errors=True)


def line(place, typed):
    return tiny("grpo", place, f"{USUAL} {typed}")


def from_rows(place, typed="", file="rows.jsonl"):
    """A run on the rows in a file or, if it is not there, on the saved ones in another order."""
    path, rows = place / file, saved()
    if not path.exists():
        write_rows(path, rows[1::2] + rows[::2])
    return line(
        place / "run", f"--data.train {path} --ppo.sampler rows --ppo.reward {{}} {typed}"
    )


def row_of(trajectory):
    prompt = trajectory.prompt
    return {
        "group": trajectory.group,
        "token_ids": prompt + trajectory.tokens,
        "mask": [0] * len(prompt) + [*map(int, trajectory.sampled)],
        "logprobs": [0] * len(prompt) + trajectory.logps,
        "reward": trajectory.score,
    }


def train(words, act=TrainingRun.train, *more):
    """Enter a run on this rank and return what `act` finds with it, and the rows of its last rollout."""
    run, found = TrainingRun(configured(words)), []
    run.__enter__()
    run.trainer.stage.show_rollouts(lambda rollout: found.append(rollout.trajectories))
    acted = act(run, *more)
    run.resources.close()
    return acted, [*map(row_of, found[-1])] if found else []


@cache
def saved():
    """The rows of a rollout of three answers to each of four prompts, after both passes over it were trained."""
    words = line(Path(PLACE.name) / "sampled", "--ppo.reward tests.reward_functions:letters")
    return run_distributed(train, 1, words, cpu=True)[0][1]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        lacking = theirs.keys() - ours.keys()
        assert all(name.startswith("objective/scores/") for name in lacking)
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def with_advantages(rows, as_list):
    """Rows with what their rewards come to among those of the group, and no rewards."""
    scores, groups = (torch.tensor([row[key] for row in rows]) for key in ("reward", "group"))
    for row, x in zip(rows, group_advantages(scores.double(), groups).tolist()):
        given = [x] * len(row["mask"]) if as_list else x
        yield {**row, "reward": None, "advantages": given}


@pytest.mark.parametrize("form", ["reward", "advantage", "advantages"])
def test_rows_train_as_the_rollout_that_they_were_saved_from(tmp_path, form):
    """On other ranks; every number of both passes over the rollout is the same."""
    file = "rows.jsonl" if form == "reward" else "rows.parquet"
    if form != "reward":
        given = with_advantages(saved(), form == "advantages")
        DataFrame(given).to_parquet(tmp_path / file)
    ranks(from_rows(tmp_path, "--parallel.sequence_parallel_size 2", file), 2)
    found, sampled = (
        without_times(metrics(place))
        for place in (tmp_path / "run", Path(PLACE.name) / "sampled")
    )
    if form != "reward":  # whose metrics are of no scores
        assert (
            "advantages/zero_groups" in sampled[0] and "advantages/zero_groups" not in found[0]
        )
        assert not any(name.startswith("objective/scores") for name in found[0])
        kept = "loss grad_norm policy/clipfrac_avg sampler/logp_gap tokens".split()
        found, sampled = ([{k: x[k] for k in kept} for x in each] for each in (found, sampled))
    assert found[1]["grad_norm"] > 0.01
    assert_same(found, sampled)


def test_a_run_resumes_in_the_middle_of_an_epoch_of_rows(tmp_path):
    """Two groups a rollout, of which an epoch has two; the run ends in the second rollout, and goes on to the third."""
    typed = "--batch.examples 2 --run.steps"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for place, steps in ((whole, "6"), (parts, "3"), (parts, "6 --run.resume auto")):
        place.mkdir(exist_ok=True)
        ranks(from_rows(place, f"{typed} {steps}"), 1)
    first, again = (without_times(metrics(place / "run")) for place in (whole, parts))
    assert [m["rollout"] for m in first] == [0, 0, 1, 1, 2, 2]
    assert_same(again, first)


def own_loop(run, rows):
    drawn = [run.sample([[5, 6, 7], [9], [5, 6, 7]]) for _ in range(2)]
    with pytest.raises(ValueError, match="trajectory 1 has neither reward nor advantages"):
        run.learn([rows[0], {**rows[1], "reward": None}])
    found = run.learn(rows)
    with pytest.raises(ValueError, match="4 groups for 1 minibatches, and run.steps leaves 0"):
        run.learn(rows)
    before = signal.getsignal(signal.SIGTERM)
    run.train()  # of which nothing is left, but the engine's own loop hears signals
    assert signal.getsignal(signal.SIGTERM) != before
    return drawn, found


@pytest.mark.parametrize("world", [1, 2])
def test_a_program_samples_and_learns(tmp_path, world):
    """And the run folder has what it has after any other run."""
    # this engine's own log-probabilities are those among all tokens
    typed = f"--parallel.sequence_parallel_size {world} --run.save_every 1 --ppo.top_p 0.9"
    found = run_distributed(
        train, world, from_rows(tmp_path, typed), own_loop, saved(), cpu=True
    )
    logged, wanted = metrics(tmp_path / "run"), metrics(Path(PLACE.name) / "sampled")[-1]
    assert [line["step"] for line in logged] == [1, 2] and logged[1]["loss"] == found[0][0][1][
        "loss"
    ]
    checkpoints = (tmp_path / "run/checkpoints").iterdir()
    assert {path.name for path in checkpoints} == {"step-1", "step-2"}
    for (drawn, learnt), _ in found:
        assert drawn == found[0][0][0] and drawn[0] != drawn[1]
        assert len(drawn[0]) == 3 and drawn[0][0] != drawn[0][2]
        for name in ("loss", "grad_norm", "objective/scores", "sampler/logp_gap"):
            assert learnt[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def heard(words, rows):
    """What a run says while a program learns twice from its own rows, and what more when it trains on the data's."""
    run, lines = TrainingRun(configured(words)), []
    run.say = lines.append
    run.__enter__()
    for _ in range(2):
        run.learn([{**row, "advantage": 1.0} for row in rows])
    count = len(lines)
    run.train()
    run.resources.close()
    return lines[:count], lines[count:]


def test_remarks_about_the_data_are_not_about_a_programs_own_rows(tmp_path):
    typed = "--batch.examples 9 --run.steps 6 --optimizer.lr 0"
    [(first, then)] = run_distributed(heard, 1, from_rows(tmp_path, typed), saved(), cpu=True)
    assert any(line.startswith("optimizer.lr is 0") for line in first)
    assert first.count("the column 'advantage' was not read") == 1
    remarks = [[line for line in lines if "batch.examples" in line] for lines in (first, then)]
    assert remarks == [
        [],
        [
            "a step takes 9 examples (batch.examples) but the data has only 4: every step trains on all of them"
        ],
    ]


def what_is_refused(run, rows):
    """What is refused leaves the rollout as it is; then sampling takes the steps that are left of it."""
    trainer, maker = run.trainer, run.trainer.stage.maker
    data = trainer.loader.dataset.rows
    planned = planned_step(trainer.stage, trainer.engine.module.config, data, [*range(4)])
    trained = trainer.train_step()["tokens"]
    whole, rollout = sum(planned.tokens), maker.rollout
    most = maker.parts.tokens_per_microbatch + 1
    longer = {key: (rows[0][key] * most)[:most] for key in ("token_ids", "mask", "logprobs")}
    longer["mask"][-1] = 1
    for act, given, sentence in (
        (run.sample, [[5], []], "prompt 1 should have tokens"),
        (run.sample, [[5, 1 << 20]], "prompt 0 should have tokens, and they are from 0 to"),
        (run.sample, [[5], [5.5]], "prompt 1 should have tokens"),
        (run.sample, [5], "prompt 0 should have tokens"),
        (run.sample, [[5] * 8192], "may have 8201 tokens, but 8192 are planned for"),
        (run.learn, [rows[0]], "but every group has one row"),
        (run.learn, rows[:3], "1 groups for 2 minibatches, and run.steps leaves 4 steps"),
        (run.learn, [rows[0] | longer, *rows], f"has {most} tokens but batch.tokens_per_micro"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act(given)
    assert maker.rollout is rollout and trainer.step == 1
    run.sample([[5]])
    assert maker.rollout is rollout and trainer.step == 4
    trainer.best, trainer.run = (
        [2, 1.5],
        trainer.run.model_copy(update={"patience": 2, "eval_every": 1}),
    )
    with pytest.raises(
        ValueError, match="ended at step 4, because eval/loss .* step 2 in 2 ev"
    ):
        run.learn(rows)
    # a step that is not finite is said to have trained its part of the rollout
    stage, trainer.best = trainer.stage, None
    stage.losses = lambda *batch: [
        term._replace(value=term.value * math.nan) for term in PpoStage.losses(stage, *batch)
    ]
    with pytest.raises(
        FloatingPointError, match=r"; examples \[\d+(, \d+)*\] ... of rollout 1"
    ):
        run.learn(rows)
    return whole, trained


def test_a_program_is_refused_before_any_work_and_rows_are_planned_as_they_are(tmp_path):
    typed = "--ppo.minibatches 2 --run.steps 8 --data.max_length 8192 --batch.tokens_per_microbatch auto"
    [((planned, trained), _)] = run_distributed(
        train, 1, from_rows(tmp_path, typed), what_is_refused, saved(), cpu=True
    )
    assert planned == pytest.approx(trained, rel=0.2)


def loses_its_log(run, rows):
    """The step after the log could not be written is the last one."""
    run.sample([[5]])
    (Path(run.config.run.output) / "metrics.jsonl").unlink()
    stops = pytest.raises(InterruptedError, match="asked to stop, and has saved step 2")
    with nullcontext() if run.trainer.total_steps == 2 else stops:
        run.learn(rows)
    with pytest.raises(DiskError, match="metrics.jsonl"):
        run.resources.close()


@pytest.mark.parametrize("steps", [4, 2])
def test_a_program_is_stopped_when_its_log_cannot_be_written(tmp_path, steps):
    """Unless its last step is taken."""
    words = from_rows(tmp_path, f"--run.steps {steps} --run.save_last false")
    run_distributed(train, 1, words, loses_its_log, saved(), cpu=True)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


def refusal(run):
    try:
        run.sample([[5, 6, 7], [9]])
    except UserCodeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("has_weights", [True, False])
def test_servers_with_other_weights_are_noticed_when_a_program_samples(tmp_path, has_weights):
    server = SamplingServer()
    if has_weights:
        server.load = load
    words = line(
        tmp_path,
        f"--ppo.sampler vllm+{server.address} --ppo.reward tests.reward_functions:letters",
    )
    [(found, _)] = run_distributed(train, 1, words, refusal, cpu=True)
    server.close()
    assert ("should have the same weights" in found) != has_weights


def test_a_broken_row_is_refused_by_its_number_before_any_work(tmp_path):
    path, rows = tmp_path / "rows.jsonl", [dict(row) for row in saved()]
    rows[7]["mask"] = rows[7]["mask"][1:]
    write_rows(path, rows)
    refused = ranks(from_rows(tmp_path), 1, code=2)
    refused.refused("rows.jsonl row 8 has lists of .* entries; give one entry for each token")
    alone = [{**row, "group": n} for n, row in enumerate(saved())]
    write_rows(path, alone)
    refused = ranks(from_rows(tmp_path), 1, code=2)
    refused.refused("compares the rows of a group but every group has one row")
    assert not (tmp_path / "run").exists()
