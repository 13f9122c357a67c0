"""The chain of chain.py on two processes: every stage works from another's export, and most are killed and resumed."""

import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_data import write_demo
from models.hf_format import WeightFiles, read_config
from tests.e2e.chain import (
    AFTER,
    HELD_OUT,
    RECIPES,
    ROLLOUTS,
    Chain,
    launch,
    repeated,
)
from tests.e2e.launch import ROOT, Ranks, environment, metrics, ranks, words
from tests.e2e.test_export import assert_same_folder
from tests.sampling_server import SamplingServer
from ulysses.run.checkpoint import saved_checkpoints
from ulysses.run.export_model import export_checkpoint
from ulysses.run.preflight import check_weights

# A model whose matrices are gathered ahead and given back, and whose small ones stay whole, as on GPUs
# (tests.harness.AS_LARGE says why); with fewer layers nothing would be in flight when an evaluation ends
# and the export begins.
TINY = RECIPES["tiny"]
DEEP = replace(TINY, shape=(64, 160, 3, 4, 2))
KEYS = {
    "deepspeed.zero_optimization.stage3_param_persistence_threshold": 5000,
    "deepspeed.zero_optimization.reduce_bucket_size": 20_000,
}


# the others hold no state of their own beside these stages' and that of tests/distributed/test_resume.py
KILLED = ("sft", "rm", "kto", "ppo", "grpo")


def dies_after(step: int) -> Callable[[int], None]:
    """Plant the death of rank 0 right after it logged `step`, and take the package datasets away: json needs none."""

    def before(_: int) -> None:
        import ulysses.run.metrics as metrics

        report = metrics.MetricsLog.report
        sys.modules["datasets"] = None  # type: ignore[assignment]

        def reported(self: Any, at: int, *more: Any) -> None:
            report(self, at, *more)
            if at == step:
                os.kill(os.getpid(), signal.SIGKILL)

        metrics.MetricsLog.report = reported

    return before


def forked(
    arguments: list[str], processes: int, logs: Path, metrics: Path, kill_after: int
) -> None:
    run = Ranks(arguments, processes, logs, before=dies_after(kill_after))
    if not kill_after:
        run.wait(240).check()
        return
    run.until(lambda: any(code is not None for code in run.codes), 240)
    run.send(signal.SIGKILL)
    outcome = run.wait()
    assert run.codes[0] == -signal.SIGKILL, outcome.stderr[-3000:]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    write_demo(folder / "data")
    changes: dict[str, dict[str, Any]] = {stage: dict(KEYS) for stage in HELD_OUT}
    for stage in ("dpo", "kto"):  # their references are computed for all rows
        changes[stage]["data.train"] = [
            {"path": str(folder / f"data/{stage}_train.jsonl"), "max_examples": 256}
        ]
    for stage in ("sft", "kto"):
        changes[stage]["parallel.sequence_parallel_size"] = 1
    return folder, Chain(
        folder, DEEP, folder / "data", forked, processes=2, kill=KILLED, changes=changes
    ).run()


def test_a_killed_stage_repeats_what_it_did(chain):
    """Four steps, in PPO across two rollouts, were taken before the kill and again after it: bit for bit the same."""
    folder, found = chain
    for stage in HELD_OUT:
        lines = metrics(folder / stage)
        assert [m["step"] for m in lines] == list(range(1, TINY.stages[stage][1] + 1))
    for stage in KILLED:
        pairs = repeated(folder / stage, found[stage]["resumed_at"])
        assert len(pairs) == AFTER and all(a == b for a, b in pairs), stage
        assert (
            f"step-{found[stage]['resumed_at']} at step {found[stage]['resumed_at']}"
            in (folder / stage / "logs/0.out").read_text()
        )
    for stage in ROLLOUTS:
        assert (
            len({a["rollout"] for a, _ in repeated(folder / stage, found[stage]["resumed_at"])})
            == 2
        )


def test_every_stage_learns(chain):
    folder, found = chain
    assert (
        found["pt"]["last"] < 0.5 * found["pt"]["first"]
        and found["sft"]["last"] < 0.5 * found["sft"]["first"]
    )
    assert found["distill"]["last"] < 0.5 * found["distill"]["first"]
    assert all(found[stage]["last"] < found[stage]["first"] for stage in ("rm", "dpo", "kto"))
    for stage in ("rm", "dpo"):
        assert found[stage]["held_out"] - 2 * found[stage]["held_out_error"] > 0.5
    assert found["kto"]["held_out"] > 0.1
    for stage in ROLLOUTS:
        assert found[stage]["last"] - found[stage]["first"] > 4 * found[stage]["rise_error"]
        assert found[stage]["held_out"] > found[stage]["first"]
    lines = {stage: metrics(folder / stage) for stage in HELD_OUT}
    last = lines["pt"][-1]
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/nll"]), rel=1e-9)
    numbers = [m[name] for rows in lines.values() for m in rows for name in m.keys() - {"run"}]
    assert all(map(math.isfinite, numbers))


def test_every_stage_begins_where_another_ended(chain, tmp_path):
    folder, _ = chain
    first = {stage: metrics(folder / stage)[0] for stage in HELD_OUT}
    assert first["sft"]["loss"] < first["pt"]["loss"] - 1, (
        "an untrained model would begin at ln(vocabulary) again"
    )
    assert first["dpo"]["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["kto"][
        "loss"
    ] == pytest.approx(0.5, abs=1e-6)
    assert min(first["dpo"]["logps/chosen"], first["kto"]["logps/chosen"]) > -60, (
        "an untrained model would be near -130"
    )
    assert first["ppo"]["val/num_eos_tokens"] > 32, (
        "an untrained model would not end its answers"
    )
    for stage in ROLLOUTS:
        assert_starts_at_the_reference(metrics(folder / stage))
    assert "loss/value_avg" not in first["grpo"] and first["grpo"]["tokens_shared"] > 0
    for stage in HELD_OUT:
        export = folder / stage / "export"
        check_weights(read_config(export), export, reward=stage == "rm")
    names = WeightFiles(folder / "ppo/export").tensors
    assert not [name for name in names if name.startswith(("policy.", "value.", "score"))], (
        "it is the policy alone"
    )
    export_checkpoint(saved_checkpoints(folder / "ppo/checkpoints")[-1], tmp_path / "ppo")
    assert_same_folder(tmp_path / "ppo", folder / "ppo/export")
    model, tokenizer = (
        kind.from_pretrained(folder / "ppo/export")
        for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Where is it?"}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)  # fmt: skip
    assert (inputs["input_ids"] == tokenizer.bos_token_id).sum() == 1
    assert (
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4).shape[1]
        == inputs["input_ids"].shape[1] + 4
    )


def assert_starts_at_the_reference(lines: list[dict[str, float]]) -> None:
    assert lines[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(lines[0]["objective/kl"]) < 1e-4
    assert max(m["sampler/logp_gap_max"] for m in lines) < 1e-3


class FailingServer(SamplingServer):
    """It refuses the second set of weights."""

    def reply(self, path: str, body: Any) -> Any:
        if path == "/collective_rpc" and path in (asked for asked, _ in self.asked[:-1]):
            self.fault = "refuse"
        return super().reply(path, body)


def test_servers_sample_and_a_dead_one_is_one_sentence(chain, tmp_path):
    """The run ends with a sentence and its checkpoint, and goes on once the server is back."""
    folder, output, server = chain[0], tmp_path / "served", FailingServer()
    settings = {
        "run.output": output, "run.steps": 16, "run.eval_every": 0, "run.save_every": 4, "run.resume": "auto",
        "data.train": folder / "data/ppo_train.jsonl", "data.eval": [], "data.cache": tmp_path / "cache",
        "model.path": folder / "sft/export", "model.init": "pretrained", "model.tokenizer": folder / "data/tokenizer",
        "model.lora.rank": 4, "ppo.sampler": f"vllm+{server.address}", "ppo.sampler_sync_every": 2,
        "ppo.importance_cap": 2.0,
    }  # fmt: skip
    line = ["--config", ROOT / "configs/demo/grpo.toml", *words(settings)]
    outcome = ranks(line, 2, tmp_path / "logs", timeout=400)
    said = f"the sampling server {server.address}/collective_rpc failed (HTTP 503"
    assert outcome.code == 1 and said in outcome.stderr
    lines = metrics(output)
    assert lines[-1]["rollout"] == 1 and lines[-1]["sampler/logp_gap"] > 0.1, (
        "every second rollout brings new weights"
    )
    names = WeightFiles(output / "sampler").tensors
    assert "model.norm.weight" in names and not [n for n in names if "lora" in n], (
        "servers get whole weights"
    )
    server.reply, server.fault = super(FailingServer, server).reply, ""
    ranks(line, 2, tmp_path / "logs", timeout=400).check()
    lines = metrics(output)
    assert [m["step"] for m in lines] == list(range(1, 17)) and lines[-1]["rollout"] == 3
    server.close()


@pytest.mark.full
def test_the_script_kills_and_resumes_real_processes(chain, tmp_path, monkeypatch):
    """What it does on GPUs: train.py without forks, killed by looking at its metrics."""
    folder, _ = chain
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    (tmp_path / "sft").symlink_to(folder / "sft")
    for stage in (stage for stage in HELD_OUT if stage not in KILLED):
        found = Chain(tmp_path, TINY, folder / "data", launch).train(stage)
        assert found["resumed_at"] and found["loss_difference"] == 0, stage
