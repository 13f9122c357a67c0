"""The shape of a model: from and to Hugging Face's config.json, or one of the published sizes by name."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from models import llama, qwen2

_FAMILIES: Mapping[str, ModuleType] = {llama.MODEL_TYPE: llama, qwen2.MODEL_TYPE: qwen2}

# Fields that change what the layers compute. Their neutral values are harmless, any other value is refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "hidden_act": (None, "silu", "swish"),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "no_rope_layers": (None, []),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


@dataclass(frozen=True)
class RopeScaling:
    """Hold llama3's frequency scaling; lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Describe a Llama-3 or Qwen2.5 model; field names are those of config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias of q_proj, k_proj and v_proj; o_proj never has one
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in _FAMILIES:
            raise ValueError(
                f"model_type is {self.model_type!r} but must be one of {', '.join(_FAMILIES)}; use such a model"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} but must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; correct the config"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim} but rotary positions need an even number; correct the config"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json in transformers' old (rope_theta, rope_scaling) or new (rope_parameters) style.

        Raises ValueError, one sentence, for a family, field or value that these models do not compute.
        """
        model_type = str(raw.get("model_type"))
        if model_type not in _FAMILIES:
            raise ValueError(
                f"config.json has model_type {model_type!r} but only {' and '.join(_FAMILIES)} are built here; use a "
                "Llama-3 or Qwen2.5 model"
            )
        family = _FAMILIES[model_type]
        family.check(raw)
        _refuse_unsupported(raw, family)
        known = {**family.DEFAULTS, **{k: v for k, v in raw.items() if v is not None}}
        missing = [k for k in _REQUIRED if k not in known]
        if missing:
            raise ValueError(
                f"config.json has no {', '.join(missing)}; a {model_type} model needs it: add it or re-download the "
                "file"
            )
        theta, scaling = _read_rope(raw, family.DEFAULTS["rope_theta"])
        heads = _number(known, "num_attention_heads")
        width = _number(known, "hidden_size")
        eos = known.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=_number(known, "vocab_size"),
            hidden_size=width,
            intermediate_size=_number(known, "intermediate_size"),
            num_hidden_layers=_number(known, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_number(
                {"num_key_value_heads": heads, **known}, "num_key_value_heads"
            ),
            head_dim=_number({"head_dim": width // heads, **known}, "head_dim"),
            rms_norm_eps=_number(known, "rms_norm_eps", float),
            rope_theta=theta,
            max_position_embeddings=_number(known, "max_position_embeddings"),
            rope_scaling=scaling,
            tie_word_embeddings=bool(known["tie_word_embeddings"]),
            attention_bias=family.QKV_BIAS,
            initializer_range=_number(known, "initializer_range", float),
            bos_token_id=known.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=known.get("pad_token_id"),
        )

    def to_hf(self, *, dtype: str = "bfloat16", reward: bool = False) -> dict[str, Any]:
        """Return the config.json that transformers (4 and 5) and inference engines load unchanged.

        `dtype` names the stored weights' type; `reward` describes a sequence classifier with one score.
        """
        family = _FAMILIES[self.model_type]
        scaling = self.rope_scaling and {"rope_type": "llama3", **vars(self.rope_scaling)}
        fields = {
            "architectures": [family.REWARD_CLASS if reward else family.CAUSAL_LM_CLASS],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "use_cache": True,
            "torch_dtype": dtype,
            **family.hf_fields(),
        }
        if (
            self.model_type == "llama"
            or self.head_dim * self.num_attention_heads != self.hidden_size
        ):
            fields["head_dim"] = self.head_dim
        if reward:
            fields |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        return fields

    def num_parameters(self, *, reward: bool = False) -> int:
        """Count the parameters: tied embeddings once; `reward` has a score head [1, D] in the place of lm_head."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = 2 * d * q + 2 * d * kv + 3 * d * f + 2 * d
        if self.attention_bias:
            layer += q + 2 * kv
        embedding = self.vocab_size * d
        head = d if reward else (0 if self.tie_word_embeddings else embedding)
        return embedding + self.num_hidden_layers * layer + d + head


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _number(fields: Mapping[str, Any], name: str, kind: type = int) -> Any:
    """Return a positive number; ValueError names the field that holds none."""
    value = fields[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
        or kind(value) != value
    ):
        wanted = "a whole number above 0" if kind is int else "a number above 0"
        raise ValueError(
            f"config.json has {name} = {value!r} but it must be {wanted}; correct or re-download the file"
        )
    return kind(value)


def _refuse_unsupported(raw: Mapping[str, Any], family: ModuleType) -> None:
    for field, neutral in _NEUTRAL.items():
        value = raw.get(field)
        if value not in neutral:
            shown = "..." if isinstance(value, dict) else repr(value)
            raise ValueError(
                f"config.json has {field} = {shown}, which these models do not compute; use a model without it"
            )
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"config.json has layer_types {', '.join(sorted(layer_types))} but every layer here is full_attention; "
            "use such a model"
        )
    if raw.get("sliding_window") is not None and raw.get(
        "use_sliding_window", raw["model_type"] != "qwen2"
    ):
        raise ValueError(
            f"config.json has sliding_window = {raw['sliding_window']} in use but every layer here attends to the "
            "whole sequence; use a model without it"
        )
    allowed = {family.CAUSAL_LM_CLASS, family.REWARD_CLASS}
    allowed.add(family.CAUSAL_LM_CLASS.replace("ForCausalLM", "Model"))
    other = [name for name in raw.get("architectures") or () if name not in allowed]
    if other:
        raise ValueError(
            f"config.json names the architecture {other[0]} but only {', '.join(sorted(allowed))} are read; use such "
            "a model"
        )


def _read_rope(raw: Mapping[str, Any], default_theta: float) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) from either style; the new style keeps both in rope_parameters."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = default_theta if theta is None else float(theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            f"config.json has partial_rotary_factor = {rope['partial_rotary_factor']} but the whole head is rotated "
            "here; use a model without it"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"config.json has rope type {kind!r} but only 'default' and 'llama3' are computed; remove it or use "
            "another model"
        )
    original = rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 0)
    try:
        return theta, RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(original),
        )
    except KeyError as missing:
        raise ValueError(
            f"config.json asks for llama3 rope scaling without {missing.args[0]}; add it"
        ) from None


def _published(fields: Mapping[str, Any]) -> ModelConfig:
    scaling = fields.get("rope_scaling")
    if scaling:
        scaling = RopeScaling(**{k: v for k, v in scaling.items() if k != "rope_type"})
    bias = _FAMILIES[fields["model_type"]].QKV_BIAS
    return ModelConfig(**{**fields, "rope_scaling": scaling, "attention_bias": bias})


ARCHITECTURES: Mapping[str, ModelConfig] = {
    name: _published(f) for name, f in {**llama.SIZES, **qwen2.SIZES}.items()
}


def architecture(name: str) -> ModelConfig:
    """Return the published shape of that name, such as "llama3-8b"; refuses an unknown one naming the nearest."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    near = difflib.get_close_matches(name.lower(), ARCHITECTURES, n=1, cutoff=0.0)
    raise ValueError(
        f"model.arch is {name!r} but must be one of {', '.join(ARCHITECTURES)}; nearest: {near[0]}"
    )
