"""A tiny random model written as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import Any

import torch

from models.arch import ModelConfig
from models.decoder import CausalLM, init_parameter
from models.folders import CONFIG, read_json
from models.scored import RewardModel
from models.writing import stored_weights, write_weights
from tests import ROOT
from ulysses.disk import write_json


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a config.json of a Llama of two layers, with these changes."""
    return {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, **changes,
    }  # fmt: skip


@torch.no_grad()
def init_weights(model: CausalLM | RewardModel, seed: int = 0) -> None:
    """Fill every parameter of an unpartitioned model with its random start."""
    for name, parameter in model.named_parameters():
        where = parameter.device
        values = init_parameter(name, parameter.shape, model.config, seed, device=where)
        parameter.copy_(values)


def write_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32, **options: int
) -> CausalLM:
    """Write a model drawn from seed 1 and return it; `options` are those of write_weights."""
    model = CausalLM(config, attention="reference").to(dtype)
    init_weights(model, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, stored_weights(config, model.named_parameters()), **options)
    write_json(folder / CONFIG, config.to_hf(dtype=str(dtype).removeprefix("torch.")))
    return model


def logps_there(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a row's tokens by a model of transformers or peft."""
    logps = model(row[None]).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, row[1:, None])[:, 0]


def demo_model(folder: Path, **changes: Any) -> Path:
    """Write the demo's model with these changes, with weights and its tokenizer."""
    demo = ROOT / "configs/demo"
    shape = read_json(demo / "model/config.json") | changes
    write_model(folder, ModelConfig.from_hf(shape))
    return shutil.copytree(demo / "data/tokenizer", folder, dirs_exist_ok=True)
