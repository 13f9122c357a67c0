"""Llama-3: what its config.json says, and the published sizes."""

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "llama"
CAUSAL_LM_CLASS = "LlamaForCausalLM"
REWARD_CLASS = "LlamaForSequenceClassification"
QKV_BIAS = False

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3 = {
    "model_type": MODEL_TYPE,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _scaled(factor: float) -> dict[str, Any]:
    """The llama3 rope scaling of the 3.1 (factor 8) and 3.2 (factor 32) releases."""
    return {
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_LLAMA3,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }


SIZES: Mapping[str, dict[str, Any]] = {
    "llama3-8b": _size(4096, 14336, 32, 32, 8),
    "llama3-70b": _size(8192, 28672, 80, 64, 8),
    "llama3.1-8b": _size(4096, 14336, 32, 32, 8) | _scaled(8.0),
    "llama3.1-70b": _size(8192, 28672, 80, 64, 8) | _scaled(8.0),
    "llama3.2-1b": _size(2048, 8192, 16, 32, 8) | _scaled(32.0) | {"tie_word_embeddings": True},
    "llama3.2-3b": _size(3072, 8192, 28, 24, 8) | _scaled(32.0) | {"tie_word_embeddings": True},
}


def check(raw: Mapping[str, Any]) -> None:
    """Refuse what is particular to Llama configs and not supported here."""
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ValueError(
                f"config.json has {field} = true but Llama models are built without that bias; use a checkpoint that "
                "has none"
            )


def hf_fields() -> dict[str, Any]:
    """Return the fields that config.json has for this family only."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
    }
