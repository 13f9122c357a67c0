"""Read the fields of a config.json, refusing in one sentence what no model here has."""

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import cycle, islice
from typing import Any

from models.families import TABLES, Experts, Family, LayerKind, RopeScaling

# Fields that change what transformers' classes of these families compute, with the one value that is computed here.
NEUTRAL: Mapping[str, Any] = TABLES["neutral"]
# The fields of every type of rotary scaling; yarn needs the first two only.
_ROPE_TYPES: Mapping[str, list[str]] = TABLES["rope_types"]

# Below which a number is taken for a mistake; others must be below 2^31.
MOST: Mapping[str, float] = TABLES["most"]
# What fields that are no plain numbers must be, each with an example.
KINDS: Mapping[str, tuple[str, Any]] = TABLES["kinds"]


def read_experts(known: Mapping[str, Any], family: Family) -> Experts:
    """Read the fields of Experts, all of them positive numbers but for norm_topk_prob."""
    if family.clamped_experts:  # their width has the name that others give to the MLP's
        known = {**known, "moe_intermediate_size": known.get("intermediate_size")}
    name = "shared_expert_intermediate_size"
    return Experts(
        **numbers(Experts, known),
        norm_topk_prob=bool(known.get("norm_topk_prob")),
        shared_expert_intermediate_size=number(known, name, int)
        if family.shared_expert
        else None,
    )


def read_layers(known: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Read the kinds of all layers; the shortest pattern that repeats to them."""
    count = number(known, "num_hidden_layers", int)

    def of_layers(name: str, kind: type, default: list[Any]) -> list[Any]:
        """Return the entries of a list that has one for every layer."""
        given = known.get(name) or default
        if type(given) is not list or {*map(type, given)} != {kind} or len(given) < count:
            raise ValueError(
                f"config.json has {name} = {given!r:.60} but it must be a list of {kind.__name__} with an entry for "
                f"each of num_hidden_layers = {count} layers; correct the file"
            )
        return given[:count]

    period = family.mixers
    if "full_attention_interval" in family.defaults:
        interval = number(known, "full_attention_interval", int)
        period = (*period[:1] * (interval - 1), period[-1])
    mixers = of_layers("layer_types", str, [*islice(cycle(period), count)])
    rotated = [1] * count
    if "no_rope_layer_interval" in family.defaults:
        interval = number(known, "no_rope_layer_interval", int)
        every = [(i + 1) % interval for i in range(count)]
        rotated = of_layers("no_rope_layers", int, every)
    dense, step = known.get("mlp_only_layers") or [], known.get("decoder_sparse_step", 1)
    if strange := {*mixers} - {*family.mixers}:
        raise ValueError(
            f"config.json has layer_types of {', '.join(sorted(strange))} but {known['model_type']} has layers of "
            f"{', '.join(family.mixers)} here; use a model of these"
        )
    kinds = [
        LayerKind(
            mixer,
            "experts" if family.experts and i not in dense and not (i + 1) % step else "mlp",
            family.rotary.get(mixer, "main") if rotates else "none",
        )
        for i, (mixer, rotates) in enumerate(zip(mixers, rotated))
    ]
    shorter = (kinds[:n] for n in range(1, count + 1))
    return tuple(next(x for x in shorter if [*islice(cycle(x), count)] == kinds))


def number(known: Mapping[str, Any], name: str, kind: Any) -> Any:
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


def numbers(table: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read every number that a dataclass declares."""
    return {
        f.name: number(known, f.name, f.type) for f in fields(table) if f.type in (int, float)
    }


def read_scaling(known: dict[str, Any], changes: Mapping[str, Any]) -> RopeScaling | None:
    """Lay `changes` over the rotary settings in `known`, read the scaling and put the window right.

    The window is max_position_embeddings, and for yarn and linear at least factor x the original one. Without an
    original one, max_position_embeddings counts as such, as in transformers.
    """
    window = number(known, "max_position_embeddings", int)
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
            name: known[name] if name == "truncate" else number(known, name, float)
            for name in own[2:]
            if name in known or kind != "yarn"
        }
        scaling = RopeScaling(kind, **numbers(RopeScaling, known), **values)
        if kind != "llama3":
            window = max(window, int(scaling.factor * scaling.original_max_position_embeddings))
    known["max_position_embeddings"] = window
    return scaling
