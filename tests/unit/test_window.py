"""[model.rope] and the window: what is refused, what mends it, and what the planned model is then."""

import json
import re
import shutil

import pytest

from models.arch import ModelConfig
from models.families import RopeScaling
from models.folders import read_json
from tests import ROOT, rows_of
from tests.model_folder import tiny_config, write_model
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.run.dry_run import dry_run, inspect

TINY = tiny_config(model_type="qwen2", vocab_size=704, max_position_embeddings=128)


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model", ModelConfig.from_hf(TINY))
    return tmp_path / "model"


def edit(model, **changes):
    """Change config.json, and leave nothing of the rotary tables that we write."""
    raw = read_json(model / "config.json") | {"rope_parameters": None} | changes
    write_json(model / "config.json", raw)
    return model


def rope(settings):
    return " ".join(f"--model.rope.{setting}" for setting in settings.split())


@pytest.fixture
def config(model):
    """A function from what is typed to a demo stage's run from the pretrained model."""

    def config(line, stage="sft", toml=""):
        data, path = ROOT / "configs/demo/data", model.parent / "run.toml"
        path.write_text(f"""
            stage = "{stage}"
            model.path = "{model}"
            model.tokenizer = "{data / "tokenizer"}"
            model.dtype = "float32"
            data.train = "{data / f"{stage}_eval.jsonl"}"
            data.cache = "{model.parent / "cache"}"
            run.output = "{model.parent / "run"}"
            run.steps = 2
            {toml}""")
        return parse_command_line(f"--config {path} {line}".split())

    return config


@pytest.fixture
def prepared(config):
    return lambda *asked, **more: prepare(config(*asked, **more).config, 1)


@pytest.mark.parametrize("length, factor", [(129, "2.0"), (256, "2.0"), (500, "4.0")])
def test_a_sequence_beyond_the_window_is_refused_with_what_mends_it(prepared, length, factor):
    assert prepared("--data.max_length 128").shape.max_position_embeddings == 128
    asked = f"--data.max_length {length}"
    with pytest.raises(ConfigError) as error:
        prepared(asked)
    message = str(error.value)
    given = f"data.max_length: sequences may have {length} tokens but the window of the model has 128; set"
    assert message.startswith(given)
    lines = re.findall(r"model\.rope\.(?:type|factor) = [\w.\"]+", message)
    assert lines == ['model.rope.type = "yarn"', f"model.rope.factor = {factor}"]
    shape = prepared(asked, toml="\n".join(lines)).shape
    assert shape.rope_scaling == RopeScaling("yarn", float(factor), 128)
    assert shape.max_position_embeddings == 128 * float(factor)
    for line in lines:  # each of them is needed
        with pytest.raises(ConfigError):
            prepared(asked, toml=line)
    (insist,) = re.findall(r"model\.rope\.extrapolate = true", message)
    shape = prepared(asked, toml=insist).shape
    assert shape.rope_scaling is None and shape.max_position_embeddings == length


def test_ppo_counts_its_answers(prepared):
    line = "--ppo.reward examples.demo_data:politeness_reward --ppo.max_new_tokens 65 --data.max_length"
    sentence = "have 129 tokens but the window of the model has 128.*data.max_length or ppo.max_new_tokens, or"
    with pytest.raises(ConfigError, match=sentence):
        prepared(f"{line} 64", "ppo")
    assert prepared(f"{line} 63", "ppo").shape.max_position_embeddings == 128


def test_a_reference_has_a_window_of_its_own(prepared, model):
    other = shutil.copytree(model, model.parent / "other")
    stretched = f"--data.max_length 256 {rope('type=yarn factor=2')}"
    assert prepared(stretched, "dpo").shape.max_position_embeddings == 256
    asked = f"{stretched} --dpo.reference {other}"
    sentence = (
        'dpo.reference: .* of the model has 128; set rope_scaling.type = "yarn" and rope_scaling.factor = 2.0 in its '
        "config.json, lower"
    )
    with pytest.raises(ConfigError, match=sentence):
        prepared(asked, "dpo")
    edit(other, rope_scaling={"type": "yarn", "factor": 2.0})
    shape = prepared(asked, "dpo").others["dpo.reference"].shape
    assert shape.rope_scaling.factor == 2


def test_random_weights_have_no_window_and_their_export_has_the_trained_one(prepared):
    found = prepared("--data.max_length 700 --model.init random").shape
    assert found.rope_scaling is None and found.to_hf()["max_position_embeddings"] == 700
    line = """--stage sft --model.arch llama3-8b --model.init random --run.steps 1 --data.max_length
        9000 --model.rope.type linear --model.rope.factor 2 --model.config.rope_theta 1e6"""
    shape = prepare(parse_command_line(line.split()).config, 1, []).shape
    assert shape.rope_scaling == RopeScaling("linear", 2.0, 8192)
    assert (shape.max_position_embeddings, shape.rope_theta) == (16384, 1e6)


# config.json's rope_scaling, what the configuration sets, and the RopeScaling and the window that come out of both
LAID_OVER = """
{"type": "yarn", "factor": 4.0} => => {"rope_type": "yarn", "factor": 4, "original": 128} => 512
{"type": "yarn", "factor": 4.0, "original": 32} => => {"rope_type": "yarn", "factor": 4, "original": 32} => 128
{"type": "linear", "factor": 2.5} => => {"rope_type": "linear", "factor": 2.5, "original": 128} => 320
LLAMA3 => => LLAMA3 => 128
null => type=yarn factor=3 beta_fast=16 truncate=false attention_factor=1.5 => {"rope_type": "yarn", "factor": 3, \
"original": 128, "beta_fast": 16, "truncate": false, "attention_factor": 1.5} => 384
null => type=yarn factor=2 original_max_position_embeddings=64 => {"rope_type": "yarn", "factor": 2, "original": 64} \
=> 128
{"type": "yarn", "factor": 4.0, "mscale": 0.5} => factor=8 => {"rope_type": "yarn", "factor": 8, "original": 128, \
"mscale": 0.5} => 1024
{"type": "yarn", "factor": 4.0, "mscale": 0.5} => type=linear => \
{"rope_type": "linear", "factor": 4, "original": 128} => 512
LLAMA3 => type=yarn factor=32 => {"rope_type": "yarn", "factor": 32, "original": 16} => 512
LLAMA3 => factor=16 => {"rope_type": "llama3", "factor": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0, \
"original": 16} => 128
LLAMA3 => type=default => null => 16
null => type=llama3 factor=8 low_freq_factor=1 high_freq_factor=4 => {"rope_type": "llama3", "factor": 8, \
"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 128} => 128
{"type": "dynamic", "factor": 2.0} => type=yarn => {"rope_type": "yarn", "factor": 2, "original": 128} => 256
{"type": "yarn", "factor": 4.0} => theta=5000 => {"rope_type": "yarn", "factor": 4, "original": 128} => 512
"""
LLAMA3 = """{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 16}"""


@pytest.mark.parametrize("row", rows_of(LAID_OVER))
def test_the_configuration_lies_over_the_file(prepared, row, model):
    """The files of Qwen2.5 keep max_position_embeddings as it was; a factor in the configuration stretches it first."""
    long = '"original_max_position_embeddings"'
    row = [cell.replace("LLAMA3", LLAMA3).replace('"original"', long) for cell in row]
    file, settings, scaling, window = row
    edit(model, rope_scaling=json.loads(file))
    shape = prepared(f"--data.max_length 16 {rope(settings)}").shape
    expected = json.loads(scaling)
    assert shape.rope_scaling == (expected and RopeScaling(**expected))
    assert shape.max_position_embeddings == int(window)
    assert shape.rope_theta == (5000 if "theta" in settings else 10000)
    assert ModelConfig.from_hf(shape.to_hf()) == shape


def test_the_dry_run_and_the_samples_show_window_and_factor(config, capsys):
    stretched = f"--data.max_length 200 {rope('type=yarn factor=2')}"
    line = "window: 256 tokens (yarn rope, factor 2 over 128 tokens, theta 10,000)\n"
    assert dry_run(*config(f"{stretched} --dry-run")) == 0
    assert line in capsys.readouterr().out
    inspect(config(stretched).config, 1)
    assert line in capsys.readouterr().out
    inspect(config("--data.max_length 128").config, 1)
    assert "window: 128 tokens (default rope, theta 10,000)\n" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readmes_example_fits_its_model(page, tmp_path, capsys):
    """Qwen2.5's chat models have a window of 32,768 tokens, also where only their published shape is known."""
    (toml,) = re.findall(r"(?ms)^```toml\n(.*?)^```", (ROOT / page).read_text())
    assert len(toml.splitlines()) <= 10
    path = tmp_path / "long.toml"
    path.write_text(toml)
    line = f"--config {path} --model.path {tmp_path}/Qwen2.5-7B-Instruct --dry-run --gpus 8"
    dry_run(*parse_command_line(line.split()))
    said = "window: 65,536 tokens (yarn rope, factor 2 over 32,768 tokens"
    assert said in capsys.readouterr().out
