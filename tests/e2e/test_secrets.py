"""Keys: servers get them from the environment, and nothing that a run writes or prints holds one."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.launch import ranks, tiny
from tests.sampling_server import SamplingServer

SECRET = "planted-secret"
VARIABLES = ("ULYSSES_API_KEY", "HF_TOKEN", "WANDB_API_KEY")


def with_keys(rank):
    os.environ.update({name: f"{SECRET} {name}" for name in VARIABLES})


def assert_no_secret(outcome, folder):
    assert SECRET not in outcome.stdout + outcome.stderr
    for path in filter(Path.is_file, folder.rglob("*")):
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("fault", ["", "refuse", "garbage"])
def test_servers_get_the_key_and_the_run_folder_does_not(tmp_path, fault):
    with closing(SamplingServer()) as server:
        server.fault = fault
        line = tiny(
            "ppo", tmp_path, f"--run.steps 1 --ppo.reward {server.address}/score --ppo.epochs 1 --run.save_every 1"
        )  # fmt: skip
        outcome = ranks(line, 1, before=with_keys, code=bool(fault))
        assert server.keys == {f"Bearer {SECRET} ULYSSES_API_KEY"}
    if fault:
        outcome.refused(f"the reward {server.address}/score failed: ")
    else:
        names = " ".join(path.name for path in tmp_path.rglob("*"))
        for name in (
            "config.json metrics.jsonl run.json README.md rollout.safetensors tfevents".split()
        ):
            assert name in names
    assert_no_secret(outcome, tmp_path)


def test_a_key_that_no_header_takes_is_not_printed(tmp_path):
    def before(rank):
        os.environ["ULYSSES_API_KEY"] = f"{SECRET}\u00e9"

    line = tiny("ppo", tmp_path, "--run.steps 1 --ppo.reward http://127.0.0.1:1/score")
    outcome = ranks(line, 1, before=before, code=1)
    outcome.refused("ULYSSES_API_KEY holds characters that no header may hold; set it again")
    assert_no_secret(outcome, tmp_path)


# a setting that may hold no key, one that is none and a word that is no setting; tests/unit/test_mistakes.py has more
REFUSED = f"""
--ppo.sampler_reload {{"/reload":{{"X-API-Key":"{SECRET}"}}}}
--ppo.rewrad http://user:{SECRET}@host/score
http://host/score?key={SECRET}
"""


@pytest.mark.parametrize("setting", REFUSED.split("\n")[1:-1])
def test_a_refused_run_shows_no_secret_and_leaves_nothing(tmp_path, setting):
    outcome = ranks(tiny("ppo", tmp_path / "run", setting), 1, code=2)
    assert_no_secret(outcome, tmp_path)
    assert not (tmp_path / "run").exists()
