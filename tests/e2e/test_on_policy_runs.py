"""Whole runs of distillation in which the student answers rows itself, here and on servers."""

import shutil
from contextlib import closing
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.launch import metrics, ranks, rows, tiny, without_times
from tests.e2e.test_stage_runs import on_ranks
from tests.e2e.test_without_options import start, without
from tests.model_folder import demo_model
from tests.sampling_server import SamplingServer, load
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model that is larger than the student."""
    return demo_model(tmp_path_factory.mktemp("models") / "teacher", hidden_size=64)


def settings(teacher, output, typed, train="sft_train"):
    data = f"--data.train {rows(train, 20)} --data.eval {rows('sft_eval', 6)}"
    usual = "--batch.examples 6 --data.max_length 128 --run.steps 4 --optimizer.lr 1e-2 --optimizer.warmup 0"
    sampling = "--distill.jsd_beta 1 --ppo.max_new_tokens 9"
    given = f"--distill.teacher {teacher} {data} {usual} {sampling} {typed}"
    return tiny("distill", output, given)


def test_a_resumed_run_repeats_its_answers(teacher, tmp_path):
    """With adapters, which the sampler adds to the weights."""
    saved = "--distill.on_policy 0.5 --run.save_every 2 --parallel.sequence_parallel_size 2"
    line = settings(teacher, tmp_path / "run", f"{saved} --model.lora.rank 2")
    whole = on_ranks(2, line)
    assert {m["on_policy/rows"] for m in whole} > {0.5}
    shutil.copytree(tmp_path / "run/export", tmp_path / "whole")
    for name in ("export", "checkpoints/step-4"):
        shutil.rmtree(tmp_path / "run" / name)
    again = on_ranks(2, [*line, "--run.resume", str(tmp_path / "run/checkpoints/step-2")])
    assert without_times(again[-2:]) == without_times(whole[2:])
    for path in (tmp_path / "whole").glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(tmp_path / "run/export" / path.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_rows_need_no_answers_if_all_are_sampled(teacher, tmp_path):
    """They come from the rows of PPO, whose answers are for rewards; held-out rows have answers of their own."""
    line = settings(teacher, tmp_path / "run", "--distill.on_policy 1", "ppo_train")
    lines = on_ranks(2, line)
    assert all(m["on_policy/rows"] == 1 and m["response_length/mean"] <= 9 for m in lines)
    assert lines[-1]["eval/divergence"] < lines[0]["divergence"]
    for m in lines:  # each step's answers come from its own weights
        assert m["nll"] == pytest.approx(m["sampler/nll"], abs=1e-5)


def test_a_server_samples(teacher, tmp_path):
    """One that has other weights ends the run, at any temperature and share of sampled rows."""
    with closing(SamplingServer()) as server:
        warm = (
            f"--distill.on_policy 0.5 --ppo.temperature 0.7 --ppo.sampler vllm+{server.address}"
        )
        refused = ranks(settings(teacher, tmp_path / "other", warm), 2, code=1)
        server.load = partial(load, temperature=0.7)
        ranks(settings(teacher, tmp_path / "warm", f"{warm} --run.steps 1"), 1)
        server.load = load
        server.asked.clear()
        typed = f"--distill.on_policy 1 --ppo.sampler vllm+{server.address}"
        ranks(settings(teacher, tmp_path / "served", typed), 2)
    refused.refused("have the same weights, but their log-probabilities differ by .*; look in")
    for m in metrics(tmp_path / "served"):
        assert m["nll"] == pytest.approx(m["sampler/nll"], abs=1e-5)
    reloads = [path for path, _ in server.asked].count("/collective_rpc")
    assert reloads == 4
    assert {body["max_tokens"] for path, body in server.asked if "completions" in path} == {9}


def test_a_teacher_must_know_all_that_the_student_may_sample(tmp_path):
    """Its vocabulary holds the tokenizer's, but not the rows that fill the student's up."""
    small = demo_model(tmp_path / "teacher", vocab_size=680)
    line = settings(small, tmp_path / "run", "--distill.on_policy 0.5")
    with pytest.raises(ConfigError, match="has 680 tokens but the policy 704"):
        prepare(parse_command_line(line).config, 1)


def test_without_the_option_ppo_only_the_datas_answers_are_learnt(teacher, tmp_path):
    tree = without(["ppo"], tmp_path)
    refused = start(tree, settings(teacher, tmp_path / "run", "--distill.on_policy 0.5"))
    assert refused.code == 2 and "needs ulysses.rl, which is not part" in refused.stderr
