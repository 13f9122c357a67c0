"""Rows, templates and model folders made to hurt: one sentence that names file and row, in bounded time and memory."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from models.arch import ModelConfig
from models.folders import read_config
from models.hf_format import WeightFiles
from models.writing import copy_side_files, write_weights
from tests import data_case, rows_of
from tests.model_folder import tiny_config, write_model
from tests.tiny_tokenizer import made_tokenizer
from ulysses.check.input_files import check_weights
from ulysses.config.section import ConfigError, error_context
from ulysses.data import DataError
from ulysses.data.read import chat as chat_template
from ulysses.data.serve.dataset import preview_examples
from ulysses.disk import write_json


def chat(answer, question="q"):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


GOOD = chat("a")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = "{% for a in range(99999) %}" * 3 + "X" + "{% endfor %}" * 3
ON_A_WORD = "{% if messages[0].content == 'hurt' %}LOOP{% endif %}"


CALL = '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "%s"}]}]}'
WEIGHT = '{"messages": [{"role": "assistant", "content": "a", "weight": %s}]}'


@pytest.mark.parametrize(
    "row, sentence",
    [
        (CALL % (r"{\"a\": " * 700 + "1" + "}" * 700), "is nested too deeply"),
        (CALL % ("[" * 700 + "]" * 700), "message 1 has a tool call .* JSON of an object but list"),
        (CALL % r"{\"a\": NaN}", "message 1 has a tool call .*: NaN is not a finite number"),
        (WEIGHT % f"1{'0' * 400}", "'weight' is 1000*, not a finite number"),
        (WEIGHT % "-Infinity", "is not valid JSON: -Infinity is not a finite number"),
    ],
)  # fmt: skip
def test_rows_that_hurt_are_named(open_rows, row, sentence):
    rows = f"{json.dumps(GOOD)}\n{row}\n"
    with pytest.raises(DataError, match=f"rows.jsonl row 2 {sentence}") as caught:
        open_rows(rows)
    assert len(str(caught.value)) < 500
    dropped = open_rows(rows, bad_rows="drop").report.dropped
    assert sum(dropped.values()) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_template_that_writes_without_end_is_stopped_and_names_its_row(
    tmp_path, open_rows, monkeypatch, workers
):
    monkeypatch.setattr(chat_template, "RENDER_CHARACTERS", 100_000)
    template = tmp_path / "loop.jinja"
    template.write_text(CHAT + ON_A_WORD.replace("LOOP", LOOP))
    rows = [GOOD] * (3000 if workers > 1 else 1) + [chat("a", "hurt")]
    sentence = rf"rows.jsonl row {len(rows)} runs the chat template without end: it was stopped after .* mend its loops"
    with pytest.raises(DataError, match=sentence):
        open_rows(rows, template=str(template), workers=workers)


# what a template ends with, and the reason that is told
ENDINGS = """
LOOP => runs the
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }} => maximum recursion depth
{{ 'x'.index('y') }} => substring not found
{{ 'x'.encode('zzz') }} => unknown encoding
""".replace("LOOP", LOOP)


@pytest.mark.parametrize("text, reason", rows_of(ENDINGS))
def test_a_template_that_fails_or_writes_without_end_is_refused_by_its_name(
    tmp_path, open_rows, monkeypatch, text, reason
):
    monkeypatch.setattr(chat_template, "RENDER_CHARACTERS", 100_000)
    template = tmp_path / "broken.jinja"
    template.write_text(CHAT + text)
    sentence = rf"chat template .*broken.jinja cannot render one question: .*{reason}"
    with pytest.raises(DataError, match=sentence):
        open_rows([GOOD], template=str(template))


@pytest.mark.parametrize("kind", ["sequence", "text"])
def test_a_row_on_which_the_tokenizer_breaks_is_named(tmp_path, open_rows, kind):
    tokenizer, hurt = made_tokenizer(tmp_path), "x" * 40
    evil = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = evil
    rows = {"text": [{"text": "a"}, {"text": hurt}], "sequence": [GOOD, chat(hurt), GOOD]}
    with pytest.raises(DataError, match="rows.jsonl row 2 cannot be tokenised"):
        open_rows(rows[kind], kind, tokenizer=tokenizer)


MEMORY = """
import sys
from tests.unit.test_hostile_input import opened_alone
print(opened_alone(sys.argv[1], int(sys.argv[2])))
"""
SIZES = 1_000_000, 4_000_000


def opened_alone(folder, size):
    """Tokenise a long row of the kind that the folder is named by; return by how many bytes the process grew."""
    place, said = Path(folder), "word " * (size // 5)
    rows = {"text": [{"text": said}, {"text": "a"}], "sequence": [chat(said), GOOD]}
    where = {"folder": place, "tokenizer": made_tokenizer(place / "tokenizer")}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data_case.open_rows(rows[place.name], place.name, 256, truncation="drop", **where)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.parametrize("kind", ["text", "sequence"])
def test_a_long_row_costs_a_bounded_multiple_of_its_size(tmp_path, kind):
    """The published bound is for 100 MB, of which what any first row costs, such as imports, is no part."""
    line = [sys.executable, "-c", MEMORY]
    started = [
        subprocess.Popen(
            [*line, tmp_path / str(size) / kind, str(size)], stdout=subprocess.PIPE
        )
        for size in SIZES
    ]
    least, most = (int(process.communicate()[0]) for process in started)
    multiple = (most - least) / (SIZES[1] - SIZES[0])
    assert multiple < 40, f"{multiple:.0f} times its size"


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite_are_refused(tmp_path, bad, dtype):
    tensor = torch.ones(3, 5, dtype=dtype)
    tensor[1, 2] = bad
    write_weights(tmp_path, [("a", tensor), ("b", torch.zeros(0, dtype=dtype))])
    files = WeightFiles(tmp_path)
    assert files.read("a", 0, 7).tolist() == [1.0] * 7 and files.read("b").numel() == 0
    sentence = r"^a in /.*/model.safetensors holds infinite weights, or some that are not numbers; download it again$"
    with pytest.raises(FloatingPointError, match=sentence):
        files.read("a")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_before_they_are_read(tmp_path, dtype):
    write_weights(tmp_path, [("a", torch.ones(3)), ("b", torch.ones(3, 5).to(dtype))])
    message = rf"^/.*/model.safetensors holds b as {dtype}, but quantised weights cannot be trained; use the model "
    with pytest.raises(ValueError, match=message):
        WeightFiles(tmp_path)


def test_links_out_of_a_model_folder_are_not_followed_and_the_hubs_are(tmp_path):
    secret, model, target = tmp_path / "secret", tmp_path / "model", tmp_path / "target"
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/a1"
    for folder in (model, target, blobs, snapshot):
        folder.mkdir(parents=True)
    secret.write_text("{}")
    (model / "tokenizer.json").symlink_to(secret)
    sentence = (
        r"/model/tokenizer.json is a link to .*/secret, outside of the model's folder; put"
    )
    with pytest.raises(ValueError, match=sentence):
        copy_side_files(model, target)
    assert not list(target.iterdir())
    (blobs / "b1").write_text("[1]")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/b1")
    copy_side_files(snapshot, target)
    copied = target / "tokenizer.json"
    assert copied.read_text() == "[1]" and not copied.is_symlink()


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o007, 0o660)])
def test_weight_files_have_the_modes_of_any_new_file(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_weights(tmp_path, [("a", torch.ones(3))])
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    "table", '{"a": "../../model.safetensors"} | {"a": "/etc/passwd"} | {"a": 5} | null | 7 | {}'.split(" | ")
)  # fmt: skip
def test_an_index_names_files_of_its_own_folder_only(tmp_path, table):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {table}}}')
    sentence = "index.json must hold a weight_map from parameters to names of files in its own folder|there is no 5 in"
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        WeightFiles(tmp_path)


IMPOSSIBLE = """
{"vocab_size": 1000000000000000000} => vocab_size = 1000000000000000000 but it must be .* below 16,777,216
{"num_hidden_layers": 10000000} => num_hidden_layers = 10000000 but it must be .* below 2,000
{"num_hidden_layers": 1999} => holds 2 layers, but its config.json has num_hidden_layers = 1999
"""


@pytest.mark.parametrize("changes, sentence", rows_of(IMPOSSIBLE))
def test_a_shape_that_cannot_be_is_told_at_once(tmp_path, changes, sentence):
    write_model(tmp_path, ModelConfig.from_hf(tiny_config()))
    write_json(tmp_path / "config.json", tiny_config(**json.loads(changes)))
    began = time.process_time()
    with pytest.raises(ValueError, match=sentence):
        check_weights(read_config(tmp_path), tmp_path, reward=False)
    assert time.process_time() - began < 5


def test_file_names_and_rows_cannot_steer_the_terminal(open_rows, tokenizer, capsys):
    """A line break forges no second error, and no escape sequence passes."""
    name = "a\nerror: all is lost\x1b[2J.jsonl"
    with pytest.raises(ConfigError) as caught, error_context("data"):
        raise DataError(f"{name} does not exist")
    assert str(caught.value) == r"data: a\nerror: all is lost\x1b[2J.jsonl does not exist"
    data = open_rows([chat("red \x1b[31m\x07 end\nnext")])
    preview_examples(data, tokenizer, 1)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "end\nnext" in shown
