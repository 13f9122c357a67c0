"""Episodes of several turns, in whole runs."""

import json

import pytest

from tests.e2e.launch import rows, tiny, without_times
from tests.e2e.test_stage_runs import on_ranks

SHORT = f"""
--data.train {rows("ppo_train", 6)} --data.eval {rows("ppo_eval", 3)} --data.max_length 64 --batch.examples 3
--run.steps 3 --run.eval_every 3 --ppo.answers_per_prompt 2 --ppo.minibatches 1 --ppo.epochs 1
--ppo.max_new_tokens 8 --ppo.max_episode_tokens 160 --run.samples 2 --run.export false
"""


def two_turns(folder, typed=""):
    given = "--ppo.rollout tests.episode_functions:two_turns"
    return tiny("grpo", folder, f"{SHORT} {given} {typed}")


def test_two_turns_with_the_engines_own_sampler(tmp_path):
    """The same on one and two processes; the sampler's log-probabilities are the trainer's."""
    alone, two = (
        on_ranks(n, two_turns(tmp_path / f"{n}", f"--parallel.sequence_parallel_size {n}"))
        for n in (1, 2)
    )
    for line in alone:
        assert line["episode/turns"] == 2 and line["episode/branches"] == 1
        assert line["sampler/logp_gap_max"] < 1e-4
        assert line["val/ratio"] == pytest.approx(1, abs=1e-4)
        assert 0 < line["response_length/mean"] <= 16 < line["episode/length"] <= 160
    assert alone[-1]["eval/episode/turns"] == 2
    for a, b in zip(without_times(alone), without_times(two), strict=True):
        assert a["objective/scores"] == b["objective/scores"]
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5)
    samples = (tmp_path / "1/samples.jsonl").read_text().splitlines()
    answers = [x["answer"] for x in map(json.loads, samples) if x["by"] == "rollout 0"]
    assert len(answers) == 4
    for answer in answers:
        score, _, turns = answer.partition(": ")
        assert float(score) in (0, 1)
        assert turns.count("[said]") == 2 and turns.count("[told]") == 1
        assert "It is " in turns.split("[told]")[1].split("[said]")[0]
