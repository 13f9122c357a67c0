"""The shape of a model, from and to Hugging Face's config.json.

The decoder reads ModelConfig, its family's row (families.py) and the kinds of its layers, and knows no family by name.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle, islice
from pathlib import Path

from models.config_json import (
    ROTARY,
    check_fixed,
    check_kinds,
    check_quantisation,
    join_fields,
    number,
    numbers,
    read_experts,
    read_layers,
    read_scaling,
    rotary_fields,
)
from models.families import (
    FAMILIES,
    MULTIMODAL,
    Delta,
    Experts,
    Family,
    Fields,
    LayerKind,
    Multipliers,
    RopeScaling,
)
from models.multimodal import multimodal_config, text_config

_NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class ModelConfig:
    """Describe a decoder; field names are those of config.json.

    The digests of frozen models contain its repr: a run from before a field was renamed could not be resumed.
    """

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
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]  # config.json has none, a number or a list
    pad_token_id: int | None
    pattern: tuple[LayerKind, ...] = (LayerKind(),)  # repeated over the layers
    rope_local_theta: float | None = None
    sliding_window: int | None = None  # of "sliding_attention" layers
    multipliers: Multipliers = _NO_MULTIPLIERS
    moe: Experts | None = None
    delta: Delta | None = None  # of "linear_attention" layers
    partial_rotary_factor: float = 1.0  # the part of a head's columns that are rotated
    around: str = ""  # of a multimodal folder's text model: the whole config.json

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} but must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; correct the config"
            )
        rotated = int(self.head_dim * self.partial_rotary_factor)
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim} and partial_rotary_factor {self.partial_rotary_factor:g}, so that "
                f"{rotated} columns would turn, but these must be an even number up to head_dim; correct the config"
            )

    @property
    def family(self) -> Family:
        """The family's row of families.json."""
        return FAMILIES[self.model_type]

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kinds of every layer, the first layer's first."""
        return tuple(islice(cycle(self.pattern), self.num_hidden_layers))

    @property
    def output_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias and not self.family.qkv_bias

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None for one that sees all tokens before; empty if every layer does."""
        return tuple(map(self.window, self.layers)) if self.sliding_window else ()

    def window(self, kind: LayerKind) -> int | None:
        """Return the sliding window of the layers of a kind."""
        return self.sliding_window if kind.mixer == "sliding_attention" else None

    @property
    def softmax_scale(self) -> float | None:
        """The factor of attention's scores; None for the usual E^-1/2, E being the width of a head."""
        scalar = self.multipliers.query_pre_attn_scalar
        return scalar**-0.5 if scalar else self.multipliers.attention_multiplier

    @classmethod
    def from_hf(cls, raw: Fields, **rope: object) -> "ModelConfig":
        """Read a config.json in transformers' old (rope_theta, rope_scaling) or new (rope_parameters) style.

        `rope` changes the rotary settings: rope_type, rope_theta and the other fields of RopeScaling. Its factor
        stretches the window that the model had before any scaling.

        Raises ValueError, one sentence, for a family, field or value that these models do not compute.
        """
        around = ""
        if str(raw.get("model_type")) in MULTIMODAL:
            raw, around = text_config(raw)
        model_type = str(raw.get("model_type"))
        if model_type not in FAMILIES:
            raise ValueError(
                f"config.json has model_type {model_type!r} but only {', '.join((*FAMILIES, *MULTIMODAL))} are built "
                "here; use a model of these families"
            )
        family = FAMILIES[model_type]
        check_kinds(raw)
        check_quantisation(raw, family)
        rotary = rotary_fields(raw, family)
        # without what transformers' classes do not read there
        unread = {*ROTARY, "rope_local_base_freq"} - family.defaults.keys()
        named = join_fields(family.aliases, {k: v for k, v in raw.items() if k not in unread})
        stated = {**family.defaults, **named, **rotary}
        check_fixed(stated, family)
        # the same fields, with the default in place of null
        values = family.defaults | {k: v for k, v in stated.items() if v is not None}
        # Qwen2.5-1M was trained on this many tokens; only servers compute the chunked attention that reaches further
        if chunks := values.get("dual_chunk_attention_config"):
            values["max_position_embeddings"] = chunks.get("original_max_position_embeddings")
        heads = number(values, "num_attention_heads", int)
        values.setdefault("partial_rotary_factor", 1.0)
        # null, too, means as many as query heads, whatever the default is
        if stated.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        values.setdefault("head_dim", number(values, "hidden_size", int) // heads)
        pattern = read_layers(values, family)
        kinds = {kind.rotary for kind in pattern} | {kind.mixer for kind in pattern}
        local_theta = window = None
        if "local" in kinds:  # by default the file's rope_theta, whatever `rope` changes
            values.setdefault("rope_local_base_freq", values["rope_theta"])
            local_theta = number(values, "rope_local_base_freq", float)
        if "sliding_attention" in kinds and stated.get("sliding_window") is not None:
            window = number(values, "sliding_window", int)
        multipliers = {name: number(values, name, float) for name in family.multipliers}
        if family.scaled_embeddings:
            multipliers["embedding_multiplier"] = values["hidden_size"] ** 0.5
        if family.scaled_window and rotary.get("rope_type") == "linear":
            longest = number(values, "max_position_embeddings", int)
            original = int(longest / number(values, "factor", float))
            values.setdefault("original_max_position_embeddings", original)
        scaling = read_scaling(values, rope)
        # a null means that there is no such token, whatever the default is
        bos, eos, pad = (stated.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
        eos = [] if eos is None else eos
        return cls(
            model_type=model_type,
            **numbers(cls, values),
            rope_scaling=scaling,
            tie_word_embeddings=bool(values["tie_word_embeddings"]),
            attention_bias=family.qkv_bias or bool(values.get("attention_bias")),
            bos_token_id=bos,
            eos_token_id=tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=pad,
            pattern=pattern,
            rope_local_theta=local_theta,
            sliding_window=window,
            multipliers=Multipliers(**multipliers),
            moe=read_experts(values, family) if family.experts else None,
            around=around,
            delta=Delta(**numbers(Delta, values)) if "linear_attention" in kinds else None,
        )

    def to_hf(self, *, dtype: str = "bfloat16", reward: bool = False) -> Fields:
        """Return the config.json that transformers (4 and 5) and inference engines load unchanged.

        `dtype` names the stored weights' type; `reward` describes a sequence classifier with one score. Raises
        ValueError if transformers has no such class.
        """
        family, eos = self.family, self.eos_token_id
        name = family.class_name + "ForCausalLM"
        if reward:
            name = (family.classifier or family.class_name) + "ForSequenceClassification"
        if reward and family.classifier == "none":
            raise ValueError(
                f"transformers has no class for reward models of model_type {self.model_type!r}, which could load the "
                "export; train one of another family"
            )
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {}
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, **scaling}
        written = {
            "architectures": [name],
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in _REWORDED},
            "rope_scaling": scaling or None,
            "rope_parameters": rope,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": family.activation,
            "torch_dtype": dtype,
        }
        if len(family.mixers) > 1:
            written["layer_types"] = [kind.mixer for kind in self.layers]
        # transformers needs a number even where no layer has a window: it then takes its default
        if any(kind.mixer == "sliding_attention" for kind in self.layers):
            written["sliding_window"] = self.sliding_window
        if family.rotary:
            local_theta = self.rope_local_theta or self.rope_theta
            local = {"rope_type": "default", "rope_theta": local_theta}
            written["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
            written["rope_local_base_freq"] = local_theta
        if "no_rope_layer_interval" in family.defaults:
            written["no_rope_layers"] = [int(kind.rotary != "none") for kind in self.layers]
        for name in family.multipliers:
            value = getattr(self.multipliers, name)
            written[name] = int(value) if value % 1 == 0 else value
        if self.moe:
            dense = [i for i, kind in enumerate(self.layers) if kind.feed_forward == "mlp"]
            written |= {name: x for name, x in asdict(self.moe).items() if x is not None}
            written |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        if self.delta:
            written |= asdict(self.delta)
            # SGLang reads no list of layers, but this interval, and fails without one
            mixers = written["layer_types"]
            full = [i for i, mixer in enumerate(mixers, 1) if mixer == "full_attention"]
            interval = min(full, default=len(mixers) + 1)
            if full == [*range(interval, len(mixers) + 1, interval)]:
                written["full_attention_interval"] = interval
        if "partial_rotary_factor" in family.defaults:
            written["partial_rotary_factor"] = self.partial_rotary_factor
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        if family.qkv_bias:  # implied by model_type
            del written["attention_bias"]
        if reward:
            written |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        aliases = family.aliases.items()
        written |= {other: written[name] for other, name in aliases if name in written}
        written |= family.fixed
        if not self.around or reward:
            return written
        return multimodal_config(written, self.around)

    def adapted_class(self, auto: str) -> str:
        """Return the class of transformers that adapters are for: the one that AutoModelFor... makes of the folder.

        auto: CausalLM or SequenceClassification.
        """
        if self.around:
            return MULTIMODAL[self.model_type.removesuffix("_text")][auto]
        return str(self.to_hf(reward=auto != "CausalLM")["architectures"][0])

    def describe_window(self) -> str:
        """Return a line about the longest sequence that the positions were made for."""
        rope = "default rope"
        if scaling := self.rope_scaling:
            original = f"{scaling.original_max_position_embeddings:,} tokens"
            rope = f"{scaling.rope_type} rope, factor {scaling.factor:g} over {original}"
        return f"window: {self.max_position_embeddings:,} tokens ({rope}, theta {self.rope_theta:,g})"


# Fields of ModelConfig that config.json does not have, or not in this form.
_REWORDED = {
    "pattern",
    "rope_local_theta",
    "sliding_window",
    "multipliers",
    "moe",
    "delta",
    "partial_rotary_factor",
    "around",
}


# ---------------------------------------------------------------- published shapes

_PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
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


def recognised(name: str) -> ModelConfig | None:
    """Return the published shape whose name a model's name contains, as in "Meta-Llama-3-8B-Instruct", or None."""
    name = name.lower()
    # llama-3-8b, and llama3-8b
    spellings = name + " " + re.sub(r"^([a-z-]+)-(\d)", r"\1\2", name)
    shape = next((shape for key, shape in ARCHITECTURES.items() if key in spellings), None)
    for variant in _PUBLISHED["variants"]:
        if shape and all(word in name for word in variant["words"]):
            shape = replace(shape, **variant["changes"])
    return shape
