"""Multimodal folders, of which the text model alone is trained: exports hold everything else as it was.

config.json        {"model_type": "qwen3_5", "text_config": {...}, "vision_config": {...}, ...}
weights            model.language_model.*  lm_head.*        trained; the text model's names are model.* and lm_head.*
                   model.visual.*  mtp.*                    carried into exports

Gemma-3's files have other names than its modules and adapters: language_model.model.* and vision_tower.*
"""

import json

from models.families import MULTIMODAL, TABLES, Fields

CARRIED: tuple[str, ...] = tuple(TABLES["carried"])
# What parameters' names begin with in the multimodal model, and in the text model here.
MULTIMODAL_PREFIX, TEXT_PREFIX = "model.language_model.", "model."
# Fields for the whole model in config.json that hold for the text model too.
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
    text_type = f"{raw['model_type']}_text"
    if text.get("model_type", text_type) != text_type:
        raise ValueError(
            f"config.json is of {raw['model_type']} but its text_config of {text['model_type']!r:.60}, which must be "
            f"{text_type}; correct the file"
        )
    of_both = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    return {**text, **of_both, "model_type": text_type}, json.dumps(raw)


def multimodal_config(written: Fields, around: str) -> Fields:
    """Return the whole config.json with the text model's `written` in the one that was read, `around`."""
    whole = json.loads(around)
    text = dict(whole["text_config"])
    rope = (text.get("rope_parameters") or {}) | written["rope_parameters"]
    written_text = {name: x for name, x in written.items() if name != "architectures"}
    # transformers and vLLM prefer rope_scaling to rope_parameters
    if written_text["rope_scaling"] and "rope_type" in rope:
        written_text["rope_scaling"] = rope
    dtypes = {"torch_dtype": written["torch_dtype"], "dtype": written["torch_dtype"]}
    return whole | {
        "architectures": [MULTIMODAL[whole["model_type"]]["class_name"]],
        "text_config": text | written_text | dtypes | {"rope_parameters": rope},
        "tie_word_embeddings": written["tie_word_embeddings"],
        **dtypes,
    }


def file_prefix(around: str) -> str:
    """Return what the files of the model with this config.json have before the text model's names, if anything."""
    return MULTIMODAL[json.loads(around)["model_type"]].get("prefix", "")


def multimodal_name(name: str, prefix: str = "") -> str:
    """Return a parameter's name in the multimodal model, or in its files if these have a prefix."""
    if prefix:
        return prefix + name
    if name.startswith(TEXT_PREFIX):
        return MULTIMODAL_PREFIX + name.removeprefix(TEXT_PREFIX)
    return name


def text_name(name: str) -> str:
    """Return the name in the text model, from that in a file or in the multimodal model."""
    for model in MULTIMODAL.values():
        name = name.removeprefix(model.get("prefix", ""))
    if name.startswith(MULTIMODAL_PREFIX):
        return TEXT_PREFIX + name.removeprefix(MULTIMODAL_PREFIX)
    return name
