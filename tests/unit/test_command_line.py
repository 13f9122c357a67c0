"""Configuration from TOML and arguments."""

import json
import re
import runpy
from importlib import import_module
from operator import attrgetter
from typing import get_args

import pytest

from models.arch import ARCHITECTURES
from tests import rows_of
from tests.e2e.launch import python
from ulysses.config.command_line import (
    check,
    foreign_names,
    known_keys,
    parse_command_line,
    still_known,
)
from ulysses.config.schema import Config
from ulysses.gradients import build_chain
from ulysses.options import STAGES
from ulysses.rl.advantages import ADVANTAGES
from ulysses.train import main

BASE = "--stage dpo --model.path m --run.steps 3"


def read(line):
    return parse_command_line(line.split()).config


def test_arguments_override_toml(tmp_path):
    toml = tmp_path / "a.toml"
    toml.write_text(
        'stage = "sft"\n[model]\npath = "m"\n[run]\nsteps = 5\n[optimizer]\nlr = 1e-5\nbetas = [0.9, 0.99]\n'
    )
    config = read(f"--config {toml} --optimizer.lr 1e-6 --run.resume_anyway")
    assert config.stage == "sft" and config.run.resume_anyway
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-6, (0.9, 0.99))


SOURCES = """
--data.train a --data.train=b => ["a", "b"]
--data.train [{"path":"a"},{"path":"b","weight":2}] => [{"path": "a"}, {"path": "b", "weight": 2}]
--data.train {"path":"a"} --data.train ["b"] => [{"path": "a"}, "b"]
--data.train [] => []
"""


@pytest.mark.parametrize("arguments, expected", rows_of(SOURCES))
def test_data_sources_are_kept_one_by_one_and_replace_the_files(tmp_path, arguments, expected):
    toml = tmp_path / "a.toml"
    toml.write_text('[data]\ntrain = {path = "c", weight = 3, split = "test"}\neval = "d"\n')
    data = read(f"{BASE} --config {toml} {arguments}").data
    assert data.train == json.loads(expected) and data.eval == "d"


# tables without fixed keys take dotted ones, and an argument of the launcher is accepted
TYPED = """
--optimizer.lr 2e-5 --local_rank=1 --adjust-lr 0.5 => optimizer.lr => 1e-5
--optimizer.lr 2e-5 --adjust-lr => optimizer.lr => 2e-5
--model.init random --model.config.hidden_size 64 => model.config => {"hidden_size": 64}
--model.special_tokens.pad_token x => model.special_tokens => {"pad_token": "x"}
--deepspeed.zero_optimization.overlap_comm false => deepspeed.zero_optimization => {"overlap_comm": false}
--run.wandb= => run.wandb => ""
"""


@pytest.mark.parametrize("arguments, key, value", rows_of(TYPED))
def test_what_is_typed_is_what_a_setting_is(arguments, key, value):
    found = attrgetter(key)(read(f"{BASE} {arguments}"))
    assert found == (
        pytest.approx(json.loads(value)) if key == "optimizer.lr" else json.loads(value)
    )


def test_foreign_names_lead_to_keys_that_exist():
    """Every name leads somewhere, no name is in two lists, and no key of ours is called foreign."""
    names, keys = foreign_names(), set(known_keys())
    keys |= {f"STAGE.{key.partition('.')[2]}" for key in keys if key.split(".")[0] in STAGES}
    for name, rule in names["ours"].items():
        table = {"key": rule} if isinstance(rule, str) else rule
        led = {table["key"]}
        for value in table.get("values", {}).values():
            led |= {*value} if isinstance(value, dict) else set()
        # the keys of this table are the template's
        led = {re.sub(r"(?<=chat_template_kwargs)\..+", "", key) for key in led}
        assert led <= keys, name
        assert name not in keys or table["key"] == name
    lists = [set(names[kind]) for kind in ("ours", "not_needed", "by_hand", "not_supported")]
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_what_a_checkpoint_set_and_is_no_more_is_left_out():
    saved = {"memory": {"offload": "checkpoints"}, "run": {"steps": 3, "no_setting": 1}}
    assert still_known(saved) == {"run": {"steps": 3}}
    assert still_known({"optimizer": "adamw", "model": {"lora": 8}}) == {}


def test_a_name_with_dots_in_a_checkpoint_is_one_name():
    """`ulysses export` reads such a checkpoint."""
    rewards = {"pkg.mod:fn": 1.0, "/x/rm": 2.0, "/x/rm.v2": 1.0, "http://1.2.3.4:80/x": 0.5}
    saved = check(
        {
            "stage": "ppo",
            "model": {"path": "m"},
            "run": {"steps": 3},
            "ppo": {"reward": rewards},
        }
    )
    assert check(still_known(saved.model_dump(mode="json"))) == saved


def test_names_that_the_configuration_writes_out_are_those_of_the_registries():
    """It imports none of them, so that it can be read before torch is."""
    keys = known_keys()

    def listed(key):
        return keys[key].description.rpartition(": ")[2].rstrip(".").split(", ")

    assert get_args(keys["stage"].annotation) == (*STAGES,)
    assert {*STAGES} <= {*Config.model_fields}
    assert get_args(keys["ppo.advantage"].annotation) == (*ADVANTAGES,)
    assert listed("model.arch") == list(ARCHITECTURES)
    for preset in get_args(keys["gradients.preset"].annotation):
        assert build_chain(preset).policies


def test_help_lists_every_key(capsys):
    assert main(["--config", "absent.toml", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--batch.tokens_per_microbatch int|auto\n" in shown
    assert "--model.dtype bfloat16|float32\n" in shown
    for key, info in known_keys().items():
        assert key in shown
        assert info.description, f"{key} has no description"
    _, _, listed = shown.partition("TOML file:\n")
    assert all(line.startswith(("  --", " " * 8)) for line in listed.splitlines())


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_whose_code_ends_the_process_has_failed(code, monkeypatch, capsys):
    """As a reward function that calls sys.exit(0) does: torchrun would take it for a good end."""

    class Ends:
        def __init__(self, *_, **__):
            raise SystemExit(code)

    monkeypatch.setattr("ulysses.run.training_run.TrainingRun", Ends)
    monkeypatch.setenv("ULYSSES_DEBUG", "1")  # leave the warnings of this process alone
    assert main(BASE.split()) == 1
    assert f"error: rank 0, SystemExit: {code}" in capsys.readouterr().err


def test_help_and_errors_speak_of_the_command(capsys, tmp_path):
    """`ulysses train` is there wherever the engine is installed; train.py is in the repository only."""
    assert main(["--help"]) == 0
    assert "ulysses train --config" in (shown := capsys.readouterr().out)
    assert "train.py" not in shown
    for line in ([], ["--quux", "5"], ["--run.epochs", "x", "--run.seed", "x"]):
        assert main(line) == 2
        assert "ulysses train --help" in (shown := capsys.readouterr().err)
        assert "train.py" not in shown


@pytest.mark.parametrize("command", ["train --config", "migrate", "export", "export --merge"])
def test_a_missing_file_is_called_missing(command, tmp_path, capsys):
    tool, *words = command.split()
    words += [str(tmp_path / "nope"), "out"][: 1 + (tool == "export")]
    assert import_module(f"ulysses.{tool}").main(words) == 2
    said = capsys.readouterr().err
    assert f"there is no {tmp_path}/nope; correct the path" in said and "Errno" not in said


def test_a_wrong_command_is_told_before_torch_is_imported():
    line = "import sys; from ulysses.train import main; print(main(['--quux', '5']), 'torch' in sys.modules)"
    done = python("-c", line)
    assert done.stdout == "2 False\n" and "error: " in done.stderr and "quux" in done.stderr
    assert "loading the libraries" not in done.stderr


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", ["export", "migrate", "report"])
def test_a_tool_that_is_started_as_a_module_does_not_end_as_if_it_had_done_its_work(command):
    with pytest.raises(SystemExit, match=f"^error: the command is: ulysses {command}$"):
        runpy.run_module(f"ulysses.{command}", run_name="__main__")


@pytest.mark.parametrize(
    "variables, wrong",
    rows_of("""
RANK= WORLD_SIZE=2 => RANK is '' but must be a number, as torchrun sets it
RANK=1 WORLD_SIZE=two => WORLD_SIZE is 'two' but must be a number
RANK=0 WORLD_SIZE=1 LOCAL_RANK=-1 => LOCAL_RANK is '-1' but must be a number
MASTER_PORT=http => MASTER_PORT is 'http' but must be a number
RANK=2 WORLD_SIZE=2 => RANK is 2 but WORLD_SIZE is 2, and ranks begin at 0
RANK=3 => RANK is 3 but WORLD_SIZE is 1, and ranks begin at 0
"""),
)
def test_a_rank_that_cannot_be_is_refused_before_others_wait_for_it(
    variables, wrong, monkeypatch, capsys
):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variable.split("=") for variable in variables.split()):
        monkeypatch.setenv(name, value)
    assert main([*BASE.split(), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {wrong}") and said.count("\n") == 1
