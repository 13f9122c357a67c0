"""PPO as a user runs it: SFT first, then polite answers are rewarded, and the mean reward rises."""

import math
from pathlib import Path
from typing import Any

import pytest

from examples.demo_data import write_demo
from models.hf_format import WeightFiles
from tests.e2e.launch import ROOT, metrics, ranks, words
from tests.sampling_server import SamplingServer

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 704}


def launch(
    stage: str,
    folder: Path,
    name: str,
    steps: int,
    settings: dict[str, Any] | None = None,
    fails: bool = False,
) -> Any:
    """Run a demo configuration on the data of `folder`; PPO starts from the SFT run there.

    Returns the metrics or, of a run that fails, what it says.
    """
    data = "sft" if stage == "sft" else "ppo"
    values: dict[str, Any] = {
        "run.output": str(folder / name), "run.steps": steps, "data.cache": str(folder / "cache"),
        "data.train": str(folder / f"{data}_train.jsonl"), "data.eval": [], "run.eval_every": 0,
        "model.tokenizer": str(folder / "tokenizer"),
    }  # fmt: skip
    if stage != "sft":
        values |= {"model.path": str(folder / "sft/export"), "model.init": "pretrained"}
    line = ["--config", ROOT / f"configs/demo/{stage}.toml", *words(values | (settings or {}))]
    outcome = ranks(line, 2, folder / f"{name}-logs", timeout=400)
    if fails:
        assert outcome.code == 1
        return outcome.stderr
    outcome.check()
    return metrics(folder / name)


def rise(lines: list[dict[str, float]]) -> float:
    """How many standard errors the score of the last of the rollouts lies above that of the first."""
    first, last = lines[0], lines[-1]
    error = (
        math.hypot(first["objective/scores_std"], last["objective/scores_std"]) / 8
    )  # 64 answers
    return (last["objective/scores"] - first["objective/scores"]) / error


def assert_starts_at_the_reference(lines: list[dict[str, float]]) -> None:
    assert (
        lines[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
        and abs(lines[0]["objective/kl"]) < 1e-4
    )
    assert max(m["sampler/logp_gap_max"] for m in lines) < 1e-3


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demo data and a small model that has learned to answer, in both voices."""
    folder = tmp_path_factory.mktemp("ppo")
    write_demo(folder)
    launch("sft", folder, "sft", 64, {
        "model.config": SMALL, "optimizer.lr": 6e-3, "parallel.sequence_parallel_size": 1, "batch.examples": 16,
    })  # fmt: skip
    return folder


def test_answers_that_compete_learn_without_a_value(spoken: Path) -> None:
    """GRPO: the reward rises, but not at a learning rate of 0."""
    lines = launch("grpo", spoken, "grpo", 40, {"optimizer.lr": 1e-3})
    assert lines[-1]["rollout"] == 9 and rise(lines) > 4
    assert_starts_at_the_reference(lines)
    assert "loss/value_avg" not in lines[0] and lines[0]["tokens_shared"] > 0
    assert abs(rise(launch("grpo", spoken, "still", 12, {"optimizer.lr": 0.0}))) < 3


def test_servers_sample_and_a_dead_one_is_one_sentence(spoken: Path) -> None:
    """The run ends with a sentence and its checkpoint, and goes on once the server is back."""
    server = SamplingServer()
    address = f"vllm+{server.address}"
    settings = {"ppo.sampler": address, "ppo.sampler_sync_every": 2, "ppo.importance_cap": 2.0, "run.save_every": 4,
                "model.lora.rank": 4, "run.resume": "auto", "run.keep": 0}  # fmt: skip
    lines = launch("grpo", spoken, "served", 8, settings)
    assert lines[-1]["rollout"] == 1 and lines[-1]["sampler/logp_gap"] > 0.1
    assert [path for path, _ in server.asked].count("/collective_rpc") == 1, (
        "every second rollout"
    )
    names = WeightFiles(spoken / "served/sampler").tensors
    assert "model.norm.weight" in names and not [n for n in names if "lora" in n], (
        "servers get whole weights"
    )
    server.fault = "refuse"
    broken = launch("grpo", spoken, "served", 16, settings, fails=True)
    assert f"the sampling server {server.address}/collective_rpc failed (HTTP 503" in broken
    server.fault = ""
    lines = launch("grpo", spoken, "served", 16, settings)
    assert [m["step"] for m in lines] == list(range(1, 17)) and lines[-1]["rollout"] == 3
    server.close()


def test_adapters(spoken: Path) -> None:
    """The reference is the base with the adapters off, the sampler adds them in, and the export holds no value."""
    lines = launch("ppo", spoken, "lora", 6, {"optimizer.lr": 1e-3, "model.lora.rank": 4})
    assert_starts_at_the_reference(lines)
    assert lines[-1]["rollout"] == 1 and abs(lines[-1]["objective/kl"]) > 1e-3
    names = WeightFiles(spoken / "lora/export").tensors
    assert not [n for n in names if "policy" in n or "value" in n or "score" in n]
