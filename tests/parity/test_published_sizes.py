"""The published config.json texts build on the meta device with the published parameter counts."""

import json
from pathlib import Path

import pytest
import torch

from models.arch import ARCHITECTURES, ModelConfig
from models.decoder import CausalLM
from models.kinds import count_parameters
from models.scored import RewardModel

FOLDER = Path(__file__).parent / "published_configs"
COUNTS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
NAMED_ONLY = {  # without their config.json texts
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "granite3.1-8b": 8_170_848_256,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # the text models', without vision and MTP
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
}
WITHOUT_A_NAME = {  # load from their folders only
    "llama3.3-70b-instruct": 70_553_706_496,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "qwq-32b": 32_763_876_352,
    "qwen2.5-7b-instruct-1m": 7_615_616_512,
    "qwen2.5-14b-instruct-1m": 14_770_033_664,
    "mistral-7b-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize(("name", "count"), {**COUNTS, **WITHOUT_A_NAME}.items())
def test_published_text_builds_with_the_published_count(name: str, count: int) -> None:
    config = ModelConfig.from_hf(json.loads((FOLDER / f"{name}.json").read_text()))
    with torch.device("meta"):
        model = CausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config) == count
    if name in COUNTS:
        assert ARCHITECTURES[name] == config


@pytest.mark.parametrize(("name", "count"), NAMED_ONLY.items())
def test_a_name_has_the_published_count(name: str, count: int) -> None:
    assert count_parameters(ARCHITECTURES[name]) == count


def test_reward_model_count() -> None:
    config = ARCHITECTURES["qwen2.5-0.5b"]
    with torch.device("meta"):
        model = RewardModel(config)
    assert (
        sum(p.numel() for p in model.parameters())
        == count_parameters(config, reward=True)
        == 494_032_768 + 896
    )
