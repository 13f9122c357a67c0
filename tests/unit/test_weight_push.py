"""Weights that are pushed to servers: what the servers are told, and what their failures cost."""

import base64
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import ulysses.rl.outside_sampler as outside
import ulysses.rl.servers as servers
from tests import rows_of
from tests.harness import run_distributed
from tests.sampling_server import SamplingServer
from tests.unit.test_outside_sampler import PROMPTS, sampler
from tests.weight_receiver import WeightReceiver
from ulysses.config.schema import Config
from ulysses.rl import weight_push
from ulysses.rl.samplers import check_sampling


def alone(scenario, *args):
    """Call a function in a process of its own, because one in which groups have met must not fork afterwards."""
    run_distributed(in_rank, 1, scenario, *args, cpu=True)


def in_rank(scenario, *args):
    servers.PAUSE, outside.LOOK_SECONDS, weight_push.PART_BYTES = 0.01, 1.0, 8
    two = [SamplingServer(), SamplingServer()]
    for server in two:
        server.receiver = WeightReceiver()
    with tempfile.TemporaryDirectory() as folder:
        scenario(Path(folder), two, *args)


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1).bfloat16(), "c": torch.eye(2)}


def pushing(folder, two, *dialects):
    addresses = [f"{dialect}+{server.address}" for dialect, server in zip(dialects, two)]
    found = sampler(folder, *addresses, sampler_sync="gloo")
    found.parts.served_weights = lambda device: WEIGHTS.items()
    found.said = []
    found.parts.say = found.said.append
    return found


def calls(server):
    return [
        path for path, _ in server.asked if "completions" not in path and path != "/generate"
    ]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_group_is_met_once_and_weights_come_in_parts(dialect):
    alone(a_group_is_met_once_and_weights_come_in_parts, dialect)


def a_group_is_met_once_and_weights_come_in_parts(tmp_path, two, dialect):
    found = pushing(tmp_path, two[:1], dialect)
    for rollout in (0, 1):
        found.synchronise(rollout)
        assert len(found.sample(PROMPTS, rollout)) == 3
    receiver = two[0].receiver
    assert receiver.version == found.push.version and receiver.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(receiver.weights[name], x) for name, x in WEIGHTS.items())
    asked = calls(two[0])
    assert sum("init" in path for path in asked) == 1
    assert sum("/update_weights" in path for path in asked) == 2 * 2  # a is a part by itself
    assert not (tmp_path / "policy").exists()


# the call that a server refuses
REFUSED = """
vllm => /init_weight_transfer_engine
vllm => /pause
vllm => /update_weights
vllm => /finish_weight_update
sglang => /init_weights_update_group
sglang => /update_weights_from_distributed
sglang => /continue_generation
"""


@pytest.mark.parametrize("dialect, path", rows_of(REFUSED))
def test_a_call_that_a_server_refuses_ends_the_push_with_what_it_said(dialect, path):
    alone(a_call_that_a_server_refuses_ends_the_push_with_what_it_said, dialect, path)


def a_call_that_a_server_refuses_ends_the_push_with_what_it_said(tmp_path, two, dialect, path):
    two[1].fault = path
    found = pushing(tmp_path, two, dialect, dialect)
    said = f"{two[1].address}{path}.* failed .HTTP 400 Bad Request .no weights fit"
    with pytest.raises(ValueError, match=said):
        found.synchronise()
    assert calls(two[1])[-1].startswith(path)


def test_a_server_that_knows_no_such_routes_is_told_apart():
    alone(a_server_that_knows_no_such_routes_is_told_apart)


def a_server_that_knows_no_such_routes_is_told_apart(tmp_path, two):
    two[0].fault = "/get_world_size"
    with pytest.raises(
        ValueError, match="does not tell how many workers .*; use vLLM 0.28 or newer"
    ):
        pushing(tmp_path, two[:1], "vllm").synchronise()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_that_was_started_again_is_met_again(dialect):
    alone(a_server_that_was_started_again_is_met_again, dialect)


def a_server_that_was_started_again_is_met_again(tmp_path, two, dialect):
    found = pushing(tmp_path, two[:1], dialect)
    found.synchronise()
    two[0].receiver.forget()
    given = found.push.version
    with pytest.raises(
        ValueError, match=f"'default' in place of '{given}'.: it was started again"
    ):
        found.sample(PROMPTS)
    found.synchronise(1)
    assert sum("init" in path for path in calls(two[0])) == 2
    assert len(found.sample(PROMPTS, 1)) == 3


def test_another_runs_weights_are_told_apart_at_the_same_rollout():
    alone(another_runs_weights_are_told_apart_at_the_same_rollout)


def another_runs_weights_are_told_apart_at_the_same_rollout(tmp_path, two):
    found, other = (pushing(tmp_path, two[:1], "vllm") for _ in range(2))
    found.synchronise()
    other.synchronise()
    with pytest.raises(ValueError, match="or serves another run, too"):
        found.sample(PROMPTS)


def test_a_server_that_ends_is_left_out_and_gets_weights_when_it_is_there_again():
    alone(a_server_that_ends_is_left_out_and_gets_weights_when_it_is_there_again)


def a_server_that_ends_is_left_out_and_gets_weights_when_it_is_there_again(tmp_path, two):
    found = pushing(tmp_path, two, "vllm", "vllm")
    found.synchronise()
    first = found.push.version
    two[1].fault = "ending"
    assert len(found.sample(PROMPTS)) == 3
    found.synchronise(1)
    assert two[1].receiver.version == first != found.push.version
    two[1].fault = ""
    found.synchronise(2)
    assert two[1].receiver.version == two[0].receiver.version == found.push.version
    assert [line.partition(" ")[0] for line in found.said] == [
        "warning:",
        f"vllm+{two[1].address}",
    ]


def test_vllms_workers_are_told_nccls_name_of_a_group_that_is_late():
    alone(vllms_workers_are_told_nccls_name_of_a_group_that_is_late)


def vllms_workers_are_told_nccls_name_of_a_group_that_is_late(tmp_path, two):
    """NCCL itself needs GPUs: what stands in for it sets the name while the push already waits for it."""

    def meet(store, *_):
        time.sleep(0.3)
        store.set("0", b"a name")

    weight_push._nccl_group = meet
    two[0].receiver = mock.Mock(get=two[0].receiver.get, post=lambda *_: {})
    found = pushing(tmp_path, two[:1], "vllm")
    [server] = found.servers
    push = weight_push.WeightPush("nccl", found.parts)
    push.device = torch.device("cpu")
    push._meet(replace(server, timeout=5))
    [told] = [body for path, body in two[0].asked if path.startswith("/init")]
    assert base64.b64decode(told["init_info"]["nccl_unique_id_b64"]) == b"a name"


def test_weights_travel_over_nccl_only_from_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ppo = {"sampler": ["vllm+http://host:1"], "sampler_sync": "nccl"}
    [error] = check_sampling(Config(stage="ppo", ppo=ppo), 1)
    assert 'ppo.sampler_sync is "nccl" but this machine has no GPU' in error
