"""Exports work elsewhere: in transformers 4.57 and 5 and PEFT, and as the model, reference or reward of another run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.hf_format import WeightFiles, read_config
from tests.e2e.launch import ROOT, environment, metrics, ranks, tiny
from tests.e2e.read_export import read_all
from tests.model_folder import tiny_config, write_model
from tests.tiny_tokenizer import CHATML, write_rows, write_tokenizer
from ulysses.export import main
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.run.export_model import whole_folder
from ulysses.run.preflight import read_other
from ulysses.stages.base import AuxiliaryModel

SHAPE = ModelConfig.from_hf(
    tiny_config(vocab_size=272, initializer_range=0.1, eos_token_id=256)
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model as transformers 5 saves one: its only EOS never ends a turn, and it has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    write_model(folder, SHAPE)
    options: Any = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<|im_start|>"],
    }
    options["pad_token"] = {
        "__type": "AddedToken",
        "content": "<|endoftext|>",
        "special": True,
    }  # stays as it is
    write_tokenizer(folder, CHATML, eos_token="<|endoftext|>", **options)
    generation = {"eos_token_id": 256, "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def train(stage: str, base: Path, output: Path, **changes: Any) -> list[dict[str, float]]:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    row: dict[str, Any] = {"sft": {"messages": turns}}.get(stage) or {
        "prompt": "Why?", "chosen": "Because it is.", "rejected": "No."}  # fmt: skip
    settings = {
        "model__path": base, "model__init": "pretrained", "model__tokenizer": base, "data__chat_template": "chatml",
        "data__train": write_rows(output.parent / f"{stage}.jsonl", [row] * 4), "data__max_length": 64,
        "batch__examples": 2, "run__steps": 2, "optimizer__lr": 0.02, "optimizer__warmup": 0,
    }  # fmt: skip
    line = tiny(stage, output, output.parent / "cache", **(settings | changes))
    ranks(line, 1, output.parent / "logs").check()
    return metrics(output)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """The export of an SFT run with adapters; the run's folder is its parent."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    train("sft", base, run, model__lora__rank=4)
    return run / "export"


@pytest.fixture(scope="module")
def merged(adapters, tmp_path_factory):
    out = tmp_path_factory.mktemp("merged") / "out"
    assert command("--merge", adapters, out) == 0
    return out


def command(*arguments: Any) -> int:
    return main([*map(str, arguments)])


@pytest.fixture(scope="module")
def stretched(base, tmp_path_factory):
    """The export of a run that stretches the window."""
    run = tmp_path_factory.mktemp("stretched") / "run"
    train("sft", base, run, model__rope__type="yarn", model__rope__factor=4.0)
    return run / "export"


@pytest.fixture(scope="module")
def found(adapters, merged, stretched, transformers4):
    """What transformers 4.57 and 5 read from exports; tests/parity has every scaling and family as we write them."""
    folders = [adapters, merged, stretched]
    line = [sys.executable, ROOT / "tests/e2e/read_export.py", *folders]
    path = environment() | {"PYTHONPATH": str(transformers4)}
    text = subprocess.run(line, env=path, stdout=subprocess.PIPE, check=True).stdout
    old, new = json.loads(text.splitlines()[-1]), read_all(folders)
    assert old["version"].startswith("4.57") and new["version"].startswith("5.")
    return dict(zip(folders, zip(old["found"], new["found"], strict=True), strict=True))


def test_transformers_4_and_5_and_peft_read_the_same(base, adapters, merged, found):
    """Text, tokens, logits; and generation stops at the template's end of turn, which the base model never knew."""
    for export in (adapters, merged):
        one, two = found[export]
        assert torch.allclose(
            torch.tensor(one.pop("logits")), torch.tensor(two.pop("logits")), atol=1e-5
        )
        assert one == two and one["said"] == 1 and one["eos"] == "<|im_end|>"
        assert one["text"].startswith("<|im_start|>user\nHow?<|im_end|>")
        assert (export / "tokenizer.json").read_bytes() == (
            base / "tokenizer.json"
        ).read_bytes()
        before, after = (
            json.loads((f / "tokenizer_config.json").read_text()) for f in (base, export)
        )
        changed = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        more = {"additional_special_tokens": before.pop("extra_special_tokens"),
                "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip
        assert after == before | changed | more
        for name in ("config.json", "generation_config.json"):
            assert json.loads((export / name).read_text())["eos_token_id"] == [256, 258], name
        assert json.loads((export / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_stretched_window_is_the_same_in_transformers_4_and_5(stretched, found):
    """Our logits in both."""
    raw = json.loads((stretched / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert raw["rope_scaling"] == scaling and raw["rope_parameters"] == scaling | {
        "rope_theta": 1e4
    }
    assert raw["max_position_embeddings"] == 8192
    weights = WeightFiles(stretched)
    model = CausalLM(read_config(stretched))
    model.load_state_dict(
        {name: weights.read(name).view(t.shape) for name, t in weights.tensors.items()}
    )
    ids = torch.tensor(found[stretched][0]["ids"])
    batch = pack_shard([Sequence(ids, torch.ones(len(ids)))], ParallelMesh())
    logits = model.lm_head.weight @ model.model.norm(model.model(batch))[-1]
    for theirs in found[stretched]:
        torch.testing.assert_close(
            torch.tensor(theirs["logits"]), logits[:8].detach(), atol=1e-5, rtol=1e-5
        )


def test_an_adapter_exported_again_as_whole_weights_leaves_nothing_behind(
    base, adapters, merged
):
    run = shutil.copytree(adapters.parent, merged.parent / "again")
    (run / "export/stale.txt").touch()
    train("sft", base, run, model__lora__rank=4, model__lora__merge=True, run__resume="auto")
    names = {path.name for path in (run / "export").iterdir()}
    gone = {"adapter_model.safetensors", "adapter_config.json", "stale.txt"}
    assert "model.safetensors" in names and not gone & names
    assert [path.name for path in run.glob(".*")] == [".lock"]
    assert (
        command("--merge", adapters.parent / "checkpoints/step-2", merged.parent / "checkpoint")
        == 0
    )
    whole = load_file(run / "export/model.safetensors")
    for other in (merged, merged.parent / "checkpoint"):
        found = load_file(other / "model.safetensors")
        assert found.keys() == whole.keys() and all(
            torch.equal(found[name], whole[name]) for name in whole
        )


def test_an_adapter_is_a_model_and_a_reference(adapters, merged, tmp_path):
    """DPO from the adapter and from the merged weights begin with the same numbers and their own reference."""
    more = {"run__steps": 1, "dpo__sft_weight": 0.5}
    one, other = (
        train("dpo", folder, tmp_path / folder.name, dpo__reference=str(folder), **more)[0]
        for folder in (merged, adapters)
    )
    for key in ("loss", "grad_norm", "logps/chosen", "rewards/margins"):
        assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    assert abs(one["rewards/margins"]) < 1e-6


def test_a_reward_models_adapter_is_a_reward(base, tmp_path):
    train("rm", base, tmp_path / "run", model__lora__rank=2)
    folder = tmp_path / "run/export"
    found = read_other(AuxiliaryModel("reward", "ppo.reward", str(folder)))
    score = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert found.shape.vocab_size == 272 and torch.equal(
        found.files.read("score.weight"), score.view(-1)
    )


def test_every_export_has_a_model_card(base, adapters, merged):
    for folder in (adapters, merged):
        head, body = (folder / "README.md").read_text().removeprefix("---\n").split("\n---\n")
        assert head == f"base_model: {json.dumps(str(base))}\ntags: [ulysses-engine, sft]"
        (text,) = re.findall("```json\n(.*?)```", body, re.S)
        settings, numbers, versions = json.loads(text).values()
        assert (
            settings["data"]["train"] == ["sft.jsonl"]
            and settings["model"]["lora"]["rank"] == 4
        )
        assert numbers["loss"] > 0 and versions["torch"] == torch.__version__
        assert str(base.parent) not in body.replace(str(base), "")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with whole_folder(out) as new:
        (new / "first").touch()
    with pytest.raises(RuntimeError), whole_folder(out) as new:
        (new / "second").touch()
        raise RuntimeError
    out.rename(tmp_path / ".out.old.tmp")  # as a kill between the two renames leaves it
    with pytest.raises(RuntimeError), whole_folder(out):
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]
