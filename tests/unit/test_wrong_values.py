"""Values that no model, adapter or setting can have: one sentence before any work, whichever field holds them."""

import json
import math
import re

import pytest
import torch

from models.arch import ModelConfig
from models.folders import folder_with, read_json
from models.hf_format import WeightFiles
from models.writing import write_weights
from tests import rows_of
from tests.e2e.launch import tiny
from tests.model_folder import demo_model, tiny_config, write_model
from ulysses.check.preflight import prepare
from ulysses.check.setting_checks import check_settings
from ulysses.config.command_line import check, known_keys, parse_command_line, put
from ulysses.config.section import ConfigError
from ulysses.disk import write_json

# as Python and as JSON write them
WRONG = [
    eval(text, {"inf": math.inf, "nan": math.nan})
    for text in """0 -1 1e300 inf nan 10**30 "4" "x" True [] [1,"x"] {} {"a":1} [[1]] 10**6 1.5""".split()
]
MORE = {
    "config.json": "rope_parameters rope_scaling quantization_config dual_chunk_attention_config sliding_window "
    "head_dim auto_map",
    "tokenizer_config.json": "eos_token pad_token model_max_length chat_template tokenizer_class",
    "generation_config.json": "eos_token_id pad_token_id temperature",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = demo_model(tmp_path_factory.mktemp("model"))
    (model / "generation_config.json").write_text("{}")
    return model


def refusal(typed, folder):
    """Return the sentence that refuses a run, or nothing; any other error fails the test."""
    try:
        prepare(parse_command_line(tiny("sft", folder / "run", typed)).config, 1)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 800
        return str(error)
    return ""


# what config.json is given, and what is said
FIELDS = r"""
{"eos_token_id": [1, "x"]} => eos_token_id = [1, 'x'] but it must be the number of a token; correct
{"eos_token_id": [1, null]} => eos_token_id = [1, None] but it must be the number of a token
{"eos_token_id": 1000000} => eos_token_id 1000000 but vocab_size
{"pad_token_id": 1000000} => pad_token_id 1000000 but vocab_size
{"eos_token_id": -1} => eos_token_id -1 but vocab_size
{"bos_token_id": [1]} => bos_token_id = [1] but it must be the number of a token
{"rope_theta": 0} => rope_theta = 0 and, in another place or under another name, 10000.0; correct one of them
{"rope_theta": Infinity} => rope_theta = inf and, in another place or under another name, 10000.0
{"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}, "rope_parameters": null} => \
rope_type = 'yarn' and, in another place or under another name, 'linear'
{"rope_parameters": {"rope_theta": Infinity}, "rope_theta": null} => rope_theta = inf but it must be a number above 0 \
and below 1e+38;
{"rope_parameters": {"rope_theta": 0}, "rope_theta": null} => rope_theta = 0 but it must be a number above 0
{"rope_scaling": "x"} => rope_scaling = 'x' but it must be a table
{"tie_word_embeddings": "no"} => tie_word_embeddings = 'no' but it must be true or false
{"rms_norm_eps": 1e300} => rms_norm_eps = 1e+300 but it must be a number above 0 and below 1;
"""


@pytest.fixture
def refused_with(model, tmp_path):
    """Return what refuses a run on a model with these fields in one of its files."""

    def refused(file, fields):
        before = (model / file).read_text()
        (model / file).write_text(json.dumps(json.loads(before) | fields))
        try:
            return refusal(f"--model.init pretrained --model.path {model}", tmp_path)
        finally:
            (model / file).write_text(before)

    return refused


@pytest.mark.parametrize("fields, sentence", rows_of(FIELDS))
def test_a_wrong_field_of_config_json_is_named(refused_with, fields, sentence):
    assert sentence in refused_with("config.json", json.loads(fields))


@pytest.mark.parametrize("file", MORE)
def test_no_wrong_field_of_a_model_folder_ends_in_a_trace(model, refused_with, file):
    """A value that is taken is one that the engine does not read, or one that fits."""
    fields = dict.fromkeys([*read_json(model / file), *MORE[file].split()])
    for place, field in enumerate(fields):
        for value in WRONG[place % 5 :: 5]:
            refused_with(file, {field: value})


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base"}


NO_ADAPTER = """
r                       => 0 -1 "4" null 1.0 true [4] {} 1000000000000000000000000000000 NaN
lora_alpha              => -1 "4" true [4] NaN Infinity
base_model_name_or_path => 5 ["base"] {"a":1} true
use_rslora              => "no" 1 []
revision                => 5 []
target_modules          => 5 {"a":1} true
target_parameters       => 5 "x"
modules_to_save         => 5 "embed_tokens"
"""


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in rows_of(NO_ADAPTER) for value in values.split()],
)
def test_a_wrong_field_of_an_adapter_is_named(tmp_path, field, value):
    write_weights(tmp_path, [("base_model.model.a.lora_A.weight", torch.ones(2, 2))])
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(ADAPTER | {field: json.loads(value)})
    )
    with pytest.raises(
        ValueError, match=f"adapter_config.json has {field} = .*, which no adapter of PEFT has;"
    ):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("length", [1, 3])
def test_an_adapter_that_lies_on_itself_is_refused(tmp_path, length):
    folders = [tmp_path / str(n) for n in range(length)]
    for folder, base in zip(folders, folders[1:] + folders[:1]):
        folder.mkdir()
        write_json(
            folder / "adapter_config.json", ADAPTER | {"base_model_name_or_path": str(base)}
        )
        (folder / "adapter_model.safetensors").touch()
    for read in (WeightFiles, lambda folder: folder_with(folder, "config.json")):
        with pytest.raises(
            ValueError, match="an adapter of itself; write the base model's there"
        ) as caught:
            read(folders[0])
        assert str(caught.value).startswith("base_model_name_or_path in /")


def test_an_adapter_on_an_adapter_has_its_base(tmp_path):
    write_model(tmp_path / "base", ModelConfig.from_hf(tiny_config()))
    for name, base in (("one", "base"), ("two", "one")):
        (tmp_path / name).mkdir()
        own = ADAPTER | {"base_model_name_or_path": str(tmp_path / base)}
        write_json(tmp_path / name / "adapter_config.json", own)
    assert folder_with(tmp_path / "two", "config.json") == tmp_path / "base"


REQUIRED = {"ppo": {"reward": "math:sqrt"}, "distill": {"teacher": "m"}}
NUMBERS = {
    key: info for key, info in known_keys().items()
    if re.search(r"\b(int|float)\b", str(info.annotation)) and key != "ppo.reward"
}  # fmt: skip


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_is_bounded_or_refused_in_one_sentence(key):
    values = {"stage": "sft", "model": {"path": "m"}, "run": {"steps": 3}}
    if (table := key.split(".")[0]) in ("pt", "distill", "rm", "dpo", "kto", "ppo"):
        values |= {"stage": table, **{t: dict(v) for t, v in REQUIRED.items() if t == table}}
    for value in (*WRONG[:6], -1e300, -math.inf, 2**53 + 2, "1e999", "nan"):
        put(values, key, value)
        try:
            config = check(values)
            check_settings(config, 1)
        except ConfigError as error:
            assert key.split(".")[-1] in str(error), value
            assert max(map(len, str(error).splitlines())) < 700
        else:
            assert abs(float(value)) <= 2**53, (key, value)


def test_more_processes_than_gpus_are_refused_before_one_of_them_finds_none(monkeypatch):
    config = check({"stage": "sft", "model": {"path": "m"}, "run": {"steps": 3}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_settings(config, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    # without a launcher the number is that of all processes, which may be on several nodes
    check_settings(config, 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="has 4 processes but its number of GPUs is 2; start"):
        check_settings(config, 4)


def test_a_setting_that_is_nested_too_deeply_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.train is .*neither JSON nor TOML"):
        parse_command_line(["--data.train", "[" * 20000 + "]" * 20000])


@pytest.mark.parametrize(
    "deep", ["run.steps = " + "[" * 5000 + "]" * 5000, "run" + ".a" * 3000 + " = 1"]
)
def test_a_file_that_is_nested_too_deeply_is_refused(deep, tmp_path):
    (tmp_path / "a.toml").write_text(deep)
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["--config", str(tmp_path / "a.toml")])
    assert re.search("deep|depth", str(caught.value))
