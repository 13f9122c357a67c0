"""The shapes of published models by name; imported when a configuration names one."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from models.arch import ModelConfig

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
    """Return the shape that a model's own name, such as "Meta-Llama-3-8B-Instruct", contains the name of, or None."""
    name = name.lower()
    names = name + " " + re.sub(r"^([a-z-]+)-(\d)", r"\1\2", name)
    shape = next((shape for key, shape in ARCHITECTURES.items() if key in names), None)
    for variant in _PUBLISHED["variants"]:
        if shape and all(word in name for word in variant["words"]):
            shape = replace(shape, **variant["changes"])
    return shape
