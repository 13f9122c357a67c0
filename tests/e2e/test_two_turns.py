"""Episodes of several turns, in whole runs."""

import json

import pytest

from tests.e2e.launch import ranks, rows, tiny, without_times
from tests.e2e.test_stage_runs import on_ranks
from tests.sampling_server import SamplingServer, load

SHORT = f"""
--data.train {rows("ppo_train", 6)} --data.eval {rows("ppo_eval", 3)} --data.max_length 64 --batch.examples 3
--run.steps 3 --run.eval_every 3 --ppo.answers_per_prompt 2 --ppo.minibatches 1 --ppo.epochs 1
--ppo.max_new_tokens 8 --ppo.max_episode_tokens 160 --run.samples 2 --run.export false
"""


DEGREE = "--parallel.sequence_parallel_size"


def two_turns(folder, typed="", function="two_turns"):
    given = f"--ppo.rollout tests.episode_functions:{function}"
    return tiny("grpo", folder, f"{SHORT} {given} {typed}")


def on_one_and_two(folder, typed="", function="two_turns"):
    """The metrics of one process, which are those of two; the sampler's log-probabilities are the trainer's."""
    alone, two = (
        on_ranks(n, two_turns(folder / f"{n}", f"{typed} {DEGREE} {n}", function))
        for n in (1, 2)
    )
    for a, b in zip(without_times(alone), without_times(two), strict=True):
        assert a["objective/scores"] == b["objective/scores"]
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5)
        assert a["sampler/logp_gap_max"] < 1e-4
        assert a["val/ratio"] == pytest.approx(1, abs=1e-4)
    return alone


def test_two_turns_with_the_engines_own_sampler(tmp_path):
    alone = on_one_and_two(tmp_path)
    for line in alone:
        assert line["episode/turns"] == 2 and line["episode/branches"] == 1
        assert 0 < line["response_length/mean"] <= 16 < line["episode/length"] <= 160
    assert alone[-1]["eval/episode/turns"] == 2
    samples = (tmp_path / "1/samples.jsonl").read_text().splitlines()
    answers = [x["answer"] for x in map(json.loads, samples) if x["by"] == "rollout 0"]
    assert len(answers) == 4
    for answer in answers:
        score, _, turns = answer.partition(": ")
        assert float(score) in (0, 1)
        assert turns.count("[said]") == 2 and turns.count("[told]") == 1
        assert "It is " in turns.split("[told]")[1].split("[said]")[0]


def test_branches_are_scored_as_one_episode(tmp_path):
    """Where the function returns None, ppo.reward scores the last branch."""
    for line in on_one_and_two(tmp_path, "--run.samples 0", "branches"):
        assert 1 < line["episode/branches"] <= 2 and line["episode/turns"] > 2
        name = "examples.demo_data:politeness_reward"
        assert line["objective/scores"] == pytest.approx(line[f"objective/scores/{name}"])


def test_two_turns_with_a_server(tmp_path):
    """Its requests are those of turns, each within what is left of the episode, and an episode keeps its server."""
    servers = [SamplingServer(), SamplingServer()]
    for server in servers:
        server.load = load
    addresses = json.dumps([f"vllm+{s.address}" for s in servers]).replace(" ", "")
    short = (
        "--data.max_length 40 --ppo.max_episode_tokens 48 --run.samples 0 --run.eval_every 0"
    )
    lines = on_ranks(1, two_turns(tmp_path / "run", f"{short} --ppo.sampler {addresses}"))
    for server in servers:
        server.close()
    for line in lines:
        assert line["sampler/logp_gap_max"] < 1e-4 and line["episode/length"] <= 48
        assert line["val/ratio"] == pytest.approx(1, abs=1e-4)
    asked = [[b for path, b in s.asked if path == "/v1/completions"] for s in servers]
    limits = [[body["max_tokens"] for body in bodies] for bodies in asked]
    assert all(len(body["prompt"]) + body["max_tokens"] <= 48 for b in asked for body in b)
    assert min(map(min, limits)) < 8 == max(map(max, limits))
    # three episodes of each rollout ask a server, and of three held-out ones two ask the first
    assert [*map(len, asked)] == [3 * 3 * 2 + 2 * 2, 3 * 3 * 2 + 2]


def test_episodes_whose_first_prompts_have_no_room_are_dropped_and_counted(tmp_path):
    """A held-out set of one prompt has none left, and no metrics; the rest is the same on any ranks."""
    one = rows("ppo_eval", 1).replace("}", ',"name":"one"}')
    typed = f"--data.eval {one} --run.samples 0"
    lines = on_one_and_two(tmp_path, typed, "some_too_long")
    assert len(lines) == 3 and "eval/objective/scores" in lines[-1]
    assert not any(key.startswith("eval/one/") for key in lines[-1])
    done = ranks(two_turns(tmp_path / "again", typed, "some_too_long"), 1)
    told = [line for line in done.stdout.splitlines() if line.startswith("dropped ")]
    why = (
        "episodes without a turn: a first prompt left no room for one in ppo.max_episode_tokens, or the function gave "
        "up on its calls of the model"
    )
    counts = [line.removeprefix("dropped ").removesuffix(why) for line in told]
    assert counts == ["2 of 6 ", "2 of 6 ", "1 of 3 ", "1 of 1 "]


def test_a_rollout_without_a_turn_ends_the_run(tmp_path):
    """As the last rollout of an epoch of seven prompts, three at a time, may be one."""
    typed = f"--data.train {rows('ppo_eval', 1)} --run.samples 0"
    ended = ranks(two_turns(tmp_path, typed, "some_too_long"), 1, code=1)
    ended.refused("no episode of rollout 2 has a turn to train on; raise ppo.max_episode_tok")
