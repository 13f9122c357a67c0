"""Multimodal folders of which the text model trains: what lies around it travels into exports as it is.

config.json        {"model_type": "qwen3_5", "text_config": {...}, "vision_config": {...}, ...}
weights            model.language_model.*  lm_head.*        trained, here as model.* and lm_head.*
                   model.visual.*  mtp.*                    carried along

Gemma-3's files, but not its modules and adapters, have other names: language_model.model.* and vision_tower.*
"""

import json

from models.families import MULTIMODAL, TABLES, Fields

CARRIED: tuple[str, ...] = tuple(TABLES["carried"])
OUTSIDE, INSIDE = "model.language_model.", "model."
# What config.json may say for the whole model and the text model means too.
_OF_BOTH = ("tie_word_embeddings", "quantization_config")


def text_config(raw: Fields) -> tuple[Fields, str]:
    """Return the text model's config.json, and the whole one as JSON.

    Raises ValueError if the text model has no table of its own.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(
            f"config.json has text_config = {text!r:.60} but it must be the text model's table; correct the file"
        )
    own = f"{raw['model_type']}_text"
    if text.get("model_type", own) != own:
        raise ValueError(
            f"config.json is of {raw['model_type']} but its text_config of {text['model_type']!r:.60}, which must be "
            f"{own}; correct the file"
        )
    of_both = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    return {**text, **of_both, "model_type": own}, json.dumps(raw)


def around_text(written: Fields, around: str) -> Fields:
    """Return the whole config.json from the text model's and what was read around it."""
    whole = json.loads(around)
    text = dict(whole["text_config"])
    rope = (text.get("rope_parameters") or {}) | written["rope_parameters"]
    own = {name: x for name, x in written.items() if name != "architectures"}
    # transformers and vLLM prefer this one to rope_parameters
    if own["rope_scaling"] and "rope_type" in rope:
        own["rope_scaling"] = rope
    dtypes = {"torch_dtype": written["torch_dtype"], "dtype": written["torch_dtype"]}
    return whole | {
        "architectures": [MULTIMODAL[whole["model_type"]]["class_name"]],
        "text_config": text | own | dtypes | {"rope_parameters": rope},
        "tie_word_embeddings": written["tie_word_embeddings"],
        **dtypes,
    }


def file_prefix(around: str) -> str:
    """Return what files of the model with this config.json have before the text model's names, or ""."""
    return MULTIMODAL[json.loads(around)["model_type"]].get("prefix", "")


def outside(name: str, prefix: str = "") -> str:
    """Return the name that a parameter has in the whole model or, where these have a prefix, in its files."""
    if prefix:
        return prefix + name
    return OUTSIDE + name.removeprefix(INSIDE) if name.startswith(INSIDE) else name


def inside(name: str) -> str:
    """Return the name that a tensor has here."""
    for kind in MULTIMODAL.values():
        name = name.removeprefix(kind.get("prefix", ""))
    return INSIDE + name.removeprefix(OUTSIDE) if name.startswith(OUTSIDE) else name
