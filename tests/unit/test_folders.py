"""Nothing of the user's is deleted or written over: what a run or an export may replace, and where it may write."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from operator import attrgetter
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.folders import base_folder, read_json
from models.writing import write_weights
from tests import rows_of
from tests.model_folder import demo_model
from ulysses.check.preflight import prepare
from ulysses.check.run_folder import (
    FIELDS,
    digests_of_inputs,
    resume_point,
    saved_checkpoints,
    write_run_state,
)
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.data.cache import build_once
from ulysses.disk import DiskError, check_empty, whole_folder, write_json
from ulysses.export import main
from ulysses.rl.rewards import load_function

DEMO = os.path.abspath("configs/demo")


def shell(folder, line):
    subprocess.run(["bash", "-ec", line], cwd=folder, check=True)


def write_export(folder, **options):
    with whole_folder(folder, **options) as new:
        shell(new, "echo {} >config.json; mkdir more; echo 1 >more/weights")
    return folder


def tree(folder):
    """All that lies in a folder, links as such, with the content of files."""
    return {
        str(p.relative_to(folder)): os.readlink(p)
        if p.is_symlink()
        else p.is_file() and p.read_bytes()
        for p in folder.rglob("*")
    }


# ---------------------------------------------------------------- folders that are written as a whole


HELD = """
notes.txt => touch notes.txt
.hidden => touch .hidden
other => mkdir other
away => ln -s /nowhere away
config.json, more => echo {} >config.json; mkdir more
a, b, c and 4 more => touch {a..g}
"""


@pytest.mark.parametrize("found, line", rows_of(HELD))
def test_a_folder_that_holds_something_is_refused_by_name_and_survives(found, line, tmp_path):
    shell(tmp_path, f"mkdir out; cd out; {line}")
    before = tree(tmp_path / "out")
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path}/out holds {found}, but an export needs a new")
    ):
        check_empty(tmp_path / "out", "an export")
    with pytest.raises(DiskError, match="out.* cannot be written: Directory not empty"):
        write_export(tmp_path / "out")  # what came while it was written stays
    assert tree(tmp_path / "out") == before and len([*tmp_path.iterdir()]) == 1


def test_an_empty_folder_a_link_to_one_and_the_writers_own_are_written(tmp_path):
    shell(tmp_path, "mkdir out; ln -s out/ link; echo mine >file")
    check_empty(tmp_path / "link", "an export")
    check_empty(tmp_path / "none", "an export")
    write_export(tmp_path / "link")
    with whole_folder(tmp_path / "out", replaces=True) as new:
        (new / "second").touch()
    assert (tmp_path / "link").is_symlink() and [*tree(tmp_path / "out")] == ["second"]
    assert {p.name for p in tmp_path.iterdir()} == {"out", "link", "file"}
    with pytest.raises(ValueError, match="file holds file, but an export needs a new or empty"):
        check_empty(tmp_path / "file", "an export")


def test_two_that_write_one_folder_take_turns(tmp_path):
    writes, goes_on = Event(), Event()

    def first():
        with whole_folder(tmp_path / "out") as new:
            writes.set()
            goes_on.wait(60)
            (new / "a").touch()

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first)
        assert writes.wait(60)
        two = threads.submit(write_export, tmp_path / "out", replaces=True)
        assert wait([two], timeout=0.5).not_done
        goes_on.set()
        one.result(), two.result()
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert (tmp_path / "out/config.json").exists() and not (tmp_path / "out/a").exists()


# ---------------------------------------------------------------- where a run may write


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return demo_model(tmp_path_factory.mktemp("pretrained") / "model")


def check(folder, model, changes=""):
    """Let the checks of a run of the demo in `folder` find what is wrong."""
    line = f"""--config {DEMO}/sft.toml --model.init pretrained --model.path {model} --data.train {folder}/data
        --data.eval [] --run.eval_every 0 --data.cache {folder}/cache --parallel.sequence_parallel_size 1
        --run.output {folder}/run {changes}"""
    return prepare(parse_command_line(line.split()).config, 1, [])


@pytest.fixture
def folder(tmp_path):
    for name in ("data", "held"):
        (tmp_path / name).mkdir()
        shutil.copy(f"{DEMO}/data/sft_eval.jsonl", tmp_path / name / "rows.jsonl")
    return tmp_path


APART = """
--run.output MODEL => run.output MODEL is MODEL, which is model.path
--run.output MODEL/ => is MODEL, which is model.path
--run.output MODEL/../model/run => run.output MODEL/run lies in MODEL, which is model.path
--run.output MODEL/.. => holds MODEL, which is model.path
--run.output FOLDER/link => run.output FOLDER/link is MODEL, which is model.path
--run.output FOLDER/link/deep/run => lies in MODEL, which is model.path
--model.init random --run.output MODEL => is MODEL, which is model.path
--run.output FOLDER/data => run.output FOLDER/data is FOLDER/data, which is data.train
--run.output FOLDER/data/run => lies in FOLDER/data, which is data.train
--data.eval FOLDER/held/rows.jsonl --run.output FOLDER/held => holds FOLDER/held/rows.jsonl, which is data.eval
--run.output FOLDER => run.output FOLDER holds FOLDER/data, which is data.train
--run.output FOLDER/cache => run.output FOLDER/cache is FOLDER/cache, which is data.cache
--run.output FOLDER/cache/run => lies in FOLDER/cache, which is data.cache
--data.cache FOLDER/run/cache => holds FOLDER/run/cache, which is data.cache
--stage distill --distill.teacher MODEL --model.path OTHER --run.output MODEL => is MODEL, which is distill.teacher
--stage dpo --dpo.reference MODEL --model.path OTHER --run.output MODEL/run => lies in MODEL, which is dpo.reference
--model.path ADAPTER --run.output MODEL/run => lies in MODEL, which is model.path
--model.path ADAPTER --run.output ADAPTER => is ADAPTER, which is model.path
"""


@pytest.mark.parametrize("typed, sentence", rows_of(APART))
def test_an_output_in_what_the_run_reads_is_refused(typed, sentence, model, folder):
    places = {"MODEL": model, "FOLDER": folder}
    (folder / "link").symlink_to(model)
    if "OTHER" in typed:
        places["OTHER"] = demo_model(folder / "other")
    if "ADAPTER" in typed:
        places["ADAPTER"] = write_adapter(folder / "adapter", model)
    for name, place in places.items():
        typed, sentence = (text.replace(name, str(place)) for text in (typed, sentence))
    before = tree(model), tree(folder)
    with pytest.raises(ConfigError, match=re.escape(sentence) + "; give a folder apart"):
        check(folder, model, typed)
    assert (tree(model), tree(folder)) == before


def write_adapter(folder, base):
    """An adapter of rank 2 over a model, which changes nothing."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    width = read_json(base / "config.json")["hidden_size"]
    a, b = torch.zeros(2, width), torch.zeros(width, 2)
    write_weights(folder, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}.items())
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "base_model_name_or_path": str(base),
    }
    write_json(folder / "adapter_config.json", config)
    return folder


def test_its_own_folder_is_nobody_elses(model, folder):
    """Links that lead nowhere, or where nothing is yet, stop nothing either."""
    assert check(folder, model).disk_warning == ""
    for line in (
        "ln -s elsewhere run",
        "rm run; mkdir -p run/checkpoints; touch run/.lock",
        "ln -s nowhere run/checkpoints/step-4",
        """echo '{"stage": "sft"}' >run/config.json; ln -s nowhere run/export; touch run/notes""",
    ):
        shell(folder, line)
        assert check(folder, model).disk_warning == ""
    shell(folder, f"rm run/export; ln -s {model} run/export")
    with pytest.raises(ConfigError, match="run/export is .*/model, which is model.path"):
        check(folder, model)


@pytest.mark.parametrize(
    "name", ["run", "", "run/checkpoints/x", "run/export", "data/sub", "mine"]
)
def test_the_folder_of_sampling_servers_is_one_of_its_own(name, model, folder):
    shell(folder, "mkdir mine; touch mine/weights")
    typed = f"""--stage ppo --ppo.reward math:sqrt --ppo.sampler vllm+http://localhost:1
        --ppo.advantage reinforce++ --ppo.sampler_folder {folder}/{name}"""
    apart = "ppo.sampler_folder .*; give a folder apart"
    held = "mine holds weights, but ppo.sampler_folder needs a new or empty folder"
    with pytest.raises(ConfigError, match=held if name == "mine" else apart):
        check(folder, model, typed)
    assert check(folder, model, f"{typed} --ppo.sampler_folder {folder}/run/sampler").shape


def test_a_run_goes_on_with_the_folder_that_it_served_from_before(model, folder):
    served = f"{folder}/served"
    shell(folder, "mkdir run served; touch served/weights")
    typed = f"""--stage ppo --ppo.reward math:sqrt --ppo.sampler vllm+http://localhost:1
        --ppo.advantage reinforce++ --ppo.sampler_folder {served}"""
    for other in ("", f"{folder}/others"):
        written = {"stage": "ppo", "ppo": {"sampler_folder": other}}
        (folder / "run/config.json").write_text(json.dumps(written))
        with pytest.raises(ConfigError, match="served holds weights"):
            check(folder, model, typed)
    written["ppo"]["sampler_folder"] = served
    (folder / "run/config.json").write_text(json.dumps(written))
    assert check(folder, model, typed).shape


# what lies in the folder already, what is typed, and the refusal
OCCUPIED = """
mkdir run; touch run/notes => => run holds notes, but run.output needs a new or empty folder; choose another one, or
mkdir -p run/config.json => => run holds config.json, but run.output needs
mkdir run; echo mine >run/config.json => => run holds config.json, but run.output needs
mkdir run; touch run/metrics.jsonl => => run holds metrics.jsonl, but run.output needs
mkdir -p run/export; touch run/export/model.safetensors => => run holds export, but run.output needs a new
touch run => => run holds run, but run.output needs a new or empty folder
mkdir step-4; SAVED => --run.output FOLDER/step-4 => step-4 holds run.json, but run.output needs
mkdir step-4; SAVED => --run.output FOLDER/step-4/a/b => lies in FOLDER/step-4, which belongs to another run
mkdir e; echo '{"stage": "sft"}' >e/config.json => --run.output FOLDER/e/run => lies in FOLDER/e, which belongs to
cp -r TOKENIZER t => --run.output FOLDER/t --model.tokenizer FOLDER/t => which is model.tokenizer
"""


@pytest.mark.parametrize("row", rows_of(OCCUPIED))
def test_a_folder_that_holds_what_is_no_runs_is_no_output(row, model, folder):
    line, typed, sentence = (text.replace("FOLDER", str(folder)) for text in row)
    line = line.replace(
        "SAVED", """echo '{"format": 6, "files": {}, "digest": ""}' >step-4/run.json"""
    )
    shell(folder, line.replace("TOKENIZER", f"{DEMO}/data/tokenizer"))
    before = tree(folder)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check(folder, model, typed)
    assert tree(folder) == before


@pytest.mark.parametrize("base", ["../model", "./../model/", "~/model"])
def test_the_base_of_an_adapter_lies_where_its_file_says(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = demo_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model)
    settings = read_json(adapter / "adapter_config.json")
    write_json(adapter / "adapter_config.json", settings | {"base_model_name_or_path": base})
    assert base_folder(adapter).samefile(model)


# ---------------------------------------------------------------- what a run reads besides its checkpoint


def digests(folder, model, changes=""):
    inputs = check(folder, model, changes)
    data = SimpleNamespace(folder=folder, source_weights=[1.0])
    found = digests_of_inputs(inputs, data, None)
    return {k.removeprefix("the weights of "): v for k, v in [*found.items()][2:]}


FROZEN = """
 =>
--model.lora.rank 2 => model.path
--model.lora.rank 2 --model.init random =>
--stage dpo --dpo.reference live => model.path
--stage dpo --dpo.reference OTHER => dpo.reference
--stage dpo --dpo.reference OTHER --model.lora.rank 2 => model.path dpo.reference
--stage kto => model.path
--stage distill --distill.teacher OTHER => distill.teacher
--stage ppo --ppo.reward OTHER => model.path ppo.reward
--stage ppo --ppo.reward OTHER --ppo.reference OTHER => ppo.reference ppo.reward
--stage ppo --ppo.reward OTHER --ppo.kl_coefficient 0 => ppo.reward
"""


@pytest.mark.parametrize("typed, keys", rows_of(FROZEN))
def test_weights_that_no_checkpoint_holds_are_told_by_their_content(typed, keys, folder):
    """One weight of the last matrix changes; a copy elsewhere is the same, and other settings change nothing."""
    base, other = (demo_model(folder / name) for name in ("base", "other"))
    write_score(other)
    typed = typed.replace("OTHER", str(other))
    found = digests(folder, base, typed)
    assert [*found] == keys.split()
    copied = shutil.copytree(base, folder / "copied")
    assert digests(folder, copied, f"{typed} --optimizer.lr 1 --data.max_length 64") == found
    own = {"model.path"} & {*found}
    for place, changed in ((base, own), (other, {*found} - own)):
        path = place / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        again = digests(folder, base, typed)
        assert {key for key in found if again[key] != found[key]} == changed
        path.write_bytes(whole)


def test_the_code_of_a_reward_function_is_told_by_its_content(folder, monkeypatch):
    base, module = demo_model(folder / "base"), folder / "own_reward.py"
    monkeypatch.syspath_prepend(folder)
    module.write_text("def score(prompt, completion, row):\n    return 1.0\n")
    typed = (
        '--stage ppo --ppo.reward ["own_reward:score","http://localhost:9/score","math:fsum"]'
    )
    load_function("own_reward:score")  # as the checks of a run do
    first = digests(folder, base, typed)
    assert "the lines of own_reward:score" in first and not any("http" in x for x in first)
    assert digests(folder, base, typed) == first
    module.write_text("def score(prompt, completion, row):\n    return 2.0\n")
    again = digests(folder, base, typed)
    assert {key for key in first if again[key] != first[key]} == {
        "the lines of own_reward:score"
    }


def write_score(folder):
    """Give a language model the score of a reward model, too."""
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    save_file({**tensors, "score.weight": torch.ones(1, width)}, folder / "model.safetensors")


# ---------------------------------------------------------------- checkpoints


def run_section(output, typed=""):
    line = f"--stage pt --run.steps 2 --run.output {output} {typed}"
    return parse_command_line(line.split()).config.run


@pytest.fixture
def checkpoints(tmp_path):
    folder = tmp_path / "run/checkpoints"
    for name in ("step-2", "step-4", "step-6"):
        (folder / name).mkdir(parents=True)
        held = {"files": {"a": ""}, "step": int(name[5:])}
        write_run_state(folder / name, {key: {} for key in FIELDS} | held)
        (folder / name / "a").touch()
    return folder


def test_folders_of_other_names_are_no_checkpoints(checkpoints):
    for name in ("step-003", "step-²", "step-", "step--1", "step-x", "step-10.tmp"):
        shell(checkpoints, f"mkdir {name}; echo {{}} >{name}/run.json")
    assert [p.name for p in saved_checkpoints(checkpoints)] == ["step-2", "step-4", "step-6"]


def test_a_folder_in_the_way_of_a_checkpoint_is_refused_before_any_work(checkpoints):
    shell(checkpoints, "mkdir step-9; touch step-9/notes")
    with pytest.raises(
        ValueError, match="step-9 is in the way of a checkpoint and is none; move"
    ):
        resume_point(run_section(checkpoints.parent, "--run.resume auto"))


def test_a_linked_checkpoint_is_a_checkpoint(checkpoints, tmp_path):
    shell(checkpoints, f"mv step-6 {tmp_path}/moved; ln -s {tmp_path}/moved step-6")
    for given in ("auto", checkpoints / "step-6", tmp_path / "moved"):
        found = resume_point(run_section(checkpoints.parent, f"--run.resume {given}"))
        assert found.samefile(tmp_path / "moved")


# ---------------------------------------------------------------- paths


def test_paths_are_absolute_and_mean_the_same_in_every_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("llama3", "live", "never", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.toml").write_text(
        """
        stage = "ppo"
        model = {path = "rows", tokenizer = "~/t.json"}
        data = {train = ["rows", {path = "rows"}, "org/rows"], eval = "~/x.jsonl", chat_template = "llama3"}
        ppo = {reference = "live", reward = {"~/reward" = 2.0, "module:function" = 1.0}, sampler_folder = "served"}
        run = {output = "~/run", resume = "never", steps = 1}
        """
    )
    expected = {
        "model.path": "HERE/rows",
        "model.tokenizer": "HOME/t.json",
        "data.train": ["HERE/rows", {"path": "HERE/rows"}, "org/rows"],
        "data.eval": "HOME/x.jsonl",
        "data.chat_template": "llama3",
        "data.cache": "HOME/.cache/ulysses",
        "ppo.reward": {"HOME/reward": 2.0, "module:function": 1.0},
        "ppo.reference": "live",
        "ppo.sampler_folder": "HERE/served",
        "run.output": "HOME/run",
        "run.resume": "never",
    }
    assert_settings("--config run.toml", expected, tmp_path)
    typed = "--config=~/../run.toml --run.resume step-2 --run.output= --data.chat_template=~/a.jinja"
    expected |= {"run.resume": "HERE/step-2", "run.output": "HERE"}
    assert_settings(typed, expected | {"data.chat_template": "HOME/a.jinja"}, tmp_path)


def assert_settings(typed, expected, here):
    config = parse_command_line(typed.split()).config
    text = json.dumps({key: attrgetter(key)(config) for key in expected})
    assert (
        json.loads(text.replace(f"{here}/home", "HOME").replace(f"{here}", "HERE")) == expected
    )


def test_the_cache_removes_what_it_named_itself_and_nothing_else(tmp_path):
    shell(tmp_path, f"mkdir -p {'a' * 32}.node-1.tmp/x notes.tmp/x")
    build_once(tmp_path / ("b" * 32), lambda folder: (folder / "file").touch())
    assert {path.name for path in tmp_path.iterdir()} == {"notes.tmp", "b" * 32}


def test_an_export_tells_no_secret_of_an_address(tmp_path, model, monkeypatch, capsys):
    """The hub's address may hold a password, and the sentence about a base that is not there names the address."""
    adapter = write_adapter(tmp_path / "adapter", model)
    settings = read_json(adapter / "adapter_config.json")
    write_json(
        adapter / "adapter_config.json",
        settings | {"base_model_name_or_path": "nobody/nothing"},
    )
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://me:hunter2@localhost:1")
    assert main(["--merge", str(adapter), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "nobody/nothing" in said and "not found at http***" in said and "hunter2" not in said
