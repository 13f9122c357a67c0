"""A quantised base: its bytes, folders of bitsandbytes, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.hf_format import WeightFiles
from models.lora import add_adapters, is_adapter, save_adapters
from models.quantized import QuantizedLinear, pack, packed_parts, unpack
from tests.model_folder import tiny_config, write_model
from ulysses.config.command_line import parse_command_line
from ulysses.config.schema import LoraSection, ModelSection
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.export import main
from ulysses.parallel.batch import Sequence, pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.run.build import InitialWeights
from ulysses.run.preflight import prepare

SHAPE = ModelConfig.from_hf(tiny_config())
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("rows, columns", [(8, 64), (48, 32), (300, 96)])
def test_nf4_is_what_bitsandbytes_makes(rows, columns):
    whole = torch.randn(rows, columns)
    data = pack("nf4", whole)
    assert data.numel() == sum(packed_parts("nf4", whole.shape))
    # as rows of one block, where bitsandbytes is right on CPUs
    codes, state = quantize_4bit(
        whole.view(-1, 64), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    theirs = dequantize_4bit(codes, state).view(rows, columns)
    assert_close(unpack("nf4", data, whole.shape, torch.float32), theirs)
    error = (theirs - whole).abs().max() / whole.abs().max()
    assert 0.01 < error < 0.2


def test_fp8_has_a_scale_for_each_row():
    whole = torch.randn(8, 64) * torch.logspace(-4, 4, 8)[:, None]
    near = unpack("fp8", pack("fp8", whole), whole.shape, torch.float32)
    assert ((near - whole).abs().amax(1) <= whole.abs().amax(1) / 16).all()


@pytest.fixture
def packed_folder(tmp_path):
    """Return a model whose layers' matrices bitsandbytes has quantised, with the original beside it."""
    write_model(tmp_path / "original", SHAPE)
    weights = {}
    for name, weight in load_file(tmp_path / "original/model.safetensors").items():
        if name.endswith("_proj.weight"):
            weight, state = quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            weights |= {
                f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()
            }
        weights[name] = weight
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    method = json.loads("""{
        "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"
    }""")
    write_json(folder / "config.json", tiny_config(quantization_config=method))
    return folder


def test_a_folder_of_bitsandbytes_holds_the_bytes_that_we_make(packed_folder):
    size = sum(packed_parts("nf4", torch.Size((48, 32))))
    ours, theirs = torch.empty(2, size, dtype=torch.uint8)
    for folder, out in (("original", ours), ("packed", theirs)):
        weights = InitialWeights(SHAPE, 0, packed_folder.parent / folder, "nf4")
        weights.fill(MATRIX, torch.Size((size,)), 0, out)
    assert torch.equal(ours, theirs)
    whole = WeightFiles(packed_folder).read(MATRIX)
    original = WeightFiles(packed_folder.parent / "original").read(MATRIX)
    assert_close(
        whole,
        unpack("nf4", pack("nf4", original.view(48, 32)), (48, 32), torch.float32).view(-1),
    )


def test_adapters_over_such_a_folder_are_merged_into_the_dequantised_matrices(
    packed_folder, tmp_path, capsys
):
    lora = LoraSection(rank=2, targets=["q_proj"])
    model = add_adapters(CausalLM(SHAPE), lora)
    adapters = {n: torch.ones(p.shape) for n, p in model.named_parameters() if ".lora_" in n}
    (folder := tmp_path / "adapter").mkdir()
    base = ModelSection(path=str(packed_folder), lora=lora, quantize="nf4")
    save_adapters(folder, adapters, base, reward=False)
    assert main(["--merge", str(folder), str(tmp_path / "out")]) == 0
    found, whole = WeightFiles(tmp_path / "out"), WeightFiles(packed_folder)
    assert torch.equal(found.read(MATRIX), whole.read(MATRIX))
    query = MATRIX.replace("mlp.up", "self_attn.q")
    assert_close(found.read(query), whole.read(query) + lora.alpha)
    assert "differ by at most 0 " in capsys.readouterr().out


@pytest.mark.parametrize("rslora", [False, True])
@torch.no_grad()
def test_peft_applies_adapters_to_the_same_quantised_base(tmp_path, rslora):
    """What transformers, bitsandbytes and peft compute from the original weights and our export is what we trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # whole blocks in every row, where bitsandbytes is right on CPUs
    config = ModelConfig.from_hf(tiny_config(hidden_size=64, intermediate_size=128))
    write_model(base := tmp_path / "base", config)
    lora, draw = LoraSection(rank=2, rslora=rslora), torch.Generator().manual_seed(4)
    model = CausalLM(config, linear=partial(QuantizedLinear, kind="nf4"))
    weights = InitialWeights(config, 0, base, "nf4")
    for name, parameter in model.named_parameters():
        weights.fill(name, parameter.shape, 0, parameter.view(-1))
    adapters = {n: p for n, p in add_adapters(model, lora).named_parameters() if is_adapter(n)}
    for parameter in adapters.values():
        parameter.normal_(0, 0.1, generator=draw)
    (folder := tmp_path / "adapter").mkdir()
    section = ModelSection(path=str(base), lora=lora, quantize="nf4")
    save_adapters(folder, adapters, section, reward=False)
    row = torch.randint(97, (30,), generator=draw)

    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantized, dtype=torch.float32, device_map="cpu"
    )
    # where the processor has bfloat16, bitsandbytes would evaluate in it whatever it is told; it trains in float32
    theirs.train()

    def logps():
        return theirs(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]

    without = logps()
    theirs = PeftModel.from_pretrained(theirs, folder).train()
    ours = model(pack_shard([Sequence(row, torch.ones(30))], ParallelMesh())).logps[:-1]
    assert (ours - without).abs().max() > 0.1
    torch.testing.assert_close(ours, logps(), rtol=1e-5, atol=1e-5)


def plan(folder, **settings):
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    given = {"stage": "pt", "model.path": str(folder), "data.train": str(rows), "run.steps": 1}
    tokenizer = Path(__file__).parents[2] / "configs/demo/data/tokenizer"
    config = parse_command_line([], **given, **{"model.tokenizer": str(tokenizer)}, **settings)
    return prepare(config.config, 1)


LORA = {"model.lora.rank": 2}
REFUSED = {
    'model.quantize is "nf4" but all weights are trained': (
        "original",
        {"model.quantize": "nf4"},
    ),
    "matrices quantised to NF4; set model.quantize": ("packed", LORA),
    "matrices quantised to NF4": ("packed", LORA | {"model.quantize": "fp8"}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_quantised_is_one_sentence(sentence, packed_folder):
    name, settings = REFUSED[sentence]
    with pytest.raises(ConfigError, match=sentence):
        plan(packed_folder.parent / name, **settings)


def test_bitsandbytes_is_asked_for(packed_folder, monkeypatch):
    def absent(name, *rest):
        return None if name == "bitsandbytes" else found(name, *rest)

    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ConfigError, match="bitsandbytes"):
        plan(packed_folder.parent / "original", **LORA, **{"model.quantize": "nf4"})


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "compressed-tensors"])
def test_checkpoints_of_others_are_refused_by_name(method):
    with pytest.raises(ValueError, match=f"quantised by {method}, but only bitsandbytes' NF4"):
        ModelConfig.from_hf(tiny_config(quantization_config={"quant_method": method}))
