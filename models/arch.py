"""The shape of a model: from and to Hugging Face's config.json, or one of the published sizes by name.

A family of models is one entry of families.json; the decoder reads the flags of ModelConfig and knows no family.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart, as families.json says.

    Args:
        fixed: fields of config.json that must have this value, and are written so.
        defaults: what transformers assumes for a field that config.json leaves out.
        qkv_bias: q_proj, k_proj and v_proj have a bias and o_proj has none, whatever config.json says; elsewhere its
            `attention_bias` gives a bias to all four.
        qk_norm: the queries and keys of every head are normalised before they are rotated.
    """

    fixed: dict[str, Any]
    defaults: dict[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False


TABLES: Mapping[str, Any] = json.loads(_FOLDER.joinpath("families.json").read_text())
FAMILIES: Mapping[str, Family] = {k: Family(**v) for k, v in TABLES["families"].items()}
# Fields that change what transformers' classes of these families compute, with the one value that is computed here.
_NEUTRAL: Mapping[str, Any] = TABLES["neutral"]
# The fields of every type of rotary scaling; yarn needs the first two only.
_ROPE_TYPES: Mapping[str, list[str]] = TABLES["rope_types"]

# Below which a number is taken for a mistake; others must be below 2^31.
MOST: Mapping[str, float] = TABLES["most"]
# What fields that are no plain numbers must be, each with an example.
_KINDS: Mapping[str, tuple[str, Any]] = TABLES["kinds"]


@dataclass(frozen=True)
class RopeScaling:
    """Hold how rotary positions reach beyond the original window, which is in tokens; names are those of config.json.

    What a type does not use, or leaves to its default, is None.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        low, high = self.low_freq_factor or 1, self.high_freq_factor or 4
        if self.factor < 1 or fast <= slow or high <= low:
            raise ValueError(
                f"rotary scaling is {self.to_hf()} but needs a factor of at least 1, beta_fast above beta_slow and "
                "high_freq_factor above low_freq_factor; correct it"
            )

    def to_hf(self) -> dict[str, Any]:
        """Return what transformers calls rope_scaling."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ModelConfig:
    """Describe a decoder; field names are those of config.json."""

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
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of q_proj, k_proj and v_proj; see output_bias
    qk_norm: bool  # RMSNorms of every head's query and key, before the rotation
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]  # config.json has none, a number or a list
    pad_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} but must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; correct the config"
            )

    @property
    def output_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias and not FAMILIES[self.model_type].qkv_bias

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **rope: Any) -> "ModelConfig":
        """Read a config.json in transformers' old (rope_theta, rope_scaling) or new (rope_parameters) style.

        `rope` changes the rotary settings: rope_type, rope_theta and the other fields of RopeScaling. A factor then
        stretches the window that the model had before any scaling.

        Raises ValueError, one sentence, for a family, field or value that these models do not compute.
        """
        model_type = str(raw.get("model_type"))
        if model_type not in FAMILIES:
            raise ValueError(
                f"config.json has model_type {model_type!r} but only {', '.join(FAMILIES)} are built here; use a "
                "model of these families"
            )
        family = FAMILIES[model_type]
        for name, (wanted, example) in _KINDS.items():
            given: Any = raw.get(name)
            several = name == "eos_token_id" and isinstance(given, list)
            if {*map(type, given if several else [given])} - {type(example), type(None)}:
                raise ValueError(
                    f"config.json has {name} = {given!r:.60} but it must be {wanted}; correct the file or setting"
                )
        if quantised := raw.get("quantization_config"):
            method = quantised.get("quant_method")
            if method != "bitsandbytes" or quantised.get("bnb_4bit_quant_type") != "nf4":
                raise ValueError(
                    f"quantization_config in config.json says that the weights are quantised by {method}, but only "
                    "bitsandbytes' NF4 can be trained on; use the model that they were made from, with model.quantize"
                )
        # rotary settings lie among the others or, in either style, in a table of their own
        table = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
        stated = {**family.defaults, **raw, **table}
        if (theta := raw.get("rope_theta")) not in (None, stated["rope_theta"]):
            raise ValueError(
                f"config.json has rope_theta = {theta!r:.60} and {stated['rope_theta']!r:.60} in rope_parameters or "
                "rope_scaling; correct one of them"
            )
        for name, value in {**_NEUTRAL, **family.fixed}.items():
            if stated.get(name) not in (None, value):
                raise ValueError(
                    f"config.json has {name} = {stated[name]!r:.60}, which these models do not compute; use a model "
                    "without it"
                )
        known = family.defaults | {k: v for k, v in stated.items() if v is not None}
        # Qwen2.5-1M was trained on this many tokens; only a server computes the chunks that reach further
        if chunks := known.get("dual_chunk_attention_config"):
            known["max_position_embeddings"] = chunks.get("original_max_position_embeddings")
        heads = _number(known, "num_attention_heads", int)
        known.setdefault("num_key_value_heads", heads)
        known.setdefault("head_dim", _number(known, "hidden_size", int) // heads)
        scaling = _read_scaling(known, rope)
        eos = known.get("eos_token_id", [])
        return cls(
            model_type=model_type,
            **_numbers(cls, known),
            rope_scaling=scaling,
            tie_word_embeddings=bool(known["tie_word_embeddings"]),
            attention_bias=family.qkv_bias or bool(known.get("attention_bias")),
            qk_norm=family.qk_norm,
            bos_token_id=known.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=known.get("pad_token_id"),
        )

    def to_hf(self, *, dtype: str = "bfloat16", reward: bool = False) -> dict[str, Any]:
        """Return the config.json that transformers (4 and 5) and inference engines load unchanged.

        `dtype` names the stored weights' type; `reward` describes a sequence classifier with one score.
        """
        family, eos = FAMILIES[self.model_type], self.eos_token_id
        head = "ForSequenceClassification" if reward else "ForCausalLM"
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {}
        written = {
            "architectures": [self.model_type.title().replace("_", "") + head],
            **vars(self),
            "rope_scaling": scaling or None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                **scaling,
            },
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": "silu",
            "torch_dtype": dtype,
        }
        del written["qk_norm"]  # implied by model_type
        if family.qkv_bias:  # so is this
            del written["attention_bias"]
        if reward:
            written |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        return written | family.fixed

    def describe_window(self) -> str:
        """Return a line about the longest sequence that the positions were made for."""
        scaling = self.rope_scaling
        rope = "default rope"
        if scaling:
            original = scaling.original_max_position_embeddings
            rope = (
                f"{scaling.rope_type} rope, factor {scaling.factor:g} over {original:,} tokens"
            )
        return f"window: {self.max_position_embeddings:,} tokens ({rope}, theta {self.rope_theta:,g})"


def _number(known: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return a positive number; ValueError names the field that holds none."""
    value: Any = known.get(name)
    most = MOST.get(name, 1 << 31 if kind is int else math.inf)
    if type(value) not in (int, float) or not 0 < value < most or kind(value) != value:
        wanted = f"a {'whole ' * (kind is int)}number above 0"
        if most < math.inf:
            wanted += f" and below {most:,}"
        raise ValueError(
            f"config.json has {name} = {value!r} but it must be {wanted}; correct the file or the setting"
        )
    return kind(value)


def _numbers(table: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read every number that a dataclass declares."""
    return {
        f.name: _number(known, f.name, f.type) for f in fields(table) if f.type in (int, float)
    }


def _read_scaling(known: dict[str, Any], changes: Mapping[str, Any]) -> RopeScaling | None:
    """Lay `changes` over the rotary settings in `known`, read the scaling and put the window right.

    The window is max_position_embeddings, and for yarn and linear at least factor x the original one. Without an
    original one, max_position_embeddings counts as such, as in transformers.
    """
    window = _number(known, "max_position_embeddings", int)
    known.setdefault("original_max_position_embeddings", window)
    known |= changes
    kind = str(known.get("rope_type", known.get("type", "default")))
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"config.json has rope type {kind!r} but only {', '.join(_ROPE_TYPES)} are computed; set model.rope.type "
            '= "yarn" and model.rope.factor, or use another model'
        )
    own = _ROPE_TYPES[kind]
    for name in changes.keys() - {"rope_type", "rope_theta", *own}:
        raise ValueError(
            f"model.rope.{name} is set but rope type {kind!r} does not use it; remove it, or set model.rope.type"
        )
    if changes and kind != "llama3":
        window = known["original_max_position_embeddings"]
    scaling = None
    if kind != "default":
        values = {
            name: known[name] if name == "truncate" else _number(known, name, float)
            for name in own[2:]
            if name in known or kind != "yarn"
        }
        scaling = RopeScaling(kind, **_numbers(RopeScaling, known), **values)
        if kind != "llama3":
            window = max(window, int(scaling.factor * scaling.original_max_position_embeddings))
    known["max_position_embeddings"] = window
    return scaling


_PUBLISHED = tomllib.loads(_FOLDER.joinpath("published.toml").read_text())
ARCHITECTURES: Mapping[str, ModelConfig] = {
    name: ModelConfig.from_hf(shared | dict(zip(_PUBLISHED["order"], sizes)))
    for shared in _PUBLISHED["series"]
    for name, sizes in shared["sizes"].items()
}


def architecture(name: str) -> ModelConfig:
    """Return the published shape of that name, such as "llama3-8b"; refuses an unknown one naming the nearest."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    near = difflib.get_close_matches(name.lower(), ARCHITECTURES, n=1, cutoff=0.0)
    raise ValueError(
        f"model.arch is {name!r} but must be one of {', '.join(ARCHITECTURES)}; nearest: {near[0]}"
    )
