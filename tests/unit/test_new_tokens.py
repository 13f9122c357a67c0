"""Tokens that a run adds: how their rows begin, and adapters with embeddings of their own in peft and transformers."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.folders import ADAPTER_WEIGHTS, CONFIG, LM_HEAD, VOCABULARY, read_config
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.lora import add_adapters, is_adapter, save_adapters
from tests.memory_case import packed
from tests.model_folder import demo_model, logps_there, tiny_config, write_model
from tests.zero_case import filled
from ulysses import export
from ulysses.check.input_files import initial_weights, read_tokenizer
from ulysses.config.command_line import check
from ulysses.config.schema import LoraSection, ModelSection
from ulysses.config.section import ConfigError
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.disk import write_json
from ulysses.options import stage_of

ROWS = {
    61: [3, 4, 9],
    62: [5],
    63: [5],
    10: [1, 2],
}  # the last one is known, but of no token yet
WIDTH = 16


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def start(request, tmp_path):
    """A model of 61 tokens as a folder, and the weights of one of 64 that begins with it."""
    tied = request.param
    small = tiny_config(vocab_size=61, hidden_size=WIDTH, tie_word_embeddings=tied)
    shape = ModelConfig.from_hf(small)
    write_model(tmp_path / "base", shape)
    grown = replace(shape, vocab_size=64)
    return InitialWeights(grown, 0, tmp_path / "base", new_rows=ROWS)


def test_rows_are_means_wherever_a_slice_begins(start):
    for name in VOCABULARY[: 1 if start.shape.tie_word_embeddings else 2]:
        old = start.files.read(name).view(61, WIDTH)
        want = torch.cat([old, torch.zeros(3, WIDTH)])
        for row, pieces in ROWS.items():
            want[row] = old[pieces].mean(0)
        for begin, stop in (
            (0, 1024),
            (5, 170),
            (155, 163),
            (975, 976),
            (977, 993),
            (980, 1024),
        ):
            out = torch.empty(stop - begin)
            start.fill(name, want.shape, begin, out)
            assert torch.equal(out, want.view(-1)[begin:stop])


def test_tokenizer_and_vocabulary_grow_together(tmp_path):
    folder = demo_model(tmp_path / "model")
    before = load_tokenizer(folder)
    added = [f"<t{i}>" for i in range(50)]
    given = {"path": str(folder), "add_tokens": added, "pad_vocabulary": 64}
    rest = {"stage": "pt", "run": {"steps": 1}, "data": {"train": "x"}}
    config = check({"model": given, **rest})
    base = read_config(folder)
    found = read_tokenizer(stage_of(config), base, folder)
    shape, tokenizer, place, template = found
    assert len(before) + 50 == len(tokenizer) > base.vocab_size and shape.vocab_size % 64 == 0
    _, weights = initial_weights(stage_of(config), shape, tokenizer, template, folder, place)
    assert [*weights.new_rows] == [*range(len(before), shape.vocab_size)]
    for text, row in zip(added, range(len(before), len(tokenizer))):
        assert tokenizer.encode(f"a{text}a", add_special_tokens=False)[1] == row
        assert weights.new_rows[row] == before.encode(text, add_special_tokens=False)
    for wrong in (["<t1>", "<t1>"], [before.eos_token], ["<t1>", ""]):
        config = check({"model": given | {"add_tokens": wrong}, **rest})
        with pytest.raises(ConfigError, match="model.add_tokens: .* has an empty token"):
            read_tokenizer(stage_of(config), base, folder)
    # the rows of the tokens that this tokenizer has beyond the model's would never be filled
    small = replace(base, vocab_size=len(before) - 12)
    with pytest.raises(ConfigError, match=rf"has {len(before)} tokens but the model's vocab"):
        read_tokenizer(stage_of(check({"model": given, **rest})), small, folder)


@torch.no_grad()
def test_adapters_with_their_own_embeddings_are_those_of_peft(start, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    lora = LoraSection(rank=2, targets=["q_proj", "down_proj"], train=["embeddings"])
    model = filled(add_adapters(CausalLM(start.shape), lora), start).eval()
    trained = {n: p for n, p in model.named_parameters() if is_adapter(n, lora.train)}
    assert trained.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_adapters(
        folder, trained, ModelSection(path=str(start.files.folder), lora=lora), reward=False
    )
    write_json(folder / CONFIG, start.shape.to_hf())
    tokens = torch.tensor([1, 61, 10, 5, 63, 60, 62, 0])
    ours = model(packed(tokens)).logps[:7]
    base = AutoModelForCausalLM.from_pretrained(start.files.folder)
    base.resize_token_embeddings(64, mean_resizing=False)
    peft = PeftModel.from_pretrained(base, folder).eval()
    assert_close(logps_there(peft, tokens), ours, rtol=1e-5, atol=1e-5)
    assert export.main(["--merge", str(folder), str(tmp_path / "out")]) == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(logps_there(whole, tokens), ours, rtol=1e-5, atol=1e-5)
    if start.shape.tie_word_embeddings:  # what this engine could not train
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        tensors[f"base_model.model.{LM_HEAD}"] += 1
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        with pytest.raises(ValueError, match="another lm_head than embedding"):
            WeightFiles(folder)
