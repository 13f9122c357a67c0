"""[model.rope] and the window: what is refused, what mends it, and what the planned model is then."""

import json
import re
import shutil
from pathlib import Path

import pytest

from models.arch import ModelConfig, RopeScaling
from tests.model_folder import tiny_config, write_model
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.run.dry_run import dry_run, inspect
from ulysses.run.preflight import prepare

ROOT = Path(__file__).resolve().parents[2]
TINY = tiny_config(model_type="qwen2", vocab_size=704, max_position_embeddings=128)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN, DYNAMIC = {"type": "yarn", "factor": 4.0}, {"type": "dynamic", "factor": 2.0}


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model", ModelConfig.from_hf(TINY))
    return tmp_path / "model"


def edit(model, **changes):
    """Change config.json, and leave nothing of the rotary tables that we write."""
    raw = json.loads((model / "config.json").read_text()) | {"rope_parameters": None} | changes
    (model / "config.json").write_text(json.dumps(raw))
    return model


def config(model, *settings, stage="sft", toml=""):
    """A demo stage from a pretrained model, as a TOML file in the dotted style."""
    data = ROOT / "configs/demo/data"
    path = model.parent / "run.toml"
    path.write_text(f"""
        stage = "{stage}"
        model.path = "{model}"
        model.tokenizer = "{data / "tokenizer"}"
        model.dtype = "float32"
        data.train = "{data / f"{stage}_train.jsonl"}"
        data.cache = "{model.parent / "cache"}"
        run.output = "{model.parent / "run"}"
        run.steps = 2
        {toml}""")
    return parse_command_line(["--config", str(path), *settings]).config


def rope(settings):
    return [f"--model.rope.{setting}" for setting in settings.split()]


def prepared(model, *settings, **more):
    return prepare(config(model, *settings, **more), 1)


@pytest.mark.parametrize("length, factor", [(129, "2.0"), (256, "2.0"), (500, "4.0")])
def test_a_sequence_beyond_the_window_is_refused_with_what_mends_it(length, factor, model):
    assert prepared(model, "--data.max_length", "128").shape.max_position_embeddings == 128
    asked = "--data.max_length", str(length)
    with pytest.raises(ConfigError) as error:
        prepared(model, *asked)
    message = str(error.value)
    given = f"data.max_length: sequences may have {length} tokens but the window of the model has 128; set"
    assert message.startswith(given)
    lines = re.findall(r"model\.rope\.(?:type|factor) = [\w.\"]+", message)
    assert lines == ['model.rope.type = "yarn"', f"model.rope.factor = {factor}"]
    shape = prepared(model, *asked, toml="\n".join(lines)).shape
    assert shape.rope_scaling == RopeScaling("yarn", float(factor), 128)
    assert shape.max_position_embeddings == 128 * float(factor)
    for line in lines:  # each of them is needed
        with pytest.raises(ConfigError):
            prepared(model, *asked, toml=line)
    (insist,) = re.findall(r"model\.rope\.extrapolate = true", message)
    shape = prepared(model, *asked, toml=insist).shape
    assert shape.rope_scaling is None and shape.max_position_embeddings == length


def test_ppo_counts_its_answers(model):
    more = [
        "--ppo.reward",
        "examples.demo_data:politeness_reward",
        "--ppo.max_new_tokens",
        "65",
    ]
    with pytest.raises(
        ConfigError, match="sequences may have 129 tokens but the window of the model has 128"
    ):
        prepared(model, "--data.max_length", "64", *more, stage="ppo")
    assert (
        prepared(
            model, "--data.max_length", "63", *more, stage="ppo"
        ).shape.max_position_embeddings
        == 128
    )


def test_a_reference_has_a_window_of_its_own(model):
    asked = ["--data.max_length", "256", *rope("type=yarn factor=2")]
    other = ["--dpo.reference", str(shutil.copytree(model, model.parent / "other"))]
    assert prepared(model, *asked, stage="dpo").shape.max_position_embeddings == 256
    with pytest.raises(
        ConfigError,
        match='dpo.reference: .* of the model has 128; set rope_scaling.type = "yarn"',
    ):
        prepared(model, *asked, *other, stage="dpo")
    edit(model.parent / "other", rope_scaling={"type": "yarn", "factor": 2.0})
    assert (
        prepared(model, *asked, *other, stage="dpo")
        .others["dpo.reference"]
        .shape.rope_scaling.factor
        == 2
    )


def test_random_weights_have_no_window_and_their_export_has_the_trained_one(model):
    found = prepared(model, "--data.max_length", "700", "--model.init", "random").shape
    assert found.rope_scaling is None and found.to_hf()["max_position_embeddings"] == 700
    arch = parse_command_line(
        """--stage sft --model.arch llama3-8b --model.init random --run.steps 1 --data.max_length
        9000 --model.rope.type linear --model.rope.factor 2 --model.config.rope_theta 1e6""".split()
    ).config
    shape = prepare(arch, 1, []).shape
    assert shape.rope_scaling == RopeScaling("linear", 2.0, 8192)
    assert (shape.max_position_embeddings, shape.rope_theta) == (16384, 1e6)


@pytest.mark.parametrize(
    "file, settings, scaling, window",
    [
        # config.json alone: the files of Qwen2.5 keep max_position_embeddings as it was
        (YARN, "", RopeScaling("yarn", 4.0, 128), 512),
        (YARN | {"original_max_position_embeddings": 32}, "", RopeScaling("yarn", 4.0, 32), 128),
        ({"type": "linear", "factor": 2.5}, "", RopeScaling("linear", 2.5, 128), 320),
        (LLAMA3, "", RopeScaling("llama3", 8.0, 16, 1.0, 4.0), 128),
        # changed by the configuration: a factor stretches the window before any scaling
        (None, "type=yarn factor=3 beta_fast=16 truncate=false attention_factor=1.5",
         RopeScaling("yarn", 3.0, 128, beta_fast=16.0, truncate=False, attention_factor=1.5), 384),
        (None, "type=yarn factor=2 original_max_position_embeddings=64", RopeScaling("yarn", 2.0, 64), 128),
        (YARN | {"mscale": 0.5}, "factor=8", RopeScaling("yarn", 8.0, 128, mscale=0.5), 1024),
        (YARN | {"mscale": 0.5}, "type=linear", RopeScaling("linear", 4.0, 128), 512),
        (LLAMA3, "type=yarn factor=32", RopeScaling("yarn", 32.0, 16), 512),
        (LLAMA3, "factor=16", RopeScaling("llama3", 16.0, 16, 1.0, 4.0), 128),
        (LLAMA3, "type=default", None, 16),
        (None, "type=llama3 factor=8 low_freq_factor=1 high_freq_factor=4",
         RopeScaling("llama3", 8.0, 128, 1.0, 4.0), 128),
        (DYNAMIC, "type=yarn", RopeScaling("yarn", 2.0, 128), 256),
        (YARN, "theta=5000", RopeScaling("yarn", 4.0, 128), 512),
    ],
)  # fmt: skip
def test_the_configuration_lies_over_the_file(file, settings, scaling, window, model):
    edit(model, rope_scaling=file)
    shape = prepared(model, "--data.max_length", "16", *rope(settings)).shape
    assert (shape.rope_scaling, shape.max_position_embeddings) == (scaling, window)
    assert shape.rope_theta == (5000 if "theta" in settings else 10000)
    assert ModelConfig.from_hf(shape.to_hf()) == shape


def test_the_dry_run_and_the_samples_show_window_and_factor(model, capsys):
    stretched = ["--data.max_length", "200", *rope("type=yarn factor=2")]
    line = "window: 256 tokens (yarn rope, factor 2 over 128 tokens, theta 10,000)\n"
    path = str(model.parent / "run.toml")
    config(model)
    assert dry_run(*parse_command_line(["--config", path, *stretched, "--dry-run"])) == 0
    assert line in capsys.readouterr().out
    inspect(parse_command_line(["--config", path, *stretched]).config, 1)
    assert line in capsys.readouterr().out
    inspect(parse_command_line(["--config", path, "--data.max_length", "128"]).config, 1)
    assert "window: 128 tokens (default rope, theta 10,000)\n" in capsys.readouterr().out


def test_the_readmes_example_fits_its_model(tmp_path, capsys):
    """Qwen2.5's chat models have a window of 32,768 tokens, also where only their published shape is known."""
    for page in ("README.md", "README.zh-CN.md"):
        (toml,) = re.findall(
            r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
        )
        (tmp_path / "long.toml").write_text(toml)
        asked = [
            "--config",
            str(tmp_path / "long.toml"),
            "--model.path",
            str(tmp_path / "Qwen2.5-7B-Instruct"),
        ]
        dry_run(*parse_command_line([*asked, "--dry-run", "--gpus", "8"]))
        assert (
            "window: 65,536 tokens (yarn rope, factor 2 over 32,768 tokens"
            in capsys.readouterr().out
        )
