"""The shape of a model, from and to Hugging Face's config.json.

The decoder reads ModelConfig, its family's row (families.py) and the kinds of its layers, and knows no family by name.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, TypeVar

from models.families import (
    FAMILIES,
    MULTIMODAL,
    TABLES,
    Delta,
    Experts,
    Family,
    Fields,
    LayerKind,
    Multipliers,
    RopeScaling,
)
from models.multimodal import multimodal_config, text_config

# Fields that change what transformers' classes of these families compute, with the one value that is computed here.
NEUTRAL: Fields = TABLES["neutral"]
# The fields of every type of rotary scaling; yarn needs the first two only.
_ROPE_TYPES: Mapping[str, list[str]] = TABLES["rope_types"]

# A number from this limit on is taken for a mistake; the limit of other fields is 2^31.
LIMITS: Mapping[str, float] = TABLES["limits"]
# What fields that are no plain numbers must be, in words and by an example.
FIELD_KINDS: Mapping[str, tuple[str, object]] = TABLES["field_kinds"]
# Fields and the other field by which a file may say the same: a list with an entry for every layer, or a second name.
SYNONYMS: Mapping[str, str] = TABLES["synonyms"]

T = TypeVar("T", int, float, str)  # the type of a field
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
        named = join_fields(family.aliases, raw)
        if (
            "rope_local_base_freq" not in family.defaults
        ):  # transformers' class does not read it
            named.pop("rope_local_base_freq", None)
        stated = {**family.defaults, **named, **rotary}
        check_fixed(stated, family)
        # the same, with the default in place of null
        values = family.defaults | {k: v for k, v in stated.items() if v is not None}
        # Qwen2.5-1M was trained on this many tokens; only servers compute the chunked attention that reaches further
        if chunks := values.get("dual_chunk_attention_config"):
            values["max_position_embeddings"] = chunks.get("original_max_position_embeddings")
        heads = number(values, "num_attention_heads", int)
        values.setdefault("partial_rotary_factor", 1.0)
        if (
            stated.get("num_key_value_heads") is None
        ):  # null, too, is as many, whatever the default
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
        if family.scaled_window and "factor" in rotary:
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
        if "sliding_attention" in family.mixers:
            written["sliding_window"] = self.sliding_window
        if self.rope_local_theta:
            local = {"rope_type": "default", "rope_theta": self.rope_local_theta}
            written["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
            written["rope_local_base_freq"] = self.rope_local_theta
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
_REWORDED = (
    *("pattern", "rope_local_theta", "sliding_window", "multipliers", "moe", "delta"),
    *("partial_rotary_factor", "around"),
)


# ---------------------------------------------------------------- fields of config.json


def join_fields(aliases: Mapping[str, str], *tables: Fields) -> Fields:
    """Join tables, with one name for each field; ValueError if they give a field two values, neither of them null."""
    joined: dict[str, Any] = {}
    for name, value in chain.from_iterable(table.items() for table in tables):
        name = aliases.get(name, name)
        before = joined.get(name)
        if before not in (None, "default") and value not in (None, before):
            raise ValueError(
                f"config.json has {name} = {before!r:.60} and, in another place or under another name, {value!r:.60}; "
                "correct one of them"
            )
        joined[name] = before if value is None else value
    return joined


def check_kinds(raw: Fields) -> None:
    """Raise ValueError for a field of FIELD_KINDS that holds something of another kind."""
    for name, (description, example) in FIELD_KINDS.items():
        value: Any = raw.get(name)
        is_list = name in ("eos_token_id", "mlp_only_layers") and isinstance(value, list)
        types = {int} if is_list else {type(example), type(None)}
        if {*map(type, value if is_list else [value])} - types:
            raise ValueError(
                f"config.json has {name} = {value!r:.60} but it must be {description}; correct the file or setting"
            )


def check_quantisation(raw: Fields, family: Family) -> None:
    """Raise ValueError for weights in a quantised form that is not read."""
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method")
        is_nf4 = method == "bitsandbytes" and quantised.get("bnb_4bit_quant_type") == "nf4"
        if not is_nf4 and (method != "mxfp4" or not family.clamped_experts):
            raise ValueError(
                f"quantization_config in config.json says that the weights are quantised by {method}, but only "
                "bitsandbytes' NF4 can be trained on; use the model that they were made from, with model.quantize"
            )


def check_fixed(stated: Fields, family: Family) -> None:
    """Raise ValueError for a field whose value these models do not compute."""
    fixed = {**NEUTRAL, "hidden_act": family.activation, **family.fixed}
    for name, value in fixed.items():
        is_computed = name in NEUTRAL and name in family.defaults
        if not is_computed and stated.get(name) not in (None, value):
            raise ValueError(
                f"config.json has {name} = {stated[name]!r:.60}, which these models do not compute; use a model "
                "without it"
            )


def rotary_fields(raw: Fields, family: Family) -> Fields:
    """Return the rotary settings that lie in tables of their own, in either style, under the newer names."""
    table = raw.get("rope_parameters") or {}
    if "full_attention" in table:  # one table for each mixer
        full, local = (table.get(f"{x}_attention") or {} for x in ("full", "sliding"))
        if {type(full), type(local)} != {dict}:
            raise ValueError(
                f"config.json has rope_parameters = {table!r:.60}, where each kind of layers must have a table; "
                "correct the file"
            )
        others = {"rope_local_base_freq": "rope_theta", "local_rope_type": "rope_type"}
        table = full | {name: local.get(key) for name, key in others.items()}
    scaling = raw.get("rope_scaling") or {}
    # "type" is the older name, which files may have beside a newer table
    table = join_fields({"type": "rope_type"}, table, scaling) or family.rope_scaling
    join_fields({}, {"rope_theta": raw.get("rope_theta")}, table)  # raises if they differ
    rope_type = table.get("rope_type")
    if (scaling or "factor" in table) and not isinstance(rope_type, str):
        raise ValueError(
            f"config.json has rotary scaling {table!r:.60} without a rope_type; name it, or remove the scaling"
        )
    check_kinds(table)
    return table


def read_experts(values: Fields, family: Family) -> Experts:
    """Read the fields of Experts, all of them positive numbers but for norm_topk_prob."""
    if family.clamped_experts:  # for their width files have the name of an MLP's
        values = {**values, "moe_intermediate_size": values.get("intermediate_size")}
    shared_width = None
    if family.shared_expert:
        shared_width = number(values, "shared_expert_intermediate_size", int)
    return Experts(
        **numbers(Experts, values),
        norm_topk_prob=bool(values.get("norm_topk_prob")),
        shared_expert_intermediate_size=shared_width,
    )


def read_layers(values: Fields, family: Family) -> tuple[LayerKind, ...]:
    """Read the kinds of all layers, and return the shortest pattern that they repeat."""
    count = number(values, "num_hidden_layers", int)

    def of_layers(name: str, kind: type, default: list) -> list:
        """Return the entries of a list that has one for every layer."""
        entries = values.get(name) or default
        is_list = type(entries) is list and {*map(type, entries)} == {kind}
        if not is_list or len(entries) < count:
            raise ValueError(
                f"config.json has {name} = {entries!r:.60} but it must be a list of {kind.__name__} with an entry for "
                f"each of num_hidden_layers = {count} layers; correct the file"
            )
        return entries[:count]

    period = family.mixers
    for name in {"full_attention_interval", "sliding_window_pattern"} & family.defaults.keys():
        interval = number(values, name, int)
        period = (*period[:1] * (interval - 1), period[-1])
    mixers = of_layers("layer_types", str, [*islice(cycle(period), count)])
    rotated = [1] * count
    if "no_rope_layer_interval" in family.defaults:
        interval = number(values, "no_rope_layer_interval", int)
        by_interval = [(i + 1) % interval for i in range(count)]
        rotated = of_layers("no_rope_layers", int, by_interval)
    dense = values.get("mlp_only_layers") or []
    step = number({"decoder_sparse_step": 1} | values, "decoder_sparse_step", int)
    if others := {*mixers} - {*family.mixers}:
        raise ValueError(
            f"config.json has layer_types of {', '.join(sorted(others))} but {values['model_type']} has layers of "
            f"{', '.join(dict.fromkeys(family.mixers))} here; use a model of these"
        )
    kinds = [
        LayerKind(
            mixer,
            "experts" if family.experts and i not in dense and not (i + 1) % step else "mlp",
            family.rotary.get(mixer, "main") if is_rotated else "none",
        )
        for i, (mixer, is_rotated) in enumerate(zip(mixers, rotated))
    ]
    if family.experts and not any(kind.feed_forward == "experts" for kind in kinds):
        raise ValueError(
            f"config.json has mlp_only_layers = {dense!r:.60} and decoder_sparse_step = {step}, which leave no layer "
            "with experts; correct the file, or use a dense model"
        )
    patterns = (kinds[:n] for n in range(1, count + 1))
    return tuple(next(x for x in patterns if [*islice(cycle(x), count)] == kinds))


def number(values: Fields, name: str, kind: type[T]) -> T:
    """Return the positive number that a field holds; ValueError names a field that holds none."""
    value: Any = values.get(name)
    limit = LIMITS.get(name, 1 << 31 if kind is int else 1e38)
    if type(value) not in (int, float) or not 0 < value < limit or kind(value) != value:
        raise ValueError(
            f"config.json has {name} = {value!r:.60} but it must be a {'whole ' * (kind is int)}number above 0 and "
            f"below {limit:,.15g}; correct the file or the setting"
        )
    return kind(value)


def numbers(table: type, values: Fields) -> Fields:
    """Read every field that a dataclass declares as a number."""
    return {
        f.name: number(values, f.name, f.type) for f in fields(table) if f.type in (int, float)
    }


def read_scaling(values: Fields, changes: Fields) -> RopeScaling | None:
    """Apply `changes` to the rotary settings in `values`, return the scaling and correct the window in `values`.

    The window is max_position_embeddings, and for yarn and linear at least the factor times the original window. A file
    without an original window has max_position_embeddings in its place, as in transformers.
    """
    window = number(values, "max_position_embeddings", int)
    values.setdefault("original_max_position_embeddings", window)
    values |= changes
    rope_type = str(values.get("rope_type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise ValueError(
            f"config.json has rope type {rope_type!r} but only {', '.join(_ROPE_TYPES)} are computed; set "
            'model.rope.type = "yarn" and model.rope.factor, or use another model'
        )
    used = _ROPE_TYPES[rope_type]
    for name in changes.keys() - {"rope_type", "rope_theta", *used}:
        raise ValueError(
            f"model.rope.{name} is set but rope type {rope_type!r} does not use it; remove it, or set model.rope.type"
        )
    if changes:
        for name in used[:2] if rope_type == "yarn" else used:
            if values.get(name) is None:
                raise ValueError(f"rope type {rope_type!r} needs model.rope.{name}; set it")
        if rope_type != "llama3":
            window = values["original_max_position_embeddings"]
    scaling = None
    if rope_type != "default":
        of_type: Fields = {  # the fields after factor and original window
            name: values[name] if name == "truncate" else number(values, name, float)
            for name in used[2:]
            if name in values or rope_type != "yarn"
        }
        scaling = RopeScaling(rope_type, **numbers(RopeScaling, values), **of_type)
        if rope_type != "llama3":
            window = max(window, int(scaling.factor * scaling.original_max_position_embeddings))
    values["max_position_embeddings"] = window
    return scaling


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
    spellings = (
        name + " " + re.sub(r"^([a-z-]+)-(\d)", r"\1\2", name)
    )  # llama-3-8b, and llama3-8b
    shape = next((shape for key, shape in ARCHITECTURES.items() if key in spellings), None)
    for variant in _PUBLISHED["variants"]:
        if shape and all(word in name for word in variant["words"]):
            shape = replace(shape, **variant["changes"])
    return shape
