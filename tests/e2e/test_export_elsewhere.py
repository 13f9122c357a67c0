"""Exports work elsewhere: in transformers 4.57 and 5 and PEFT, and as the reward of another run."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from models.arch import ModelConfig
from models.folders import read_json
from tests.e2e.launch import metrics, python, ranks, tiny
from tests.e2e.read_export import read_all
from tests.model_folder import tiny_config, write_model
from tests.tiny_tokenizer import CHATML, write_rows, write_tokenizer
from ulysses.check.other_models import read_other
from ulysses.config.command_line import check
from ulysses.export import main
from ulysses.run.export_model import model_card, whole_folder
from ulysses.stages.base import AuxiliaryModel

SHAPE = ModelConfig.from_hf(
    tiny_config(vocab_size=272, initializer_range=0.1, eos_token_id=256)
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model as transformers 5 saves one: its only EOS never ends a turn, and it has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    write_model(folder, SHAPE)
    # stays as it is
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    options = {"tokenizer_class": "TokenizersBackend", "pad_token": pad}
    options["extra_special_tokens"] = ["<|im_start|>"]
    write_tokenizer(folder, CHATML, eos_token="<|endoftext|>", **options)
    generation = {"eos_token_id": 256, "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def train(stage, base, output, typed=""):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    pair = {"prompt": "Why?", "chosen": "Because it is.", "rejected": "No."}
    row = {"messages": turns} if stage == "sft" else pair
    data = write_rows(output.parent / f"{stage}.jsonl", [row] * 4)
    usual = f"""
    --model.path {base} --model.init pretrained --model.tokenizer {base} --data.chat_template chatml
    --data.train {data} --data.max_length 64
    --batch.examples 2 --run.steps 2 --optimizer.lr 0.02 --optimizer.warmup 0
    """
    line = tiny(stage, output, usual + typed, output.parent / "cache")
    ranks(line, 1)
    return metrics(output)


def read(file):
    return read_json(file)


def merge(source, out):
    assert main(["--merge", str(source), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """The export of an SFT run with adapters; the run's folder is its parent."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    train("sft", base, run, "--model.lora.rank 4")
    return run / "export"


@pytest.fixture(scope="module")
def merged(adapters, tmp_path_factory):
    return merge(adapters, tmp_path_factory.mktemp("merged") / "out")


@pytest.fixture(scope="module")
def found(adapters, merged, transformers4):
    """What transformers 4.57 and 5 read from exports; tests/parity has every scaling and family as we write them."""
    folders = [adapters, merged]
    done = python("tests/e2e/read_export.py", *folders, PYTHONPATH=str(transformers4)).check()
    old, new = json.loads(done.stdout.splitlines()[-1]), read_all(folders)
    assert old["version"].startswith("4.57") and new["version"].startswith("5.")
    return dict(zip(folders, zip(old["found"], new["found"], strict=True), strict=True))


def test_transformers_4_and_5_and_peft_read_the_same(base, adapters, merged, found):
    """Text, tokens, logits; and generation stops at the template's end of turn, which the base model never knew."""
    for export in (adapters, merged):
        one, two = found[export]
        logits = [torch.tensor(each.pop("logits")) for each in (one, two)]
        assert torch.allclose(*logits, atol=1e-5)
        assert one == two and one["said"] == 1 and one["eos"] == "<|im_end|>"
        assert one["text"].startswith("<|im_start|>user\nHow?<|im_end|>")
        texts = [(folder / "tokenizer.json").read_bytes() for folder in (base, export)]
        assert texts[0] == texts[1]
        before, after = (read(folder / "tokenizer_config.json") for folder in (base, export))
        extra = before.pop("extra_special_tokens")
        assert after == before | {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
            "additional_special_tokens": extra,
            "model_input_names": ["input_ids", "attention_mask"],
        }  # fmt: skip
        for name in ("config.json", "generation_config.json"):
            assert read(export / name)["eos_token_id"] == [256, 258], name
        assert read(export / "generation_config.json")["temperature"] == 0.6


def test_an_adapter_exported_again_as_whole_weights_lies_beside_the_adapters(
    base, adapters, merged
):
    run = shutil.copytree(adapters.parent, merged.parent / "again")
    whole = "--model.lora.rank 4 --model.lora.merge true --run.resume auto"
    train("sft", base, run, whole)
    whole = {path.name for path in (run / "export-step-2").iterdir()}
    of_adapters = {"adapter_model.safetensors", "adapter_config.json"}
    assert "model.safetensors" in whole and not of_adapters & whole
    assert of_adapters < {path.name for path in (run / "export").iterdir()}
    assert [path.name for path in run.glob(".*")] == [".lock"]
    other = merge(adapters.parent / "checkpoints/step-2", merged.parent / "checkpoint")
    assert "loss" not in (other / "README.md").read_text()
    first, *others = (
        load_file(f / "model.safetensors") for f in (run / "export-step-2", merged, other)
    )
    for found in others:
        assert found.keys() == first.keys()
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_a_reward_models_adapter_is_a_reward(base, tmp_path):
    train("rm", base, tmp_path / "run", "--model.lora.rank 2")
    folder = tmp_path / "run/export"
    found = read_other(AuxiliaryModel("reward", "ppo.reward", str(folder)))
    score = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert found.shape.vocab_size == 272
    assert torch.equal(found.files.read("score.weight"), score.view(-1))


def test_every_export_has_a_model_card(base, adapters, merged):
    """That of a merged model repeats no number that was measured before."""
    head, body = (adapters / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    assert head == f"base_model: {json.dumps(base.name)}\ntags: [ulysses-engine, sft]"
    (text,) = re.findall("```json\n(.*?)```", body, re.S)
    settings, numbers, versions = json.loads(text).values()
    assert settings["data"]["train"] == ["sft.jsonl"]
    assert settings["model"]["lora"]["rank"] == 4
    assert numbers["loss"] > 0 and versions["torch"] == torch.__version__
    assert numbers["nll"] > 0 and not {"step", "run", "tokens", "seconds", "lr"} & {*numbers}
    assert settings["data"]["max_length"] > 0 and re.search(r"\d+ steps of \d+ examples", body)
    assert str(base.parent) not in head + body and "/tmp" not in body
    card = (merged / "README.md").read_text()
    assert "loss" not in card and str(base.parent) not in card
    assert f"base_model: {json.dumps(base.name)}\n" in card and "written in float32" in card


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
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "first"}


def test_an_adapter_is_not_merged_into_a_folder_that_it_is_read_from(base, adapters, capsys):
    before = sorted(path.name for path in adapters.iterdir())
    for out in (adapters, adapters / "merged", base / "merged", base):
        assert main(["--merge", str(adapters), str(out)]) == 2
        said = capsys.readouterr().err
        assert "read for it; give a folder apart" in said or "new or empty folder" in said
        assert sorted(path.name for path in adapters.iterdir()) == before


def test_a_card_names_a_reward_model_without_its_folder(tmp_path):
    """The folder is the end of a metric's name."""
    line = {"step": 1, "loss": 0.5, "objective/scores//home/me/runs/rm/export": 1.5}
    line["eval/objective/scores//home/me/runs/rm/export"] = line[
        "eval/objective/scores/m:f"
    ] = 2.5
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    config = check(
        {
            "stage": "ppo",
            "model": {"path": "org/name"},
            "ppo": {"reward": ["/home/me/runs/rm/export", "m:f"]},
            "run": {"steps": 1, "output": str(tmp_path)},
        }
    )
    card = model_card(config, 1)
    assert '"objective/scores/export": 1.5' in card and "/home" not in card
    assert '"eval/objective/scores/export": 2.5' in card and '"org/name"' in card
    assert '"eval/objective/scores/m:f": 2.5' in card


def test_a_card_says_no_number_of_an_earlier_step_to_be_of_the_last_one(tmp_path):
    """An evaluation, or a step without good answers, may lie before the checkpoint that is exported."""
    lines = {"step": 4, "loss": 2.0, "eval/loss": 3.0}, {"step": 5, "loss": 1.0}, {"step": 6}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = {"steps": 9, "output": str(tmp_path)}
    card = model_card(check({"stage": "sft", "model": {"path": "org/name"}, "run": run}), 5)
    (text,) = re.findall("```json\n(.*?)```", card, re.S)
    assert json.loads(text)["newest metrics up to step 5"] == {"loss": 1.0, "eval/loss": 3.0}


def test_a_card_counts_the_answers_of_a_step():
    """Of the answers to the prompts of a rollout, which batch.examples counts, each step trains a share."""
    ppo = {"reward": ["m:f"], "minibatches": 2, "advantage": "group", "answers_per_prompt": 3}
    given = {"stage": "ppo", "model": {"path": "org/name"}, "ppo": ppo, "run": {"steps": 4}}
    card = model_card(check(given | {"batch": {"examples": 6}}), 4)
    assert "\n4 steps of 9 examples.\n" in card
