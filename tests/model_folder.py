"""A tiny random model written as a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch

from models.arch import ModelConfig
from models.decoder import CausalLM, RewardModel, init_parameter
from models.hf_format import CONFIG, write_weights
from ulysses.disk import write_json


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a config.json of a Llama of two layers, with these changes."""
    size = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    return {
        "model_type": "llama",
        **size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **changes,
    }


@torch.no_grad()
def init_weights(model: CausalLM | RewardModel, seed: int = 0) -> None:
    """Fill every parameter of an unpartitioned model with its random start."""
    for name, parameter in model.named_parameters():
        values = init_parameter(
            name, parameter.shape, model.config, seed, device=parameter.device
        )
        parameter.copy_(values)


def write_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32, **options: int
) -> CausalLM:
    """Write a model drawn from seed 1 and return it; `options` are those of write_weights."""
    model = CausalLM(config, attention="reference").to(dtype)
    init_weights(model, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, model.named_parameters(), **options)
    write_json(folder / CONFIG, config.to_hf(dtype=str(dtype).removeprefix("torch.")))
    return model
