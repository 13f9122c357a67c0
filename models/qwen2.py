"""Qwen2.5: what its config.json says, and the published sizes."""

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "qwen2"
CAUSAL_LM_CLASS = "Qwen2ForCausalLM"
REWARD_CLASS = "Qwen2ForSequenceClassification"
QKV_BIAS = True

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _size(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 152064,
    tied: bool = False,
    max_positions: int = 131072,
    eps: float = 1e-6,
) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": eps,
        "rope_theta": 1000000.0,
        "initializer_range": 0.02,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }


SIZES: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _size(896, 4864, 24, 14, 2, vocab=151936, tied=True, max_positions=32768),
    "qwen2.5-1.5b": _size(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "qwen2.5-3b": _size(2048, 11008, 36, 16, 2, vocab=151936, tied=True, max_positions=32768),
    "qwen2.5-7b": _size(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _size(5120, 13824, 48, 40, 8, eps=1e-5),
    "qwen2.5-32b": _size(5120, 27648, 64, 40, 8, eps=1e-5),
    "qwen2.5-72b": _size(8192, 29568, 80, 64, 8, eps=1e-5),
}


def check(raw: Mapping[str, Any]) -> None:
    """Refuse what is particular to Qwen2 configs and not supported here."""
    if raw.get("use_sliding_window"):
        raise ValueError(
            "config.json has use_sliding_window = true but every layer here attends to the whole sequence; "
            "set use_sliding_window to false if the model was trained without it"
        )


def hf_fields() -> dict[str, Any]:
    """Return the fields that config.json has for this family only."""
    return {"attention_dropout": 0.0, "use_sliding_window": False}
