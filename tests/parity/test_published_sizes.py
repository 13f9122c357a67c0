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


def counts(table: str) -> dict[str, int]:
    """Read a table of names and counts."""
    rows = map(str.split, table.strip().splitlines())
    return {name: int(count.replace(",", "")) for name, count in rows}


COUNTS = counts("""
llama3-8b 8,030,261,248
llama3-70b 70,553,706,496
llama3.1-8b 8,030,261,248
llama3.2-1b 1,235,814,400
llama3.2-3b 3,212,749,824
qwen2.5-0.5b 494,032,768
qwen2.5-1.5b 1,543,714,304
qwen2.5-3b 3,085,938,688
qwen2.5-7b 7,615,616,512
qwen2.5-14b 14,770,033,664
qwen2.5-32b 32,763,876,352
qwen2.5-72b 72,706,203,648
qwen3-0.6b 596,049,920
qwen3-1.7b 1,720,574,976
qwen3-4b 4,022,468,096
qwen3-8b 8,190,735,360
qwen3-14b 14,768,307,200
qwen3-32b 32,762,123,264
qwen3-30b-a3b 30,532,122,624
qwen3-235b-a22b 235,093,634,560
""")
# without their config.json texts
# the text models', without vision and MTP
NAMED_ONLY = counts("""
olmo2-7b 7,298,617,344
olmo2-13b 13,716,198,400
olmo3-7b 7,298,011,136
smollm3-3b 3,075,098,624
granite3.1-8b 8,170,848,256
gemma3-1b 999,885,952
gemma3-4b 3,880,263,168
gpt-oss-20b 20,914,757,184
gpt-oss-120b 116,829,156,672
qwen3.5-0.8b 752,393,024
qwen3.5-2b 1,881,825,088
qwen3.5-4b 4,205,751,296
qwen3.5-9b 8,953,803,264
qwen3.5-27b 26,895,998,464
qwen3.5-35b-a3b 34,660,610,688
""")
# load from their folders only
WITHOUT_A_NAME = counts("""
llama3.3-70b-instruct 70,553,706,496
deepseek-r1-distill-llama-8b 8,030,261,248
deepseek-r1-distill-llama-70b 70,553,706,496
deepseek-r1-distill-qwen-1.5b 1,777,088,000
deepseek-r1-distill-qwen-7b 7,615,616,512
deepseek-r1-distill-qwen-14b 14,770,033,664
deepseek-r1-distill-qwen-32b 32,763,876,352
qwq-32b 32,763,876,352
qwen2.5-7b-instruct-1m 7,615,616,512
qwen2.5-14b-instruct-1m 14,770,033,664
mistral-7b-v0.3 7,248,023,552
""")


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
