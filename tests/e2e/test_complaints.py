"""Every complaint is one sentence on stderr, printed once, with exit code 2 on every process, before any collective."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.arch import ModelConfig
from models.hf_format import copy_side_files
from tests import model_folder
from tests.e2e import launch
from tests.e2e.launch import ROOT, Ranks, metrics, plant_in_losses, ranks, tiny
from tests.harness import full
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.run.checkpoint import FORMAT
from ulysses.run.preflight import prepare

DATA = ROOT / "configs/demo/data"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("complaints")
    good = (DATA / "sft_train.jsonl").read_text().splitlines()[:12]
    (folder / "broken.jsonl").write_text("\n".join([*good[:5], good[5][:-9], *good[6:]]))
    tokenizer = shutil.copytree(DATA / "tokenizer", folder / "no_template")
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    for run, step in (("held", 3), ("later", 2), ("later", 4)):
        checkpoint = folder / f"{run}/checkpoints/step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "run.json").write_text(json.dumps({"format": FORMAT, "step": step}))
    write_model(folder / "model")
    tensors = load_file(folder / "model/model.safetensors")
    write_model(folder / "small", vocab_size=100)
    shutil.copytree(folder / "model", folder / "lacking")
    del tensors[UP]
    save_file(tensors, folder / "lacking/model.safetensors")
    shutil.copytree(folder / "model", folder / "nan")
    tensors[UP] = torch.full((64, 32), torch.nan)
    save_file(tensors, folder / "nan/model.safetensors")
    return folder


def write_model(folder: Path, **changes: Any) -> None:
    """A tiny model with weights, and the demo's tokenizer."""
    demo = json.loads((ROOT / "configs/demo/model/config.json").read_text())
    shape = ModelConfig.from_hf(
        demo | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2} | changes
    )
    model_folder.write_model(folder, shape)
    copy_side_files(DATA / "tokenizer", folder)


def arguments(place: Path, stage: str = "sft", **settings: Any) -> list[str]:
    return tiny(stage, place / "run", **settings)


# What is wrong: how the run is started (PLACE is the folder of wrong files), and the complaint.
CASES = {
    "missing data": ("sft data.train=none.jsonl", r"data: .*/none.jsonl"),
    "broken line": ("sft data.train=PLACE/broken.jsonl", r"broken.jsonl.* (line|row) 6"),
    "output in a file": (
        "sft run.output=PLACE/broken.jsonl/run",
        r"run.output .*/run cannot be written: .*broken.jsonl is",
    ),
    "no wandb": (
        "sft run.wandb=project",
        r"run.wandb is set but the package wandb is not installed; pip",
    ),
    "no such reference": (
        "dpo dpo.reference=PLACE/nowhere/model",
        r"dpo.reference is .* no folder /.*nowhere",
    ),
    "lacking reference": (
        "dpo dpo.reference=PLACE/lacking",
        r"dpo.reference: .* does not fit its config.json",
    ),
    "another tokenizer's reference": (
        "kto kto.reference=PLACE/small",
        r"kto.reference .* has 100 tokens but the policy \d+",
    ),
    "too long": ("sft batch.tokens_per_microbatch=16", r"tokens_per_microbatch.* 16"),
    "no template": ("sft model.tokenizer=PLACE/no_template", r"chat template"),
    "kernel on CPU": ("sft model.attention=flash4", r"model.attention: .*flash4"),
    "full disk": (
        "sft",
        r" has 97.7 KiB free but 1 checkpoint of run.save_last and the export need .* or run.export = f",
    ),
    "held folder": (
        "sft run.output=PLACE/held",
        r'held already holds checkpoints; set run.resume = "auto"',
    ),
    "lacking weights": (
        "pretrained lacking",
        r"does not fit .*: model.layers.1.mlp.up_proj.weight has no shape .*the first of 1 diff",
    ),
    "older checkpoint": (
        "sft run.output=PLACE/later run.resume=PLACE/later/checkpoints/step-2",
        r"later already holds checkpoints; set run.resume = \"auto\" .*run.overwrite = true to delete step-4, or",
    ),
    "another run's checkpoint": (
        "sft run.output=PLACE/held run.resume=PLACE/later/checkpoints/step-4",
        r"held already holds checkpoints; .*run.overwrite = true to delete step-3, or another run.output",
    ),
}


def command_line(place: Path, start: str) -> list[Any]:
    stage, *rest = start.replace("PLACE", str(place)).split()
    if stage == "pretrained":
        return pretrained(place, *rest)
    return arguments(place, stage, **dict(setting.split("=", 1) for setting in rest))


def pretrained(place: Path, name: str) -> list[Any]:
    """A run that starts from a model folder, whose weights bring their shape."""
    start = {
        "model__path": place / name,
        "model__init": "pretrained",
        "data__train": DATA / "sft_eval.jsonl",
    }
    return tiny("sft", place / "run", place / "cache", **start)


# With a reason each to be told by real processes: checks of settings and of weights, data that one process reads
# for all, and what these processes alone lack: GPUs, room and a package.
PROCESSES = ("broken line", "lacking weights", "kernel on CPU", "full disk", "no wandb")


@pytest.mark.parametrize("name", [name for name in CASES if name not in PROCESSES])
def test_one_sentence(name, place):
    start, pattern = CASES[name]
    config = parse_command_line([*map(str, command_line(place, start))]).config
    with pytest.raises(ConfigError) as error:
        prepare(config, 2).open_data()
    said = str(error.value)
    assert re.search(pattern, said), said
    assert "\n" not in said and len(said) < 500 and not (place / "run").exists()


@pytest.mark.parametrize("name", PROCESSES)
def test_one_sentence_and_exit_code_2_on_every_process(name, place, tmp_path):
    start, pattern = CASES[name]

    def before(rank: int) -> None:
        import torch.distributed as dist

        def meet(*_: object, **__: object) -> None:
            raise AssertionError("the processes met before the complaint")

        dist.init_process_group = meet
        if name == "full disk":
            usage = shutil.disk_usage
            shutil.disk_usage = lambda path: usage(path)._replace(free=100_000)
        if name == "no wandb":
            sys.modules["wandb"] = None

    started = Ranks(command_line(place, start), 2, tmp_path, before=before)
    outcome = started.wait(60)
    assert started.codes == [2, 2], outcome.stderr
    lines = outcome.stderr.strip().splitlines()
    # on a slow machine a progress bar comes before it
    lines = [line for line in lines if line.strip() and not line.startswith("tokenising")]
    assert len(lines) == 1 and lines[0].startswith("error: "), outcome.stderr
    assert re.search(pattern, lines[0]), lines[0]
    assert "Traceback" not in outcome.stderr + outcome.stdout
    assert len(lines[0]) < 500
    assert not (place / "run").exists(), "nothing is created for a refused run"


def test_weights_that_are_no_numbers_end_every_process_in_one_sentence(place, tmp_path):
    """One rank finds them while the others build the model: none is left behind in a collective."""
    started = Ranks(pretrained(place, "nan"), 2, tmp_path)
    outcome = started.wait(60)
    assert 0 not in started.codes, outcome.stderr
    lines = [line for line in outcome.stderr.splitlines() if "error" in line.lower()]
    assert len(lines) == 1 and "Traceback" not in outcome.stderr, outcome.stderr
    wanted = rf"error: rank \d, {UP} in /.*/nan/model.safetensors holds infinite .*; download it again"
    assert re.fullmatch(wanted, lines[0]), lines


def test_the_process_that_tells_leaves_first(place, tmp_path):
    """A launcher ends all processes as soon as one has left; here the one that tells is the last to start."""

    def before(rank: int) -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "any"  # set by torchrun
        time.sleep(0.0 if rank else 1.0)

    started = Ranks(arguments(place, optimizer__learning_rate=1e-4), 2, tmp_path, before=before)
    started.until(lambda: any(started.codes))
    assert started.codes == [2, None]
    started.send(signal.SIGTERM)
    assert "error: optimizer.learning_rate" in started.wait(10).stderr


@pytest.mark.parametrize("launcher", ["torchrun", *full(("deepspeed",))])
def test_the_sentence_stands_below_the_launchers_report(launcher, place):
    outcome = launch.run(launcher, arguments(place, optimizer__learning_rate=1e-4), 2)
    sentence = "error: optimizer.learning_rate: unknown; here it is optimizer.lr"
    assert outcome.code != 0 and outcome.stderr.count(sentence) == 2
    assert outcome.stderr.splitlines()[-1] == sentence


def test_what_the_run_holds_already_counts_as_free_disk(place, tmp_path, monkeypatch):
    more = ["--run.output", str(tmp_path), "--run.save_every", "1", "--run.overwrite"]
    config = parse_command_line([*map(str, pretrained(place, "model")), *more]).config
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    counted = (
        r"4 checkpoints of run.save_every \(run.keep = 2, the best and one being written\)"
    )
    with pytest.raises(
        ConfigError, match=f" has 1.0 KiB free but {counted} and the export need"
    ):
        prepare(config, 1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/old").write_bytes(bytes(10_000_000))
    prepare(config, 1)


def test_another_node_tells_what_only_it_lacks(place, tmp_path):
    def before(rank: int) -> None:
        os.environ.update(
            RANK="4", LOCAL_RANK="0", WORLD_SIZE="8"
        )  # the first process of a second node

    outcome = ranks(arguments(place, data__train="none.jsonl"), 1, tmp_path, before=before)
    assert outcome.code == 2 and re.fullmatch(
        r"\nerror \(node of rank 4\): data: .*none.jsonl.*\n", outcome.stderr
    ), outcome.stderr


def test_debug_adds_the_stack_trace(place, tmp_path):
    outcome = ranks([*arguments(place, model__attention="flash3"), "--debug"], 1, tmp_path)
    assert (
        outcome.code == 2
        and "Traceback" in outcome.stderr
        and "error: model.attention" in outcome.stderr
    )


@pytest.mark.parametrize("stuck", [False, True])
def test_an_error_on_one_process_ends_all_and_is_told_once(stuck, place, tmp_path):
    """The other process waits in a collective or, if `stuck`, outside of one."""

    def before(rank: int) -> None:
        def broken(taken: int, compute: Any) -> Any:
            if taken == 2 and rank == 1:
                raise ValueError("planted")
            if taken == 2 and stuck:
                time.sleep(300)
            return compute()

        plant_in_losses(broken)

    output = tmp_path / "run"
    line = arguments(place, run__output=output, parallel__sequence_parallel_size=2)
    outcome = ranks(line, 2, tmp_path, before=before, timeout=40)
    assert outcome.code == 1
    assert outcome.errors == ["error: rank 1, step 3: ValueError: planted"]
    assert outcome.stderr.count("Traceback") == 1, (
        "an error that nobody foresaw comes with one stack trace"
    )
    assert [m["step"] for m in metrics(output)] == [1, 2]
