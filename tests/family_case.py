"""The table of model families that are a row of models/families.json alone: a tiny config.json of each."""

from typing import Any

import torch

from models.arch import ModelConfig
from models.decoder import CausalLM
from tests.memory_case import build

VOCABULARY = 131
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def raw(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json of the family."""
    return {**SIZE, "model_type": model_type, **changes}


# Windows are shorter than the sequences of the tests. The layers of a family have every kind that it knows.
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": raw("olmo2", rope_theta=5e5),
    "olmo3": raw(
        "olmo3",
        rope_theta=5e5,
        sliding_window=6,
        num_hidden_layers=5,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
        },
    ),
    "smollm3": raw("smollm3", rope_theta=5e6, num_hidden_layers=5),
    "smollm3 with a list": raw("smollm3", no_rope_layers=[0, 1, 1], tie_word_embeddings=False),
    "mistral with a window": raw("mistral", sliding_window=9, head_dim=12),
    "granite": raw(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.4,
        logits_scaling=0.25,
        tie_word_embeddings=True,
    ),
    "gemma3": raw(
        "gemma3_text",
        head_dim=12,
        sliding_window=7,
        query_pre_attn_scalar=20,
        num_hidden_layers=7,
    ),
    "gemma3 with linear": raw(
        "gemma3_text",
        head_dim=8,
        sliding_window=18,
        query_pre_attn_scalar=8,
        rope_local_base_freq=3e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen3_moe": raw(
        "qwen3_moe",
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "gpt-oss": raw(
        "gpt_oss",
        head_dim=12,
        sliding_window=7,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    ),
}
# families of which transformers has no class for reward models
NO_CLASSIFIER = ("granite",)


def family_model(name: str, dtype: torch.dtype = torch.float32, **memory: Any) -> CausalLM:
    """Build the family's tiny model; the options are those of LayerMemory."""
    return build(dtype, ModelConfig.from_hf(FAMILIES[name]), **memory)
