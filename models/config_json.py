"""Read and check the fields of Hugging Face's config.json, for models/arch.py.

Every check raises ValueError, one sentence that names the field.
"""

from collections.abc import Mapping
from dataclasses import fields
from itertools import chain, cycle, islice
from typing import Any, TypeVar

from models.families import TABLES, Experts, Family, Fields, LayerKind, RopeScaling

# Fields that change what transformers' classes of these families compute, with the one value that is computed here.
NEUTRAL: Fields = TABLES["neutral"]
# The fields of every type of rotary scaling; yarn needs the first two only.
_ROPE_TYPES: Mapping[str, list[str]] = TABLES["rope_types"]
# The fields that transformers reads in the rotary tables alone.
ROTARY = {"rope_type", *chain.from_iterable(_ROPE_TYPES.values())}

# A number from this limit on is taken for a mistake; the limit of other whole numbers is 2^31.
LIMITS: Mapping[str, float] = TABLES["limits"]
# What fields that are no plain numbers must be, in words and by an example.
FIELD_KINDS: Mapping[str, tuple[str, object]] = TABLES["field_kinds"]
# Fields and the other field by which a file may say the same: a list with an entry for every layer, or a second name.
SYNONYMS: Mapping[str, str] = TABLES["synonyms"]

T = TypeVar("T", int, float, str)  # the type of a field


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
    if {"full_attention", "sliding_attention"} & table.keys():  # one table for each mixer
        tables: list[Any] = [table.get(f"{x}_attention") for x in ("full", "sliding")]
        full, local = tables
        if not family.rotary or {*map(type, tables)} != {dict}:
            needed = (
                "each kind of layers must have a table"
                if family.rotary
                else "all layers share one table"
            )
            raise ValueError(
                f"config.json has rope_parameters = {table!r:.60}, where {needed}; correct the file"
            )
        others = {"rope_local_base_freq": "rope_theta", "local_rope_type": "rope_type"}
        table = full | {name: local.get(key) for name, key in others.items()}
    scaling = raw.get("rope_scaling") or {}
    # "type" is the older name, which files may have beside a newer table
    table = join_fields({"type": "rope_type"}, table, scaling)
    if not table and raw.get("rope_parameters") is None:
        table = family.rope_scaling
    # raises if they differ; null in one place is no value
    beside = raw.keys() & {"rope_theta", "original_max_position_embeddings"}
    table = join_fields({}, {name: raw[name] for name in beside}, table)
    rope_type = table.get("rope_type")
    if (scaling or "factor" in table) and not isinstance(rope_type, str):
        raise ValueError(
            f"config.json has rotary scaling {table!r:.60} without a rope_type; name it, or remove the scaling"
        )
    check_kinds(table)
    if "truncate" in table:  # of which null is no default, but false
        table["truncate"] = bool(table["truncate"])
    return {name: x for name, x in table.items() if x is not None}


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
        period = (period[0],) * (interval - 1) + (period[-1],)
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
        kind_of_number = "whole number" if kind is int else "number"
        raise ValueError(
            f"config.json has {name} = {value!r:.60} but it must be a {kind_of_number} above 0 and "
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
