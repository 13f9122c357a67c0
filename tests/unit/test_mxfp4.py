"""gpt-oss's files: experts in MXFP4 are read into bfloat16, as transformers dequantises them, also slice by slice."""

import re

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.arch import ModelConfig
from models.hf_format import WeightFiles
from models.kinds import empty_model
from tests import rows_of
from tests.family_case import raw
from tests.model_folder import write_model
from ulysses.disk import write_json

SHAPE = ModelConfig.from_hf(
    raw(
        "gpt_oss",
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
)
WRITTEN = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as it is published, whose scales lie in another file than their blocks, and what transformers reads."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = write_model(folder, SHAPE, torch.bfloat16)
    write_json(folder / "config.json", SHAPE.to_hf() | {"quantization_config": WRITTEN})
    draw, blocks, scales, wanted = torch.Generator().manual_seed(3), {}, {}, {}
    for name, parameter in model.named_parameters():
        if parameter.dim() != 3:
            blocks[name] = parameter.detach()
            continue
        count, inputs, outputs = parameter.shape
        codes = torch.randint(256, (count, outputs, inputs // 32, 16), generator=draw)
        powers = torch.randint(110, 132, codes.shape[:3], generator=draw)
        blocks[f"{name}_blocks"] = codes.to(torch.uint8)
        scales[f"{name}_scales"] = powers.to(torch.uint8)
        wanted[name] = convert_moe_packed_tensors(codes.to(torch.uint8), powers.to(torch.uint8))
    (folder / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": blocks,
        "model-00002-of-00002.safetensors": scales,
    }
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in files.items() for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"weight_map": places})
    return folder, wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_blocks_are_read_as_transformers_dequantises_them(folder, ranks):
    """Slices begin and end anywhere: within a row, a block and an expert."""
    files, wanted = WeightFiles(folder[0]), folder[1]
    files.check({name: p.shape for name, p in empty_model(SHAPE).named_parameters()})
    for name, exact in wanted.items():
        assert files.tensors[name].dtype == torch.bfloat16
        size = -(-exact.numel() // ranks)
        parts = [
            files.read(name, at, min(at + size, exact.numel()))
            for at in range(0, exact.numel(), size)
        ]
        assert torch.equal(torch.cat(parts), exact.flatten())
        assert torch.equal(files.read(name, 5, 6), exact.flatten()[5:6])
        assert not files.read(name, 7, 7).numel()


def test_a_slice_takes_no_memory_for_experts_that_it_does_not_hold(tmp_path):
    """Of 64 experts one is read; the file itself is mapped twice, for the blocks and for the scales."""
    from torch.profiler import ProfilerActivity, profile

    stem, one = "model.layers.0.mlp.experts.gate_up_proj", 192 * 64
    tensors = {"blocks": torch.zeros(64, 192, 2, 16), "scales": torch.zeros(64, 192, 2)}
    path = tmp_path / "model.safetensors"
    save_file({f"{stem}_{name}": t.to(torch.uint8) for name, t in tensors.items()}, path)
    files = WeightFiles(tmp_path)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        files.read(stem, 5 * one, 6 * one)
    sizes = [e.self_cpu_memory_usage for e in found.events()]
    allocated = sum(size for size in sizes if size > 0) - 2 * path.stat().st_size
    assert 2 * one < allocated < 20 * one


# shapes of blocks and scales; those of three experts with 192 outputs and 64 inputs are 3 192 2 16 and 3 192 2
SHAPES = """
3 192 2 16 => 3 192 1
3 192 2 16 => 3 1 2
3 192 2 16 => 1 192 2
3 192 2 16 => 192 2
3 192 2 16 => 3 192 2 1
3 192 2 8 => 3 192 2
3 192 2 32 => 3 192 2
192 2 16 => 192 2
3 192 32 => 3 192
"""


def block_file(folder, blocks, scales):
    tensors = {f"{STEM}_blocks": blocks, f"{STEM}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    return WeightFiles(folder)


STEM = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("blocks, scales", rows_of(SHAPES))
def test_blocks_and_scales_of_other_shapes_are_refused(tmp_path, blocks, scales):
    shapes = [[*map(int, text.split())] for text in (blocks, scales)]
    sentence = f"holds {STEM}_blocks of shape {shapes[0]} with scales of shape {shapes[1]}, but MXFP4 has bytes: blocks"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        block_file(tmp_path, *(torch.full(shape, 127).byte() for shape in shapes))
    for dtypes in ((torch.uint8, torch.float32), (torch.float32, torch.uint8)):
        with pytest.raises(ValueError, match="but MXFP4 has bytes: blocks"):
            block_file(
                tmp_path,
                torch.ones(3, 8, 2, 16).to(dtypes[0]),
                torch.ones(3, 8, 2).to(dtypes[1]),
            )


@pytest.mark.parametrize("scale", [254, 255])
def test_scales_of_infinite_weights_are_refused(tmp_path, scale):
    scales = torch.full((2, 8, 2), 252).byte()
    files = block_file(tmp_path, torch.full((2, 8, 2, 16), 119).byte(), scales)
    assert files.read(STEM).isfinite().all()
    scales[1, 3, 1] = scale
    files = block_file(tmp_path, torch.full((2, 8, 2, 16), 119).byte(), scales)
    assert files.read(STEM, 0, 512).isfinite().all()  # of the first expert
    with pytest.raises(
        FloatingPointError,
        match=f"{STEM}_scales in /.* holds scales that make infinite weights",
    ):
        files.read(STEM)


def test_blocks_without_scales_are_refused(tmp_path):
    save_file(
        {"a.experts.down_proj_blocks": torch.zeros(1, 2, 1, 16).to(torch.uint8)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="down_proj_blocks has no place in the model"):
        WeightFiles(tmp_path).check({})
