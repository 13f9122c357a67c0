"""--dry-run: the plan without weights, data or GPU; findings and exit codes."""

import re
import shutil
import sys
from collections import namedtuple

import pytest
import torch

from models.arch import ModelConfig
from models.folders import read_json
from tests import ROOT, rows_of
from tests.e2e.launch import CACHE
from tests.model_folder import demo_model, write_model
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.memory.levels import LEVELS
from ulysses.run.dry_run import dry_run
from ulysses.train import main

DEMO = ROOT / "configs/demo"
NODE = ["--gpus", 8, "--gpu-memory", 139.8, "--host-memory", 550]


@pytest.fixture
def run(capsys):
    """A function that plans a run and returns the exit code and what was printed."""

    def run(*arguments):
        code = dry_run(*parse_command_line([*map(str, arguments), "--dry-run"]))
        return code, capsys.readouterr().out

    return run


def arch(stage="sft", length=131072, sp=8):
    return f"""--stage {stage} --model.arch llama3-8b --model.init random --run.steps 7 --data.max_length {length}
        --parallel.sequence_parallel_size {sp}""".split()


def test_plan_by_architecture_alone(run):
    code, text = run(*arch(), *NODE, "--debug")
    assert code == 3  # neither tokenizer nor data
    if not torch.cuda.is_available():
        first = "this machine has no GPU: the plan is for 8 GPUs of 139.8 GiB; --gpus and --gpu-memory"
        assert text.startswith(first)
    assert '"sequence_parallel_size": 8' in text
    assert "8 processes: data parallel 1 x sequence parallel 8" in text
    assert "7 steps" in text and "8,030,261,248 parameters" in text
    levels = re.findall(r"^  (\w+) +([\d.]+) +[\d.]+ +\d+ +\w+ +([\d.]+)", text, re.MULTILINE)
    assert [level for level, *_ in levels] == list(LEVELS)
    sizes, seconds = ([float(numbers[column]) for numbers in levels] for column in (1, 2))
    assert sizes == sorted(sizes, reverse=True) and seconds == sorted(seconds)
    assert re.search(r"longest sequence at sequence_parallel_size 8: [\d,]{9,} tokens", text)
    assert "memory: recompute none (auto: " in text and "GiB predicted of 139.8 GiB)" in text
    said = "verdict: the settings are right; absent on this machine: 2, see the findings above"
    assert text.splitlines()[-1] == said
    assert "finding: data.train is empty" in text
    assert "finding: model.tokenizer is missing" in text


def test_pairs_hold_two_sequences_and_an_absent_reference_is_a_finding(run):
    code, text = run(*arch("dpo", 65536), "--dpo.reference", "/no/such/model", *NODE)
    assert "2 sequences at a time, 131,072 tokens together" in text
    assert "tokens on each side of a pair" in text
    finding = "finding: dpo.reference is '/no/such/model': there is no folder /no/such/model"
    assert code == 3 and finding in text


def test_what_does_not_fit_is_refused_with_what_to_change(run, capsys):
    sentence = r"needs \d+\.\d GiB on each GPU .* but a GPU has 80.0 GiB; .*offload_optimizer = true.* --gpu-memory"
    with pytest.raises(ConfigError, match=sentence):
        run(*arch(length=4096, sp=1), "--gpus", 1)
    text = capsys.readouterr().out
    parts = "finding: ", "1 GPU of 80.0 GiB (--gpu-memory)", "does not fit"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    with pytest.raises(ConfigError, match="on each GPU with .* but a GPU has 8.0 GiB"):
        run(*arch(length=4096, sp=1), "--gpus", 1, "--gpu-memory", 8)


@pytest.mark.parametrize(
    "name, finding, plan",
    [
        ("model", "finding: model.path: there is no model.safetensors in", "memory: recompute"),
        (
            "Qwen2.5-7B",
            "the model is planned with the published shape of",
            "7,615,616,512 parameters",
        ),
        ("other", "finding: model.path is", "there is no plan of its memory"),
    ],
)
def test_absent_weights_and_data_are_findings(name, finding, plan, run, tmp_path):
    shutil.copytree(DEMO / "model", tmp_path / "model")
    line = f"""--stage sft --run.steps 2 --data.max_length 2048 --model.path {tmp_path / name}
        --model.tokenizer {DEMO / "data/tokenizer"}
        --data.train {tmp_path / "none.jsonl"} --run.output {tmp_path / "run"}"""
    code, text = run(*line.split(), *NODE)
    assert code == 3
    for said in ("finding: data: ", "none.jsonl", finding, plan):
        assert said in text


def demo(folder):
    line = (
        f"--config {DEMO}/sft.toml --gpus 2 --data.cache {CACHE.name} --run.output {folder}/run"
    )
    return line.split()


def test_everything_present_is_zero(run, tmp_path):
    code, text = run(*demo(tmp_path))
    assert text.splitlines()[-1] == "verdict: the run can start" and '"stage"' not in text
    assert code == 0 and "finding" not in text
    assert re.search(r"\d+ examples, \d+ steps per epoch, \d+ steps", text)
    assert not (tmp_path / "run").exists()


def test_a_tiny_model_takes_a_time_and_has_one_micro_batch(run, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("ulysses.run.dry_run.cpu_flops", lambda _: 1e18)
    monkeypatch.setattr("ulysses.run.dry_run.step_seconds", lambda _: 1e-4)
    line = [word for word in demo(tmp_path) if word not in ("--gpus", "2")]
    _, text = run(*line, "--parallel.sequence_parallel_size", 1)
    assert text.count("micro-batches:") == 1 and "0.0 s" not in text and "0.00" not in text
    assert "CPU a step takes about <0.01 s, and" in text and "; <0.01 s / step" in text


def test_a_machine_without_a_gpu_is_timed_and_its_slow_dtype_named(run, tmp_path, monkeypatch):
    rates = {"float32": 1e9, "bfloat16": 1e8}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in ("run.dry_run", "plan.hardware"):
        monkeypatch.setattr(f"ulysses.{module}.cpu_flops", rates.__getitem__)
    line = [word for word in demo(tmp_path) if word not in ("--gpus", "2")]
    line += ["--parallel.sequence_parallel_size", "1"]
    found = {}
    for dtype in rates:
        _, text = run(*line, "--model.dtype", dtype)
        [(seconds, rest)] = re.findall(
            r"this machine's CPU a step takes about ([\d.]+) s, and each process about 1\.\d GiB of memory(.*)",
            text,
        )
        found[dtype] = float(seconds), rest
    assert found["bfloat16"][0] == pytest.approx(10 * found["float32"][0], abs=1)
    assert not found["float32"][1] and "are 10 times slower than" in found["bfloat16"][1]
    _, text = run(*line, "--host-memory", 1)
    assert re.search(r"each process about .* GiB of memory, which is more than is free\n", text)
    assert "CPU" not in run(*line, "--gpus", 2)[1].rpartition("predicted")[2]


def test_settings_that_do_nothing_are_named(run, tmp_path):
    settings = "--run.steps 3 --optimizer.warmup 9 --batch.examples 5000".split()
    _, text = run(*demo(tmp_path), *settings)
    assert "optimizer.warmup is 9 steps but the run has 3: the learning rate" in text
    said = (
        r"a step takes 5000 examples \(batch.examples\) but the data has only \d+: every step"
    )
    assert re.search(said, text)
    _, text = run(*demo(tmp_path), "--optimizer.lr", 0)
    assert "optimizer.lr is 0: no weight will change" in text and "every step" not in text
    _, text = run(*demo(tmp_path), "--gpus", 8, "--batch.examples", 3)
    assert "a step has 3 examples for 4 data-parallel groups: 1 of them compute nothing" in text
    rows, sampled = DEMO / "data/ppo_train.jsonl", ["--config", DEMO / "grpo.toml", "--gpus", 2]
    (tmp_path / "six.jsonl").write_text("".join(rows.open().readlines()[:6]))
    sampled += ["--data.train", tmp_path / "six.jsonl", "--data.cache", tmp_path]
    for prompts, said in ((4, True), (3, False)):
        _, text = run(*sampled, "--batch.examples", prompts, "--ppo.minibatches", 3)
        wanted = "last rollout of an epoch has 2 prompts for 3 minibatches (ppo.minibatches): 1 steps"
        assert (wanted in text) == said


def test_a_tokenizer_of_another_model_is_named(run, tmp_path):
    config = read_json(DEMO / "model/config.json") | {"vocab_size": 4096}
    write_model(tmp_path / "model", ModelConfig.from_hf(config))
    line = [*demo(tmp_path), "--model.path", tmp_path / "model", "--model.init", "pretrained"]
    _, text = run(*line, "--model.tokenizer", DEMO / "data/tokenizer")
    assert re.search(
        r"model.tokenizer has \d+ tokens but the model's vocabulary has 4096", text
    )


@pytest.mark.parametrize("asked", ["--dry-run", "--inspect 1"])
def test_no_code_of_the_user_runs_before_the_start(asked, capsys, tmp_path, monkeypatch):
    """And a tracker's package, which a run needs, is not needed to look."""
    (tmp_path / "own.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    line = [str(DEMO / "ppo.toml"), "--ppo.reward", "own:score", "--model.init", "random"]
    line += ["--run.trackers", '["mlflow", "own:Mine"]']
    own = f"--data.cache {CACHE.name} --run.output {tmp_path}/run --parallel.sequence_parallel_size 1 {asked}"
    assert main(["--debug", "--config", *line, *own.split()]) == 0
    said = "".join(capsys.readouterr())
    assert "imported" not in said and "own" not in sys.modules
    refusal = "the run would be refused: run.trackers is set but the package mlflow is not inst"
    assert (refusal in said) == (asked == "--dry-run")


NOTHING = "--run.export false --run.save_last false"
# the exit code, what is typed and what is said
ROOM = """
0 => NOTHING --run.save_minutes 0 =>
0 => NOTHING => 3 checkpoints of run.save_minutes (run.keep = 2 and one being written) would take 93.7 GiB; set \
run.save_minutes = 0 or run.keep = 1
0 => NOTHING --run.keep 1 =>
0 => => 3 checkpoints of run.save_minutes (run.keep = 2 and one being written) and the export would take 98.9 GiB; set \
run.save_minutes = 0 or run.export = false or run.keep = 1
3 => --run.save_every 2 => 4 checkpoints of run.save_every (run.keep = 2, the best and one being written) and the \
export would take 130.2 GiB; set run.save_every = 0 or run.export = false or run.keep = 1
3 => NOTHING --run.save_every 2 --run.keep 1 => 3 checkpoints of run.save_every (run.keep = 1, the best and one being \
written) would take 93.7 GiB; set run.save_every = 0
3 => --model.config.num_hidden_layers 32 => 1 checkpoint of run.save_last and the export would take 104.7 GiB; set \
run.save_last = false or run.export = false
0 => --model.config.num_hidden_layers 32 --model.lora.rank 8 =>
""".replace("NOTHING", NOTHING)


@pytest.mark.parametrize("code, settings, said", rows_of(ROOM))
def test_the_disk_must_hold_what_is_saved_by_step_and_the_timer_only_warns(
    code, settings, said, run, tmp_path, monkeypatch
):
    """Four steps of a model as large as a benchmark's, on a disk of 64 GiB; 14 for adapters, without 15 of the base."""
    free = (64 << 30) if "lora" not in settings else (14 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(free))
    own = f"""--model.config.num_hidden_layers 8 --run.steps 4 --model.tokenizer {DEMO}/data/tokenizer
        --data.train {DEMO}/data/sft_eval.jsonl --data.cache {CACHE.name} --run.output {tmp_path}/run {settings}"""
    found, text = run(*arch(length=4096), *own.split(), *NODE)
    assert found == int(code)
    wanted = f"run.output {tmp_path} has 64.0 GiB free but {said}, or use another disk"
    lines = [line for line in text.splitlines() if "run.output" in line]
    assert lines == ["finding: " * (found == 3) + wanted] * bool(said)


def test_a_factor_of_one_is_named(capsys):
    main([*map(str, arch()), "--dry-run", "--debug", "--adjust-lr"])
    assert capsys.readouterr().out.startswith(
        "--adjust-lr 1 changes nothing; give another factor"
    )


@pytest.mark.parametrize("gone", ["tokenizer.json", "tokenizer*"])
@pytest.mark.parametrize("template", ["tokenizer", "chatml"])
def test_a_model_without_a_tokenizer_is_told_and_its_plan_shown(template, gone, run, tmp_path):
    folder = demo_model(tmp_path / "model")
    for path in [*folder.glob(gone), *folder.glob("*.jinja")]:
        path.unlink()
    line = f"""--stage sft --model.path {folder} --data.chat_template {template} --run.steps 1
        --run.output {tmp_path}/run --model.dtype float32 --data.max_length 512
        --data.train {DEMO}/data/sft_train.jsonl""".split()
    sentence = rf"^model.tokenizer: {folder} holds no tokenizer \(tokenizer.json, vocab.json, .*; copy the model's"
    with pytest.raises(ConfigError, match=sentence):
        prepare(parse_command_line(line).config, 1)
    code, text = run(*line, "--gpus", 8)
    assert code == 3 and "no chat template" not in text
    assert "holds no tokenizer" in text and "GiB" in text
