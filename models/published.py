"""The shapes of published models by name; imported when a configuration names one."""

import difflib
import tomllib
from collections.abc import Mapping
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
