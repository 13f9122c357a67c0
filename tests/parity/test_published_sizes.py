"""The published config.json texts build on the meta device with the published parameter counts."""

import json
from pathlib import Path

import pytest
import torch

from models import ARCHITECTURES, CausalLM, ModelConfig, RewardModel

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
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_text_builds_with_the_published_count(name: str) -> None:
    config = ModelConfig.from_hf(json.loads((FOLDER / f"{name}.json").read_text()))
    with torch.device("meta"):
        model = CausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]
    assert config.num_parameters() == COUNTS[name]
    assert ARCHITECTURES[name] == config


def test_reward_model_count() -> None:
    config = ARCHITECTURES["qwen2.5-0.5b"]
    with torch.device("meta"):
        model = RewardModel(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters(reward=True) == 494_032_768 + 896
