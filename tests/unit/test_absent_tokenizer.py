"""A model folder without a tokenizer: what is missing is said, and the plan, which needs none, is printed."""

import pytest

from tests.e2e.launch import ROOT
from tests.model_folder import demo_model
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.run.dry_run import dry_run


@pytest.fixture
def folder(tmp_path):
    model = demo_model(tmp_path / "model")
    for path in [*model.glob("tokenizer.json"), *model.glob("*.jinja")]:
        path.unlink()
    return model


@pytest.mark.parametrize("config_is_left", [True, False])
@pytest.mark.parametrize("template", ["tokenizer", "chatml"])
def test_what_is_missing_is_said(tmp_path, folder, template, config_is_left, capsys):
    if not config_is_left:
        for path in folder.glob("tokenizer*"):
            path.unlink()
    line = f"""--stage sft --model.path {folder} --data.chat_template {template} --run.steps 1
        --run.output {tmp_path}/run --model.dtype float32 --data.max_length 512
        --data.train {ROOT}/configs/demo/data/sft_train.jsonl""".split()
    sentence = rf"^model.tokenizer: {folder} holds no tokenizer \(tokenizer.json, vocab.json, .*; copy the model's"
    with pytest.raises(ConfigError, match=sentence):
        prepare(parse_command_line(line).config, 1)
    config, options = parse_command_line([*line, "--dry-run", "--gpus", "8"])
    assert dry_run(config, options) == 3
    shown = capsys.readouterr().out
    assert "holds no tokenizer" in shown and "GiB" in shown and "no chat template" not in shown
