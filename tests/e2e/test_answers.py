"""`ulysses chat`, `generate` and `score`: what transformers says of the same folder, and refusals in one sentence."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from models.arch import ModelConfig
from models.folders import CONFIG
from models.scored import RewardModel
from models.writing import write_weights
from tests import rows_of
from tests.model_folder import demo_model, init_weights
from ulysses.answers import main
from ulysses.data.read.chat import template_text
from ulysses.disk import write_json

QUESTIONS = ["Where is the lamp?", "Who owns the brown table, and what is it made of?", "Hi"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A language model, a reward model, and rows for both."""
    place = tmp_path_factory.mktemp("answers")
    demo_model(place / "model")
    (place / "model/chat_template.jinja").write_text(template_text(None, "llama3"))
    shape = ModelConfig.from_hf(json.loads((place / "model" / CONFIG).read_text()))
    reward = RewardModel(shape)
    init_weights(reward)
    shutil.copytree(place / "model", place / "cold")
    write_json(place / "cold/generation_config.json", {"do_sample": True, "temperature": 0.0})
    shutil.copytree(
        place / "model", place / "reward", ignore=shutil.ignore_patterns("*.safetensors")
    )
    write_weights(place / "reward", reward.named_parameters())
    write_json(place / "reward" / CONFIG, shape.to_hf(reward=True))
    rows = [
        {"messages": [{"role": "user", "content": text}], "id": i}
        for i, text in enumerate(QUESTIONS)
    ]
    pairs = [
        {"prompt": QUESTIONS[0], "chosen": "In the hall.", "rejected": "No."},
        {"prompt": "Hi", "response": "Ahoy!"},
    ]
    for name, content in (("rows", rows), ("pairs", pairs)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
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
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n\nnot read"))
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
generate model UP short => mismatched_keys ["('model.layers.0.mlp.up_proj.weight', torch.Size([351, 128]), torch.Size(
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
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if fault == "pickled":
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    rows = "rows.jsonl" if command == "generate" else "pairs.jsonl"
    assert main([command, str(folder), str(place / rows), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and sentence.replace("PLACE", str(folder)) in said
    assert not (tmp_path / "out").exists()


REFUSED = """
score model rows.jsonl out => is a LlamaForCausalLM; ulysses score takes a reward model
chat reward => is a LlamaForSequenceClassification
generate model rows.jsonl rows.jsonl => rows.jsonl exists already; name another file
generate absent/model absent.jsonl out => absent.jsonl does not exist
generate absent/model rows.jsonl out => there is no folder
generate model rows.jsonl out --tokens 0 => --tokens is 0 but must be at least 1
generate cold rows.jsonl out => strictly positive
"""


@pytest.mark.parametrize("words, sentence", rows_of(REFUSED))
def test_refusals(words, sentence, place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def held():
        return {path: path.is_file() and path.read_bytes() for path in place.iterdir()}

    before = held()
    assert main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and sentence in said
    assert held() == before
