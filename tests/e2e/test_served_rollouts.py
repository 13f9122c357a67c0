"""A run whose server answers one rollout ahead: weights, gaps and what a resumed run asks again."""

from itertools import pairwise

import pytest

from tests.e2e.launch import metrics, ranks, tiny
from tests.sampling_server import SamplingServer, load


@pytest.fixture
def server():
    found = SamplingServer()
    found.load = load
    yield found
    found.close()


def asked(server):
    """How many answers the server was asked for before each push of weights and after the last one."""
    paths = [path for path, _ in server.asked]
    pushes = [i for i, path in enumerate(paths) if path == "/collective_rpc"]
    return [paths[i:j].count("/v1/completions") for i, j in pairwise([0, *pushes, len(paths)])]


def test_a_server_answers_one_rollout_ahead(tmp_path, server):
    """With adapters and two steps a rollout; the run is continued in the middle of rollout 1, and asks for 2 anew."""
    output = tmp_path / "run"
    typed = f"""
    --ppo.sampler vllm+{server.address} --ppo.importance_cap 2 --ppo.epochs 1 --model.lora.rank 4
    --optimizer.lr 3e-3 --optimizer.warmup 0 --ppo.max_new_tokens 8 --batch.examples 4 --ppo.rollouts_ahead
    """
    line = tiny("grpo", output, typed)
    ranks([*line, "1", "--run.steps", "3", "--run.export", "false"], 2)
    # four answers to each of four prompts of two rollouts, between whose requests nothing was trained
    assert asked(server) == [0, 32]
    server.asked.clear()
    ranks([*line, "1", "--run.steps", "8", "--run.resume", "auto"], 2)
    assert asked(server) == [0, 32], "the last rollout asks for no more"
    assert not (output / "sampler/README.md").exists(), "a model card reads the whole log"
    lines = metrics(output)
    assert [m["rollout"] for m in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    firsts = lines[::2]
    assert [m["val/ratio"] for m in firsts] == pytest.approx([1] * 4, abs=1e-5)
    now, ahead, resumed, ahead_again = (m["sampler/logp_gap"] for m in firsts)
    assert max(now, resumed) < 1e-4 < 1e-3 < min(ahead, ahead_again)
    assert [m["time/waiting"] for m in firsts[::2]] == [1, 1]
    assert all(0 <= m["time/waiting"] < 1 for m in firsts[1::2])
