"""A checkpoint that this run cannot continue is refused by its run.json, before any work."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.arch import ARCHITECTURES
from ulysses.training.checkpoint import FORMAT
from ulysses.training.command_line import check
from ulysses.training.config import Config
from ulysses.training.resume import find_checkpoint
from ulysses.training.section import ConfigError

SHAPE = ARCHITECTURES["llama3-8b"]


def config(output: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "stage": "dpo", "model": {"arch": "llama3-8b", "init": "random"}, "run": {"steps": 4, "output": str(output), "resume": "auto"},
    }  # fmt: skip
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return check(values)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What a run of DPO wrote, without its weights."""
    folder = tmp_path / "checkpoints/step-2"
    folder.mkdir(parents=True)
    own = config(tmp_path)
    chain = own.gradients.chain()
    state = {"format": FORMAT, "step": 2, "config": own.model_dump(mode="json"), "shape": SHAPE.to_hf(), "policies": chain.state_dict()}
    (folder / "run.json").write_text(json.dumps(state))
    return folder


def test_its_own_checkpoint_is_found(checkpoint: Path, tmp_path: Path) -> None:
    assert find_checkpoint(config(tmp_path, optimizer={"lr": 1.0}, parallel={"sequence_parallel_size": 4}), SHAPE) == checkpoint
    assert find_checkpoint(config(tmp_path / "elsewhere"), SHAPE) is None


@pytest.mark.parametrize(
    ("changes", "shape", "sentence"),
    [
        ({"stage": "sft"}, SHAPE, "is of stage 'dpo' but this run is 'sft'; use its stage or another run.output"),
        ({}, ARCHITECTURES["llama3.2-1b"], "is of another model: its hidden_size is 4096 and this run.s is 2048"),
        ({"model": {"lora": {"rank": 8}}}, SHAPE, "is of another model: its lora.rank is 0 and this run's is 8"),
        ({"gradients": {"policies": [{"policy": "zclip"}]}}, SHAPE, r"policies are .*'clip_global_norm'\] but this run has"),
    ],
)
def test_another_runs_checkpoint_is_refused(changes: dict[str, Any], shape: Any, sentence: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_checkpoint(config(tmp_path, **changes), shape)


def test_a_checkpoint_of_an_older_format_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    state = json.loads((checkpoint / "run.json").read_text())
    (checkpoint / "run.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(ConfigError, match="has checkpoint format 1, but this version reads format 2; continue it with the version"):
        find_checkpoint(config(tmp_path), SHAPE)
