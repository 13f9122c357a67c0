"""One rollout ahead: the order in which answers are asked for and weights renewed, and what is trained."""

import threading
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

import ulysses.rl.outside_sampler as outside
import ulysses.rl.rollout as rollouts
import ulysses.rl.servers as servers
from tests.engine_case import ListDataset, sequences
from tests.harness import PATIENCE, until
from tests.sampling_server import SamplingServer
from tests.unit.test_outside_sampler import sampler
from ulysses.config.schema import Config
from ulysses.config.stage_sections import PpoSection
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.ppo import PpoStage
from ulysses.rl.rollout import RolloutMaker
from ulysses.rl.sampler import Completion, SamplingOptions

PPO = {"advantage": "group", "answers_per_prompt": 2, "epochs": 1, "minibatches": 2}
PPO |= {"kl_coefficient": 0.0, "importance_cap": 2.0, "reward": "a:b"}
STEPS = 3 * PPO["minibatches"]


class Sampler:
    """Answers when as many steps are trained as it was told to wait for; what it draws follows from the numbers."""

    def __init__(self, fails_at=None):
        self.events, self.trained, self.fails_at = [], threading.Event(), fails_at

    def synchronise(self, rollout=0):
        self.events.append(f"weights for {rollout}")

    def check_gap(self, gap):
        self.events.append("gap")

    def sample(self, prompts, rollout=0):
        self.events.append(f"ask {rollout}")
        if threading.current_thread() is not threading.main_thread():
            assert self.trained.wait(PATIENCE)
        if rollout == self.fails_at:
            raise ValueError("the server has ended")
        self.events.append(f"answer {rollout}")
        drawn = ([n % 7 + 3] * (1 + (n + rollout) % 4) for n in prompts)
        return {n: Completion(t, [-1.0] * len(t), True) for n, t in zip(prompts, drawn)}


def stage_with(sampler, ahead, monkeypatch):
    """The stage, and the prompts of three rollouts of 4, 4 and 2 prompts, without a model."""

    def gathered(value):
        sampler.events += ["all wait"] * (value is None)
        return [value]

    monkeypatch.setattr(rollouts, "gather", gathered)
    monkeypatch.setattr(
        RolloutMaker,
        "_values",
        lambda _, rollout, *__: torch.arange(1.0, 4).expand(rollout.lengths.sum(), 3),
    )
    ppo = PpoSection(rollouts_ahead=ahead, **PPO)
    config = Config(stage="ppo", ppo=ppo, run={"steps": STEPS})
    stage = PpoStage(config, mesh=ParallelMesh(1))
    parts = Mock(tokens_per_microbatch=64, share_prompts=False, frozen={})

    def reward(answers, row_of):
        for one in answers:
            one.scores = {"a:b": float(len(one.tokens))}

    maker = RolloutMaker(stage, parts, sampler, reward)
    data = ListDataset("prompt", [(s,) for s in sequences(10, 0)])
    data.row = lambda _: {}
    prompts = StepLoader(data, 4, tokens_per_microbatch=64, seed=3)
    return replace(stage, maker=maker), prompts


def trained(sampler, ahead, monkeypatch):
    """Read all steps; after the last one of each rollout the servers may answer."""
    (stage, prompts), found = stage_with(sampler, ahead, monkeypatch), []
    for k in range(STEPS):
        sampler.trained.clear()
        batches = stage.micro_batches(prompts, k)
        if stage.maker.ahead:
            assert until(partial(sampler.events.__contains__, f"ask {k // 2 + 1}"))
        sampler.events.append(f"step {k}")
        found.append([s for b in batches for example in b for s in example.sequences])
        sampler.trained.set()
        if stage.maker.ahead:
            wait([stage.maker.ahead])
    return found


def test_servers_answer_the_next_rollout_while_one_is_trained(monkeypatch):
    sampler = Sampler()
    trained(sampler, 1, monkeypatch)
    asked = """
    all wait, weights for 0, ask 0, answer 0, ask 1, step 0, answer 1, step 1,
    all wait, weights for 2, ask 2, step 2, answer 2, step 3,
    step 4, step 5
    """
    events = [event for event in sampler.events if event != "gap"]
    assert events == [event.strip() for event in asked.split(",")]
    # only the first rollout's answers have the trainer's weights
    assert sampler.events.count("gap") == 1


def test_what_is_trained_does_not_depend_on_when_it_was_asked_for(monkeypatch):
    now, ahead = (trained(Sampler(), ahead, monkeypatch) for ahead in (0, 1))
    assert len(now) == STEPS
    for ours, theirs in zip(ahead, now, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            for name, column in one.token_columns.items():
                assert_close(column, other.token_columns[name])


def test_an_evaluation_brings_new_weights_when_no_answer_is_being_drawn(monkeypatch):
    sampler = Sampler()
    stage, prompts = stage_with(sampler, 1, monkeypatch)
    stage.micro_batches(prompts, 0)
    held_out = Mock(steps_per_epoch=1, dataset=prompts.dataset)
    held_out.sets.return_value = {"": held_out}
    held_out.indices.return_value = [0, 1]
    threading.Timer(0.1, sampler.trained.set).start()
    stage.evaluate(held_out)
    answered = sampler.events.index("answer 1") + 1
    assert sampler.events[answered:][:2] == ["all wait", "weights for 0"]
    sampler.events.clear()
    stage.micro_batches(prompts, 2)
    assert sampler.events[:2] == ["all wait", "weights for 2"], "nothing was asked for again"


def test_what_fails_ahead_fails_when_it_is_collected(monkeypatch):
    with pytest.raises(ValueError, match="the server has ended"):
        trained(sampler := Sampler(fails_at=1), 1, monkeypatch)
    assert sampler.events[-2:] == ["step 0", "step 1"]


def test_a_run_that_ends_gives_up_what_is_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "LOOK_SECONDS", 0.05)
    server = SamplingServer()
    server.fault = "hang"
    options = SamplingOptions(4, batch=2)
    asker = sampler(tmp_path, f"vllm+{server.address}", options=options)
    found = servers.in_thread(asker.sample, dict.fromkeys(range(6), torch.arange(3)))
    assert until(lambda: len(server.asked) == 2)
    asker.close()
    assert isinstance(found.exception(PATIENCE), InterruptedError)
    server.close()
    assert len(server.asked) == 2
