"""The chain of chain.py on two processes: every stage works from another's export, and most are killed and resumed."""

import math
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch

from models.folders import read_config
from models.hf_format import WeightFiles
from tests.e2e.chain import AFTER, DEMO, HELD_OUT, RECIPES, ROLLOUTS, Chain, launch, repeated
from tests.e2e.launch import ROOT, Ranks, environment, metrics, ranks
from tests.e2e.test_export import assert_same_folder
from tests.e2e.test_kill_resume import wait_until_dead
from tests.harness import full
from tests.sampling_server import SamplingServer, load
from tests.weight_receiver import in_a_process
from ulysses.check.input_files import check_weights
from ulysses.check.run_folder import saved_checkpoints
from ulysses.export import export_checkpoint

# A model whose matrices are gathered ahead and given back, and whose small ones stay whole, as on GPUs
# (tests.harness.AS_LARGE says why); with fewer layers nothing would be in flight when an evaluation ends
# and the export begins.
TINY = RECIPES["tiny"]
DEEP = replace(TINY, shape=TINY.shape | {"num_hidden_layers": 3})
LARGE = "deepspeed.zero_optimization"
KEYS = {
    f"{LARGE}.stage3_param_persistence_threshold": 5000,
    f"{LARGE}.reduce_bucket_size": 20_000,
}


# the others hold no state of their own beside these stages', that of tests/distributed/test_resume.py and that of SFT
# in tests/e2e/test_kill_resume.py
KILLED = "rm kto ppo grpo".split()


def dies_after(step):
    """Plant the death of rank 0 right after it logged `step`, and take the package datasets away: json needs none."""

    def before(_):
        import ulysses.run.metrics as metrics

        report = metrics.MetricsLog.report
        sys.modules["datasets"] = None

        def reported(self, at, *more):
            report(self, at, *more)
            if at == step:
                os.kill(os.getpid(), signal.SIGKILL)

        metrics.MetricsLog.report = reported

    return before


def forked(arguments, processes, logs, metrics, kill_after):
    run = Ranks(arguments, processes, logs, before=dies_after(kill_after))
    if kill_after:
        assert not wait_until_dead(run)
    else:
        run.wait().check()


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    changes = {stage: dict(KEYS) for stage in HELD_OUT}
    for stage in ("dpo", "kto"):  # their references are computed for all rows
        rows = {"path": str(DEMO / f"{stage}_train.jsonl"), "max_examples": 256}
        changes[stage]["data.train"] = [rows]
    for stage in ("sft", "kto"):
        changes[stage]["parallel.sequence_parallel_size"] = 1
    found = Chain(folder, DEEP, DEMO, forked, 2, kill=KILLED, changes=changes).run()
    return folder, found


def test_a_killed_stage_repeats_what_it_did(chain):
    """Four steps, in PPO across two rollouts, were taken before the kill and again after it: bit for bit the same."""
    folder, found = chain
    for stage in HELD_OUT:
        steps = [m["step"] for m in metrics(folder / stage)]
        assert steps == list(range(1, TINY.plan(stage).steps + 1))
    for stage in KILLED:
        at = found[stage]["resumed_at"]
        pairs = repeated(folder / stage, at)
        assert len(pairs) == AFTER and all(a == b for a, b in pairs), stage
        assert f"step-{at} at step {at}" in (folder / f"{stage}-logs/0.out").read_text()
        if stage in ROLLOUTS:
            assert len({a["rollout"] for a, _ in pairs}) == 2


def test_every_stage_learns(chain):
    folder, found = chain
    rise = {stage: one["last"] - one["first"] for stage, one in found.items()}
    for stage in ("pt", "sft", "distill"):
        assert rise[stage] < -0.5 * found[stage]["first"]
    assert max(rise[stage] for stage in ("rm", "dpo", "kto")) < 0
    for stage in ("rm", "dpo"):
        assert found[stage]["held_out"] - 2 * found[stage]["held_out_error"] > 0.5
    assert found["kto"]["held_out"] > 0.1
    for stage in ROLLOUTS:
        assert rise[stage] > 4 * found[stage]["rise_error"]
        assert found[stage]["held_out"] > found[stage]["first"]
    lines = {stage: metrics(folder / stage) for stage in HELD_OUT}
    last = lines["pt"][-1]
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/nll"]), rel=1e-9)
    numbers = [m[name] for rows in lines.values() for m in rows for name in m.keys() - {"run"}]
    assert all(map(math.isfinite, numbers))


def test_every_stage_begins_where_another_ended(chain, tmp_path):
    folder, _ = chain
    first = {stage: metrics(folder / stage)[0] for stage in HELD_OUT}
    # an untrained model would begin at ln(vocabulary) again
    assert first["sft"]["loss"] < first["pt"]["loss"] - 1
    for stage, loss in (("dpo", math.log(2)), ("kto", 0.5)):
        assert first[stage]["loss"] == pytest.approx(loss, abs=1e-6)
        # an untrained model would be near -130
        assert first[stage]["logps/chosen"] > -60
    # an untrained model would not end its answers
    assert first["ppo"]["val/num_eos_tokens"] > 32
    for stage in ROLLOUTS:
        assert first[stage]["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert abs(first[stage]["objective/kl"]) < 1e-4
        assert max(m["sampler/logp_gap_max"] for m in metrics(folder / stage)) < 1e-3
    assert "loss/value_avg" not in first["grpo"] and first["grpo"]["tokens_shared"] > 0
    for stage in HELD_OUT:
        export = folder / stage / "export"
        check_weights(read_config(export), export, reward=stage == "rm")
    export = folder / "ppo/export"
    extra = ("policy.", "value.", "score")  # it is the policy alone
    assert not [name for name in WeightFiles(export).tensors if name.startswith(extra)]
    export_checkpoint(saved_checkpoints(folder / "ppo/checkpoints")[-1], tmp_path / "ppo")
    assert_same_folder(tmp_path / "ppo", export)


@pytest.mark.parametrize("sync", ["gloo", *full(("disk",))])
def test_a_server_samples(chain, tmp_path, sync):
    """From whole weights, every second rollout from new ones; one that has other weights ends the run."""
    folder, output, server = chain[0], tmp_path / "served", SamplingServer()
    data = DEMO
    typed = f"""
    --config {ROOT}/configs/demo/grpo.toml --run.steps 3 --run.eval_every 0
    --ppo.epochs 1 --ppo.minibatches 1
    --data.train {data}/ppo_train.jsonl --data.eval [] --data.cache {tmp_path}/cache
    --model.path {folder}/sft/export --model.init pretrained --model.tokenizer {data}/tokenizer --model.lora.rank 4
    --ppo.sampler vllm+{server.address} --ppo.sampler_sync_every 2 --ppo.importance_cap 2
    --ppo.sampler_sync {sync}
    """.split()
    with nullcontext() if sync == "disk" else in_a_process() as server.receiver:
        refused = ranks([*typed, "--run.output", f"{tmp_path}/other"], 2, code=1)
        server.load = load if sync == "disk" else partial(load, folder / "sft/export")
        ranks([*typed, "--run.output", f"{output}"], 2)
        server.close()
        pushed = server.receiver and safetensors.torch.load(server.receiver.held()[-1])
    refused.refused("have the same weights, but their log-probabilities differ by .*; look in")
    lines = metrics(output)
    assert [m["rollout"] for m in lines] == [0, 1, 2]
    fresh, old, again = (m["sampler/logp_gap"] for m in lines)
    assert max(fresh, again) < 1e-4 < old
    last = {"disk": "/collective_rpc", "gloo": "/finish_weight_update"}[sync]
    assert [asked for asked, _ in server.asked].count(last) == 3
    names = pushed or WeightFiles(output / "sampler").tensors
    assert "model.norm.weight" in names and not [n for n in names if "lora" in n]


@pytest.mark.full
def test_the_script_kills_and_resumes_real_processes(chain, tmp_path, monkeypatch):
    """What it does on GPUs: train.py without forks, killed by looking at its metrics."""
    folder, _ = chain
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    (tmp_path / "sft").symlink_to(folder / "sft")
    for stage in (stage for stage in HELD_OUT if stage not in (*KILLED, "sft")):
        found = Chain(tmp_path, TINY, DEMO, launch).train(stage)
        assert found["resumed_at"] and found["loss_difference"] == 0, stage
