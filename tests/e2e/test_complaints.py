"""Every complaint is one sentence on stderr, printed once, with exit code 2 on every process, before any collective."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests import rows_of
from tests.e2e import launch
from tests.e2e.launch import ROOT, Ranks, metrics, plant_in_losses, ranks, tiny
from tests.harness import STUCK, free_port, full
from tests.model_folder import demo_model
from tests.tiny_tokenizer import write_rows
from ulysses.check.preflight import prepare
from ulysses.check.run_folder import FIELDS, write_run_state
from ulysses.check.setting_checks import check_packages
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.run.build import open_data
from ulysses.run.training_run import TrainingRun
from ulysses.watch import failure
from ulysses.zero.construct import meet

DATA = ROOT / "configs/demo/data"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("complaints")
    good = (DATA / "sft_train.jsonl").read_text().splitlines()[:12]
    (folder / "broken.jsonl").write_text("\n".join([*good[:5], good[5][:-9], *good[6:]]))
    for run, step in (("held", 3), ("later", 2), ("later", 4)):
        checkpoint = folder / f"{run}/checkpoints/step-{step}"
        checkpoint.mkdir(parents=True)
        state = {key: {} for key in FIELDS} | {"step": step, "files": {"policy": ""}}
        write_run_state(checkpoint, state)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    for name in "model lacking nan".split():
        demo_model(folder / name, vocab_size=704, **size)
    demo_model(folder / "small", vocab_size=100, eos_token_id=1, pad_token_id=None, **size)
    tensors = load_file(folder / "model/model.safetensors")
    nan = torch.full_like(tensors.pop(UP), torch.nan)
    save_file(tensors, folder / "lacking/model.safetensors")
    save_file(tensors | {UP: nan}, folder / "nan/model.safetensors")
    return folder


# What is wrong, the stage and what is typed (PLACE is the folder of wrong files), and the complaint.
MODEL = "sft --model.init pretrained --data.train DATA/sft_eval.jsonl --model.path PLACE"
CASES = r"""
broken line => sft --data.train PLACE/broken.jsonl => broken.jsonl.* (line|row) 6
output in a file => sft --run.output PLACE/broken.jsonl/run => run.output .*/run cannot be written: .*broken.jsonl is
no wandb => sft --run.wandb project => run.wandb is set but the package wandb is not installed; pip
no such reference => dpo --dpo.reference PLACE/nowhere/model => dpo.reference is .* no folder /.*nowhere
lacking reference => dpo --dpo.reference PLACE/lacking => dpo.reference: .* does not fit its config.json
another tokenizer's reference => kto --kto.reference PLACE/small => kto.reference .* has 100 tokens but the policy \d+
kernel on CPU => sft --model.attention flash4 => model.attention: .*flash4
full disk => sft =>  has 97.7 KiB free but 1 checkpoint of run.save_last and the export would take .* or run.export = f
held folder => sft --run.output PLACE/held => held already holds checkpoints; set run.resume = "auto"
lacking weights => MODEL/lacking \
=> does not fit .*: model.layers.1.mlp.up_proj.weight is missing, the first of 1 diff
older checkpoint => sft --run.output PLACE/later --run.resume PLACE/later/checkpoints/step-2 \
=> later already holds checkpoints; set run.resume = \"auto\" .*delete step-4, or set another run.output
another run's checkpoint => sft --run.output PLACE/held --run.resume PLACE/later/checkpoints/step-4 \
=> held already holds checkpoints; .*delete step-3, or set another run.output
"""


COMPLAINTS = {name: rest for name, *rest in rows_of(CASES.replace("MODEL", MODEL))}


def arguments(place, start):
    start = start.replace("PLACE", str(place)).replace("DATA", str(DATA))
    stage, _, typed = start.partition(" ")
    return tiny(stage, place / "run", typed)


# With a reason each to be told by real processes: checks of settings and of weights, data that one process reads
# for all, and what these processes alone lack: GPUs, room and a package.
PROCESSES = ("broken line", "lacking weights", "kernel on CPU", "full disk", "no wandb")


@pytest.mark.parametrize("name", sorted(COMPLAINTS.keys() - PROCESSES))
def test_one_sentence(name, place):
    start, pattern = COMPLAINTS[name]
    config = parse_command_line(arguments(place, start)).config
    with pytest.raises(ConfigError, match=pattern) as error:
        open_data(prepare(config, 2))
    said = str(error.value)
    assert "\n" not in said and len(said) < 500 and not (place / "run").exists()


@pytest.mark.parametrize("name", PROCESSES)
def test_one_sentence_and_exit_code_2_on_every_process(name, place):
    start, pattern = COMPLAINTS[name]

    def before(rank):
        import torch.distributed as dist

        def meet(*_, **__):
            raise AssertionError("the processes met before the complaint")

        dist.init_process_group = meet
        if name == "full disk":
            usage = shutil.disk_usage
            shutil.disk_usage = lambda path: usage(path)._replace(free=100_000)
        if name == "no wandb":
            sys.modules["wandb"] = None

    started = Ranks(arguments(place, start), 2, before=before)
    outcome = started.wait()
    assert len(outcome.refused(pattern)) < 500 and started.codes == [2, 2]
    lines = outcome.stderr.strip().splitlines()
    # the start is said before it, and on a slow machine a progress bar
    assert (
        len([s for s in lines if s.strip() and not s.startswith(("tokenising", "loading"))])
        == 1
    )
    assert "Traceback" not in outcome.stdout
    assert not (place / "run").exists(), "nothing is created for a refused run"


def test_weights_that_are_no_numbers_end_every_process_in_one_sentence(place):
    """One rank finds them while the others build the model: none is left behind in a collective."""
    started = Ranks(arguments(place, f"{MODEL}/nan"), 2)
    bad = "holds infinite .*; download it again$"
    started.wait().refused(rf"rank \d, {UP} in /.*/nan/model.safetensors {bad}")
    assert 0 not in started.codes


WRONG = "sft --optimizer.learning_rate 1e-4"


def test_the_process_that_tells_leaves_first(place):
    """A launcher ends all processes as soon as one has left; here the one that tells is the last to start."""

    def before(rank):
        os.environ["TORCHELASTIC_RUN_ID"] = "any"  # set by torchrun
        time.sleep(0.0 if rank else 1.0)

    started = Ranks(arguments(place, WRONG), 2, before=before)
    started.until(lambda: any(started.codes))
    assert started.codes == [2, None]
    started.send(signal.SIGTERM)
    assert "error: optimizer.learning_rate" in started.wait().stderr


@pytest.mark.parametrize("launcher", ["torchrun", *full(("deepspeed",))])
def test_the_sentence_stands_below_the_launchers_report(launcher, place):
    """torchrun's fills the screen, and repeats the sentence at its end; deepspeed's is a few lines."""
    outcome = launch.run(launcher, arguments(place, WRONG), 2)
    sentence = "error: optimizer.learning_rate: unknown; here it is optimizer.lr"
    assert outcome.code != 0 and outcome.stderr.count(sentence) == 1 + (launcher == "torchrun")
    assert sentence in "".join(outcome.stderr.splitlines(keepends=True)[-8:])


def test_what_the_run_holds_already_counts_as_free_disk(place, tmp_path, monkeypatch):
    more = f"/model --run.output {tmp_path} --run.save_every 1"
    config = parse_command_line(arguments(place, MODEL + more)).config
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match="has 1.0 KiB free but 4 checkpoints"):
        prepare(config, 1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/old").write_bytes(bytes(10_000_000))
    prepare(config, 1)


def test_another_node_tells_what_only_it_lacks_and_debug_adds_the_stack_trace(place, tmp_path):
    def before(rank):
        # the first process of a second node
        os.environ.update(RANK="4", LOCAL_RANK="0", WORLD_SIZE="8")

    line = arguments(place, "sft --data.train none.jsonl --debug")
    outcome = ranks(line, 1, code=2, before=before)
    sentence = r"\nerror \(node of rank 4\): data: .*none.jsonl.*\n"
    assert re.search(sentence, outcome.stderr), outcome.stderr
    assert "Traceback" in outcome.stderr


def test_a_process_that_alone_finds_an_error_tells_it_after_it_has_let_the_first_one_speak(
    monkeypatch, capsys
):
    waited = []
    monkeypatch.setattr(failure, "sleep", waited.append)
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    failure.report_config_error(ConfigError("no tokenizer"), debug=False)
    assert waited == [failure.LAUNCHER_SECONDS]
    assert capsys.readouterr().err == "\nerror (node of rank 1): no tokenizer\n"


def test_a_process_that_loses_the_others_at_the_end_ends_its_watch_and_fails():
    """Else its watchdog would tell too that it has ended without a word."""
    run = TrainingRun.__new__(TrainingRun)
    run.watch, run.resources = mock.Mock(), ExitStack()
    with (
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist, "barrier", side_effect=RuntimeError("connection closed")),
        pytest.raises(RuntimeError, match="connection closed"),
    ):
        run.__exit__(None, None, None)
    assert run.watch.mock_calls[-1] == mock.call.stop()


def test_a_port_that_is_in_use_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = other.getsockname()[1]
        here = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in here.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RuntimeError, match=f"^port {port} of this machine is in use"):
            meet(5)


@pytest.mark.parametrize("stuck", [False, True])
def test_an_error_on_one_process_ends_all_and_is_told_once(stuck, place, tmp_path):
    """The other process waits in a collective or, if `stuck`, outside of one."""

    def before(rank):
        def broken(taken, compute):
            if taken == 2 and rank == 1:
                raise ValueError("planted")
            if taken == 2 and stuck:
                time.sleep(STUCK)
            return compute()

        plant_in_losses(broken)

    output = tmp_path / "run"
    line = arguments(place, f"sft --run.output {output} --parallel.sequence_parallel_size 2")
    outcome = ranks(line, 2, code=1, before=before)
    assert outcome.errors == ["error: rank 1, step 3: ValueError: planted"]
    assert outcome.stderr.count("Traceback") == 1, (
        "an error that nobody foresaw comes with one stack trace"
    )
    assert [m["step"] for m in metrics(output)] == [1, 2]


def test_another_release_of_deepspeed_is_refused_in_one_sentence():
    config = parse_command_line(["--config", f"{ROOT}/configs/demo/sft.toml"]).config
    assert [*check_packages(config)] == []
    with mock.patch("ulysses.check.setting_checks.version", lambda _: "9.9.9"):
        [text] = check_packages(config)
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert re.match("the package deepspeed is not installed", [*check_packages(config)][-1])
    assert re.fullmatch(r"deepspeed 9\.9\.9 is installed, .*; install deepspeed [\d.]+", text)


@pytest.mark.parametrize("command", ["inspect", "migrate"])
def test_what_is_read_no_more_and_letters_that_a_terminal_lacks_end_nothing_in_a_stack_trace(
    command, tmp_path
):
    row = {
        "messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a"}]
    }
    write_rows(tmp_path / "é.jsonl", [row])
    trl = {"model_name_or_path": "é", "dataset_name": "a", "save_only_model": True, "beta": 0.2}
    write_json(tmp_path / "dpo.json", trl)
    rest = ["--stage", "dpo", tmp_path / "dpo.json"]
    if command == "inspect":
        rest = tiny("sft", tmp_path / "run", f"--data.train {tmp_path}/é.jsonl --run.steps 1")
    line = [sys.executable, "-m", "ulysses.cli", command, *map(str, rest)]
    env = launch.environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, encoding="ascii")
    assert done.returncode == 0 and r"\xe9" in done.stdout, done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(line, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == "loading the libraries ...\n"
