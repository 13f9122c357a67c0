"""`ulysses chat`, `generate` and `score`: what transformers says of the same folder, and refusals in one sentence."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from models.arch import ModelConfig
from models.folders import CONFIG, read_json
from models.scored import RewardModel
from models.writing import GENERATION, write_weights
from tests import rows_of
from tests.e2e.launch import tiny
from tests.e2e.test_stage_runs import on_ranks
from tests.harness import PATIENCE, full
from tests.model_folder import demo_model, init_weights
from tests.tiny_tokenizer import write_rows
from ulysses.answers import Trained, main
from ulysses.data.read.chat import template_text
from ulysses.disk import write_json

QUESTIONS = ["Where is the lamp?", "Who owns the brown table, and what is it made of?", "Hi"]


# models of which no answer can be had; no logit divided by the temperature of the last one is finite
FOLDERS = json.loads("""{
    "nameless": {"config": {"architectures": null}},
    "empty": {"config": {"architectures": []}},
    "unknown": {"config": {"architectures": ["FooForCausalLM"]}},
    "no-model": {"config": {"architectures": ["pipeline"]}},
    "two": {"base": "reward", "config": {"num_labels": 2, "id2label": {"0": "a", "1": "b"}}},
    "tagger": {"base": "reward", "config": {"architectures": ["LlamaForTokenClassification"]}},
    "word": {"generation": {"eos_token_id": "</s>"}},
    "words": {"generation": {"eos_token_id": [2, "2"]}},
    "tables": {"generation": {"eos_token_id": {"a": 1}}},
    "beyond": {"generation": {"eos_token_id": [657, 704]}},
    "beyond-it": {"config": {"eos_token_id": 704}},
    "cold": {"generation": {"do_sample": true, "temperature": 0.0}},
    "frozen": {"generation": {"do_sample": true, "temperature": 1e-300}}
}""")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A language model, a reward model, and rows for both."""
    place = tmp_path_factory.mktemp("answers")
    demo_model(place / "model")
    (place / "model/chat_template.jinja").write_text(template_text(None, "llama3"))
    shape = ModelConfig.from_hf(read_json(place / "model" / CONFIG))
    reward = RewardModel(shape)
    init_weights(reward)
    shutil.copytree(
        place / "model", place / "reward", ignore=shutil.ignore_patterns("*.safetensors")
    )
    write_weights(place / "reward", reward.named_parameters())
    write_json(place / "reward" / CONFIG, shape.to_hf(reward=True))
    for name, changes in FOLDERS.items():
        variant(place, name, **changes)
    rows = [
        {"messages": [{"role": "user", "content": text}], "id": i}
        for i, text in enumerate(QUESTIONS)
    ]
    pairs = [
        {"prompt": QUESTIONS[0], "chosen": "In the hall.", "rejected": "No."},
        {"prompt": "Hi", "response": "Ahoy!"},
    ]
    write_rows(place / "rows.jsonl", rows)
    write_rows(place / "pairs.jsonl", pairs)
    return place


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.no_grad()
def test_answers_are_those_of_transformers(place, tmp_path, monkeypatch, capsys):
    given = str(place / "model"), str(place / "rows.jsonl"), str(tmp_path / "out.jsonl")
    assert main(["generate", *given, "--tokens", "6", "--greedy"]) == 0
    model, tokenizer = (
        kind.from_pretrained(given[0]) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    for row, question in zip(lines(tmp_path / "out.jsonl"), QUESTIONS, strict=True):
        chat = [{"role": "user", "content": question}]
        tokens = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**tokens, max_new_tokens=6, do_sample=False)[
            0, tokens["input_ids"].shape[1] :
        ]
        assert row["response"] == tokenizer.decode(said, skip_special_tokens=True)
        assert row["messages"] == chat and row["id"] == QUESTIONS.index(question)
    capsys.readouterr()
    monkeypatch.setattr(
        "sys.stdin", io.StringIO(f"{QUESTIONS[0]}\n{QUESTIONS[1]}\udcff\n\nnot read")
    )
    assert main(["chat", given[0], "--tokens", "6", "--greedy"]) == 0
    first, *_ = lines(tmp_path / "out.jsonl")
    shown = capsys.readouterr().out
    assert shown.startswith(f"> {first['response']}".rstrip()) and shown.count("> ") == 3


@torch.no_grad()
def test_scores_are_those_of_transformers(place, tmp_path):
    given = str(place / "reward"), str(place / "pairs.jsonl"), str(tmp_path / "out.jsonl")
    assert main(["score", *given]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(given[0], num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(given[0])
    for row, count in zip(lines(tmp_path / "out.jsonl"), (2, 1), strict=True):
        answers = [row[key] for key in ("chosen", "rejected", "response") if key in row]
        assert len(row["scores"]) == count == len(answers)
        for answer, score in zip(answers, row["scores"]):
            chat = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": answer},
            ]
            text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            assert score == pytest.approx(model(tokens).logits.item(), abs=1e-5)


UP, SCORE = "model.layers.0.mlp.up_proj.weight", "score.weight"
# what happens to one of the weights, and what is said instead of an answer
WEIGHTS = """
generate model UP gone => does not fit its config.json: missing_keys ['model.layers.0.mlp.up_proj.weight']; check that
generate model UP twice => does not fit its config.json: unexpected_keys ['model.layers.0.mlp.up_proj.weight2']; check
generate model UP short => its model.layers.0.mlp.up_proj.weight is torch.Size([351, 128]), but config.json says
generate model UP cut => PLACE cannot be used: Error while deserializing header
generate model UP nan => model.layers.0.mlp.up_proj.weight in PLACE holds infinite weights, or some that are not numbers
generate model UP inf => model.layers.0.mlp.up_proj.weight in PLACE holds infinite weights
generate model UP pickled => there is no model.safetensors in PLACE; download it again, or convert the model to safeten
score reward SCORE gone => does not fit its config.json: missing_keys ['score.weight']; check that
score reward SCORE twice => unexpected_keys ['score.weight2']
score reward SCORE nan => score.weight in PLACE holds infinite weights
score reward SCORE huge => the scores of a row are [
"""


@pytest.mark.parametrize("words, sentence", rows_of(WEIGHTS))
def test_weights_that_are_not_the_models_give_no_answers(
    words, sentence, place, tmp_path, capsys
):
    command, kind, name, fault = words.split()
    name = {"UP": UP, "SCORE": SCORE}[name]
    folder = shutil.copytree(place / kind, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    tensor = weights[name]
    if fault == "gone":
        del weights[name]
    elif fault == "twice":
        weights[f"{name}2"] = tensor.clone()
    elif fault == "short":
        weights[name] = tensor[:-1].contiguous()
    elif fault == "huge":
        tensor.fill_(3e38)
    elif fault in ("nan", "inf"):
        tensor[0, 0] = float(fault)
    file = folder / "model.safetensors"
    save_file(weights, file, {"format": "pt"})
    if fault == "cut":
        os.truncate(file, file.stat().st_size // 2)
    if fault == "pickled":
        torch.save(weights, folder / "pytorch_model.bin")
        file.unlink()
    rows = "rows.jsonl" if command == "generate" else "pairs.jsonl"
    assert main([command, str(folder), str(place / rows), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and sentence.replace("PLACE", str(folder)) in said
    assert not (tmp_path / "out").exists()


def variant(place, name, base="model", config=(), generation=()):
    """Copy a model's folder with changes of its config.json, and with a generation_config.json."""
    folder = shutil.copytree(place / base, place / name)
    write_json(folder / CONFIG, read_json(folder / CONFIG) | dict(config))
    write_json(folder / GENERATION, dict(generation))
    return folder


@pytest.fixture
def generate(place, tmp_path, capsys):
    """Return the responses of a folder to the questions, and what is said."""

    def answers(folder, *words):
        out = tmp_path / f"{folder.name}.jsonl"
        given = str(folder), str(place / "rows.jsonl"), str(out)
        assert main(["generate", *given, "--tokens", "6", *words]) == 0
        said = capsys.readouterr()
        return [row.get("response") for row in lines(out)], said.err + said.out

    return answers


def test_settings_of_the_folder_are_followed_or_told(place, generate):
    plain, said = generate(place / "model")
    assert GENERATION not in said
    others = {
        "num_return_sequences": 3,
        "num_beams": 4,
        "return_dict_in_generate": True,
        "stop_strings": ["a"],
    }
    rows, said = generate(variant(place, "several", generation=others))
    assert rows == plain and len(plain) == 3
    [line] = [x for x in said.splitlines() if GENERATION in x]
    assert '"num_return_sequences": 3' in line and '"num_beams": 4' in line
    assert generate(variant(place, "no beam", generation={"num_beams": 0}))[0] == plain
    assert generate(variant(place, "tuples", config={"return_dict": False}))[0] == plain
    wishes = {"do_sample": True, "temperature": 0.5, "top_k": 3}
    drawn = variant(place, "drawn", generation=wishes)
    rows, said = generate(drawn)
    assert rows != plain and 'answers follow {"do_sample": true, "temperature": 0.5' in said
    assert generate(variant(place, "hot", generation={"temperature": "hot"}))[0] == plain
    drawn = drawn.rename(place / "drawn greedily")
    assert generate(drawn, "--greedy")[0] == plain


def test_answers_end_at_the_window(place, generate, monkeypatch, capsys):
    plain, _ = generate(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    chat = [{"role": "user", "content": QUESTIONS[1]}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    longest = len(asked)
    for more in (3, 0):
        name, shape = f"window {more}", {"max_position_embeddings": longest + more}
        rows, said = generate(variant(place, name, config=shape))
        if more:
            assert (
                len(tokenizer.encode(plain[1])) == 6 + 1
                and len(tokenizer.encode(rows[1])) == 3 + 1
            )
            assert plain[1].startswith(rows.pop(1))
        assert rows == plain[::2]
    assert f"dropped, the model's window of {longest} tokens is too short for it: 1 (" in said
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTIONS[0]}\n{QUESTIONS[0]}\n"))
    assert main(["chat", str(place / "window 0"), "--tokens", "90"]) == 2
    assert "window" in capsys.readouterr().err.splitlines()[-1]


def test_equal_and_unranked_answers_are_scored(place, tmp_path):
    rows = [
        {"prompt": "Hi", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Hi", "completions": ["Yes.", "No.", "Yes."]},
        {"prompt": "Hi", "completions": ["Yes.", "No."], "ranks": [1, 1]},
        {"prompt": "Hi", "completions": ["Yes."]},
        {"prompt": "Hi", "response": "Yes.", "label": False},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}], "weight": 0},
    ]  # fmt: skip
    given = write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["score", str(place / "reward"), given, str(tmp_path / "out.jsonl")]) == 0
    yes, no = (lines(tmp_path / "out.jsonl")[1]["scores"][i] for i in (0, 1))
    assert [row["scores"] for row in lines(tmp_path / "out.jsonl")] == [
        [yes, yes], [yes, no, yes], [yes, no], [yes], [yes], [yes]
    ]  # fmt: skip


def test_a_prompt_gets_the_variables_of_its_run(place, tmp_path, monkeypatch):
    """What `data.chat_template_kwargs` was in the run is in its exports, its checkpoints and what is merged of them."""
    template = (
        "{% if mood is defined %}Be {{ mood }}. {% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}END"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    ).replace("END", AutoTokenizer.from_pretrained(place / "model").eos_token)
    conversation = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ahoy!"},
    ]
    data = write_rows(tmp_path / "train.jsonl", [{"messages": conversation}] * 4)
    typed = (
        f"--run.steps 1 --run.save_every 1 --model.lora.rank 2 --data.train {data} --data.eval [] "
        f"--model.path {place / 'model'} --model.init pretrained"
    )
    line = tiny("sft", tmp_path / "run", typed)
    line += ["--data.chat_template", template, "--data.chat_template_kwargs", '{"mood": "gay"}']
    on_ranks(1, line)
    monkeypatch.setattr(
        Trained,
        "answers",
        lambda self, *asked, **_: [self.tokenizer.decode(tokens) for tokens in asked],
    )
    shutil.copytree(tmp_path / "run/export", tmp_path / "elsewhere")
    for name in ("run", "run/export", "run/checkpoints/step-1", "elsewhere"):
        out = tmp_path / f"{Path(name).name}.jsonl"
        assert (
            main(["generate", str(tmp_path / name), str(place / "rows.jsonl"), str(out)]) == 0
        )
        assert all(">Be gay. [user] " in row["response"] for row in lines(out)), name
        assert len(lines(out)) == 3


def test_a_run_without_checkpoints_answers_by_its_export_and_home_is_home(
    place, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    run, given = tmp_path / "run", ["~/run", "~/rows.jsonl", "~/out.jsonl", "--tokens", "2"]
    shutil.copytree(place / "model", run / "export")
    shutil.copy(place / "rows.jsonl", tmp_path)
    write_json(run / CONFIG, {"stage": "sft"})
    assert main(["generate", *given]) == 0 and len(lines(tmp_path / "out.jsonl")) == 3
    shutil.rmtree(run / "export")
    (tmp_path / "out.jsonl").unlink()
    assert main(["generate", *given]) == 2
    assert f"there is no folder {run}/export" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, *full((signal.SIGHUP,))])
def test_a_chat_that_is_killed_leaves_no_merged_model(place, tmp_path, number):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapters"
    )
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ulysses.cli", "chat", str(tmp_path / "adapters")],
        stdin=-1, stdout=-1, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        # tests that were started with nohup ignore SIGHUP, and so would the chat
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.read(2) == b"> " and any((tmp_path / "tmp").glob("*/export"))
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert not [*(tmp_path / "tmp").glob("*/export")] and process.returncode == 128 + number


REFUSED = """
score model rows.jsonl out => is a LlamaForCausalLM; ulysses score takes a reward model
chat reward => is a LlamaForSequenceClassification
generate model rows.jsonl rows.jsonl => rows.jsonl exists already; name another file
generate absent/model rows.jsonl no/such/out => there is no folder PLACE/no/such for out; make it
score absent/model pairs.jsonl rows.jsonl/out => there is no folder PLACE/rows.jsonl for out
generate absent/model absent.jsonl out => absent.jsonl does not exist
generate absent/model rows.jsonl out => there is no folder
generate model rows.jsonl out --tokens 0 => --tokens is 0 but must be at least 1
generate nameless pairs.jsonl out => nameless cannot be used: it is a model without architectures in config.json
generate empty pairs.jsonl out => empty cannot be used: it is a model without architectures in config.json
generate unknown pairs.jsonl out => unknown cannot be used: it is a FooForCausalLM; ulysses score takes
generate no-model pairs.jsonl out => no-model cannot be used: it is a pipeline; ulysses score takes
score nameless pairs.jsonl out => nameless cannot be used: it is a model without architectures in config.json
score two pairs.jsonl out => a reward model, a ...ForSequenceClassification of one label (this has 2)
score tagger pairs.jsonl out => tagger cannot be used: it is a LlamaForTokenClassification; ulysses score takes
generate word pairs.jsonl out => eos_token_id in generation_config.json is '</s>', but must be a number, or a list
generate words pairs.jsonl out => is [2, '2'], but must be a number, or
generate tables pairs.jsonl out => is {'a': 1}, but must be a number
generate beyond pairs.jsonl out => is [657, 704], but must be a number, or a list of numbers, below the vocab_size 704
generate beyond-it pairs.jsonl out => eos_token_id in config.json is 704, but must be a number
generate cold rows.jsonl out => strictly positive
generate frozen rows.jsonl out => probability tensor contains
"""


@pytest.mark.parametrize("words, sentence", rows_of(REFUSED))
def test_refusals(words, sentence, place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def held():
        return {path: path.is_file() and path.read_bytes() for path in place.iterdir()}

    before = held()
    assert main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and sentence.replace("PLACE", str(place)) in said
    assert held() == before
