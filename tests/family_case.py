"""The table of model families that are a row of models/families.json alone: a tiny config.json of each."""

import json
from typing import Any

import torch

from models.arch import ModelConfig
from models.decoder import CausalLM
from tests.memory_case import build

VOCABULARY = 131
SIZE: dict[str, Any] = json.loads("""{
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0
}""")


def raw(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json of the family."""
    return {**SIZE, "model_type": model_type, **changes}


# Decays of a document that is 40 tokens long forget some of it; the widths of keys and values differ.
# A larger epsilon, because the norm of a head's output that happens to be near zero would magnify float32's rounding.
LINEAR: dict[str, Any] = json.loads("""{
    "rms_norm_eps": 1e-4, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12
}""")
EXPERTS: dict[str, Any] = json.loads("""{
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24
}""")
# Windows are shorter than the sequences of the tests. The layers of a family have every kind that it knows.
CHANGES = """{
    "olmo2": {"model_type": "olmo2", "rope_theta": 5e5},
    "olmo3": {"model_type": "olmo3", "rope_theta": 5e5, "sliding_window": 6, "num_hidden_layers": 5, "rope_scaling":
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 2.0,
        "beta_slow": 0.25}},
    "smollm3": {"model_type": "smollm3", "rope_theta": 5e6, "num_hidden_layers": 5},
    "smollm3 with a list": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "tie_word_embeddings": false},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9, "head_dim": 12},
    "granite": {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.4, "logits_scaling": 0.25, "tie_word_embeddings": true},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20,
        "num_hidden_layers": 7},
    "gemma3 with linear": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 18, "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 3e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window_pattern": 2},
    "qwen3_5": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", "full_attention_interval": 2},
    "qwen3_next": {"model_type": "qwen3_next", "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 12, "sliding_window": 7, "num_local_experts": 6,
        "num_experts_per_tok": 2, "rope_scaling":
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": false}}
}"""
MORE = {"qwen3_5": LINEAR, "qwen3_5_moe": LINEAR | EXPERTS, "qwen3_next": LINEAR | EXPERTS}
FAMILIES: dict[str, dict[str, Any]] = {
    name: raw(**changes, **MORE.get(name, {})) for name, changes in json.loads(CHANGES).items()
}
# families of which transformers has no class for reward models
NO_CLASSIFIER = ("granite", "qwen3_5_moe")


def family_model(name: str, dtype: torch.dtype = torch.float32, **memory: Any) -> CausalLM:
    """Build the family's tiny model; the options are those of LayerMemory."""
    return build(dtype, ModelConfig.from_hf(FAMILIES[name]), **memory)
