"""A quantised base: its bytes, folders of bitsandbytes, and what is refused."""

import json
import sys
from functools import partial

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from models.arch import ModelConfig
from models.decoder import CausalLM
from models.hf_format import WeightFiles
from models.initial_weights import InitialWeights
from models.quantized import Packed, pack, packed_parts
from tests import ROOT
from tests.memory_case import packed
from tests.model_folder import logps_there, tiny_config, write_model
from tests.unit.test_adapter_files import write_adapters
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.config.schema import LoraSection
from ulysses.config.section import ConfigError
from ulysses.disk import write_json
from ulysses.export import main

SHAPE = ModelConfig.from_hf(tiny_config())
MATRIX = "model.layers.1.mlp.up_proj.weight"


def bitsandbytes(weight):
    return quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows, columns", [(8, 64), (48, 32), (300, 96), (1024, 2048)])
def test_nf4_is_what_bitsandbytes_makes(rows, columns, device):
    whole = torch.randn(rows, columns, device=device)
    data = pack(whole)
    assert data.numel() == sum(packed_parts(whole.shape))
    # as rows of one block, where bitsandbytes is right on CPUs
    codes, state = bitsandbytes(whole.view(-1, 64))
    theirs = dequantize_4bit(codes, state).view(rows, columns)
    assert_close(Packed(whole.shape).unpack(data, torch.float32), theirs)
    error = (theirs - whole).abs().max() / whole.abs().max()
    assert 0.01 < error < 0.2


@pytest.fixture
def packed_folder(tmp_path):
    """Return a model whose layers' matrices bitsandbytes has quantised, with the original beside it."""
    return write_packed(tmp_path)


def write_packed(tmp_path, **changes):
    raw = tiny_config(**changes)
    write_model(tmp_path / "original", ModelConfig.from_hf(raw))
    weights = {}
    for name, weight in load_file(tmp_path / "original/model.safetensors").items():
        if name.endswith("_proj.weight"):
            weight, state = bitsandbytes(weight)
            parts = state.as_dict(packed=True)
            weights |= {f"{name}.{key}": part for key, part in parts.items()}
        weights[name] = weight
    (folder := tmp_path / "packed").mkdir()
    save_file(weights, folder / "model.safetensors")
    method = (
        '{"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}'
    )
    write_json(folder / "config.json", raw | {"quantization_config": json.loads(method)})
    return folder


def weights_of(config, folder, parameters):
    """Fill parameters as a run does that quantises its base."""
    weights = InitialWeights(config, 0, folder, "nf4")
    for name, parameter in parameters.items():
        weights.fill(name, parameter.shape, 0, parameter.view(-1))


def test_a_folder_of_bitsandbytes_holds_the_bytes_that_we_make(packed_folder):
    size = sum(packed_parts(torch.Size((48, 32))))
    ours, theirs = torch.empty(2, size, dtype=torch.uint8)
    original = packed_folder.parent / "original"
    for folder, out in ((original, ours), (packed_folder, theirs)):
        weights_of(SHAPE, folder, {MATRIX: out})
    assert torch.equal(ours, theirs)
    whole = WeightFiles(packed_folder).read(MATRIX).view(48, 32)
    data = pack(WeightFiles(original).read(MATRIX).view(48, 32))
    assert_close(whole, Packed((48, 32)).unpack(data, torch.float32))


def change_state(**changes):
    def change(weights, stem):
        name = f"{stem}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(weights[name].tolist())) | changes
        weights[name] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)

    return change


def cut(part):
    def change(weights, stem):
        weights[stem + part] = weights[stem + part][:-1].contiguous()

    return change


def put(part, tensor):
    return lambda weights, stem: weights.update({stem + part: tensor})


STATE = ".quant_state.bitsandbytes__nf4"
BROKEN = {
    "json": put(STATE, torch.tensor([*b"{"], dtype=torch.uint8)),
    "list": put(STATE, torch.tensor([*b"[1]"], dtype=torch.uint8)),
    "floats": put(STATE, torch.ones(3)),
    "codes": cut(""),
    "sizes": cut(".absmax"),
    "numbers": cut(".nested_quant_map"),
    "part": lambda weights, stem: weights.pop(f"{stem}.nested_absmax"),
    "whole": lambda weights, stem: weights.pop(stem),
    "shape": change_state(shape="x"),
    "large": change_state(shape=[64, 64]),
    "none": change_state(shape=None),
    "dtype": change_state(dtype="foo"),
    "blocks": change_state(blocksize=128),
    "nested": change_state(nested_blocksize=None),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_quantised_matrix_is_refused_by_its_name(packed_folder, fault):
    weights = load_file(packed_folder / "model.safetensors")
    BROKEN[fault](weights, MATRIX)
    save_file(weights, packed_folder / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=f"holds {MATRIX} otherwise than in NF4 doubly quantised, in blocks of 64",
    ):
        WeightFiles(packed_folder)


def test_adapters_over_such_a_folder_are_merged_into_the_dequantised_matrices(
    packed_folder, tmp_path, capsys
):
    lora = LoraSection(rank=2, targets=["q_proj"])
    folder = tmp_path / "adapter"
    write_adapters(folder, packed_folder, CausalLM(SHAPE), lora, torch.nn.init.ones_)
    assert main(["--merge", str(folder), str(tmp_path / "out")]) == 0
    found, whole = WeightFiles(tmp_path / "out"), WeightFiles(packed_folder)
    assert torch.equal(found.read(MATRIX), whole.read(MATRIX))
    query = MATRIX.replace("mlp.up", "self_attn.q")
    assert_close(found.read(query), whole.read(query) + lora.alpha)
    assert "differ" not in capsys.readouterr().out, "nothing was rounded"


@torch.no_grad()
def test_peft_applies_adapters_to_the_same_quantised_base(tmp_path):
    """What transformers, bitsandbytes and peft compute from the original weights and our export is what we trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # whole blocks in every row, where bitsandbytes is right on CPUs
    config = ModelConfig.from_hf(tiny_config(hidden_size=64, intermediate_size=128))
    write_model(base := tmp_path / "base", config)
    model = CausalLM(config, quantize="nf4")
    weights_of(config, base, dict(model.named_parameters()))
    draw = partial(torch.nn.init.normal_, std=0.1)
    folder = write_adapters(tmp_path / "adapter", base, model, LoraSection(rank=2), draw)
    row = torch.randint(97, (30,))

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **nf4
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantized, dtype=torch.float32, device_map="cpu"
    )
    # where the processor has bfloat16, bitsandbytes would evaluate in it whatever it is told; it trains in float32
    theirs.train()

    without = logps_there(theirs, row)
    theirs = PeftModel.from_pretrained(theirs, folder).train()
    ours = model(packed(row)).logps[:-1]
    assert (ours - without).abs().max() > 0.1
    torch.testing.assert_close(ours, logps_there(theirs, row), rtol=1e-5, atol=1e-5)


def plan(folder, options):
    (folder / "rows.jsonl").write_text('{"text": "a"}')
    line = f"""--stage pt --model.path {folder} --data.train {folder}/rows.jsonl --run.steps 1
        --model.tokenizer {ROOT}/configs/demo/data/tokenizer {options}"""
    return prepare(parse_command_line(line.split()).config, 1)


def test_a_quantised_folder_is_not_read_as_a_whole_one(packed_folder):
    with pytest.raises(ConfigError, match="matrices quantised to NF4; set model.quantize"):
        plan(packed_folder, "--model.lora.rank 2")


def test_experts_that_were_quantised_one_by_one_are_refused(tmp_path):
    """As transformers 4 writes Qwen3-MoE: all experts of a layer are one matrix here, whose scales are other ones."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = write_packed(tmp_path, model_type="qwen3_moe", head_dim=16, **experts)
    with pytest.raises(
        ConfigError, match=r"experts\.0\.gate_proj\.weight quantised apart from"
    ):
        plan(folder, "--model.lora.rank 2 --model.lora.targets q_proj --model.quantize nf4")


def test_bitsandbytes_is_asked_for(packed_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="bitsandbytes"):
        plan(packed_folder.parent / "original", "--model.lora.rank 2 --model.quantize nf4")
