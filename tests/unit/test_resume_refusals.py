"""A checkpoint that this run cannot continue is refused by its run.json, before any work."""

import json

import pytest

from models.arch import ARCHITECTURES
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.run.checkpoint import FORMAT
from ulysses.run.optim import gradient_policies
from ulysses.run.preflight import prepare


def config(output, changes=""):
    """A run by shape alone; tokenizer and data are absent."""
    line = f"""--stage dpo --model.arch llama3-8b --model.init random --run.steps 4
        --run.output {output} --run.resume auto {changes}"""
    return parse_command_line(line.split()).config


@pytest.fixture
def checkpoint(tmp_path):
    """What a run of DPO wrote, without its weights."""
    folder = tmp_path / "checkpoints/step-2"
    folder.mkdir(parents=True)
    own = config(tmp_path)
    state = {
        "format": FORMAT,
        "step": 2,
        "config": own.model_dump(mode="json"),
        "shape": ARCHITECTURES["llama3-8b"].to_hf(),
        "policies": gradient_policies(own.gradients).state_dict(),
    }
    write_json(folder / "run.json", state)
    return folder


def test_its_own_checkpoint_is_found(checkpoint, tmp_path):
    own = config(tmp_path, "--optimizer.lr 1 --parallel.sequence_parallel_size 4")
    assert prepare(own, 4, []).resume_from == checkpoint
    assert prepare(config(tmp_path / "elsewhere"), 1, []).resume_from is None


REFUSED = {
    "--stage sft":
        r"run.resume: the run that wrote .*step-2 had stage 'dpo' but this run has 'sft'; set the same, or another",
    "--model.arch llama3.2-1b": "had hidden_size 4096 but this run has 2048",
    "--model.rope.type yarn --model.rope.factor 2": "had rope_scaling None but this run has {'rope_type'",
    "--model.rope.theta 1e6": "had rope_theta 500000.0 but this run has 1000000.0",
    "--model.lora.rank 8": "had model.lora.rank 0 but this run has 8",
    '--gradients.policies [{"policy":"zclip"}]': r"policies are .*'clip_global_norm'\] but this run has",
}  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED)
def test_another_runs_checkpoint_is_refused(changes, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=REFUSED[changes]) as caught:
        prepare(config(tmp_path, changes), 1, [])
    assert caught.value.key == "run.resume"


def test_a_checkpoint_of_an_older_format_is_refused(checkpoint, tmp_path):
    state = json.loads((checkpoint / "run.json").read_text())
    write_json(checkpoint / "run.json", {**state, "format": 1})
    sentence = (
        "has checkpoint format 1, but this version reads format 4; continue it with the version"
    )
    with pytest.raises(ConfigError, match=sentence):
        prepare(config(tmp_path), 1, [])
