"""Hugging Face model folders: find them here or on the hub, and read their config.json and adapter_config.json."""

import json
from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

from models.arch import ModelConfig
from models.families import TABLES, Fields

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
EMBEDDINGS, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCABULARY = EMBEDDINGS, LM_HEAD  # the matrices with a row for every token
# Patterns of the files that are downloaded; "*.safetensors" is added where weights are needed.
DOWNLOADED = ["*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*"]
NOT_DOWNLOADED = ["original/*", "*/*.safetensors", "consolidated*"]
HUB_SECONDS = 5.0  # for the hub to answer whether it has a model
# Fields of adapter_config.json that change what an adapter computes, with the values of plain LoRA. Other changes, such
# as trained biases, show in the names of tensors.
_PLAIN_LORA: Mapping[str, list[object]] = TABLES["plain_lora"]
# The other fields that are read there: the least number, and an example of every type that the field may have.
_LORA_KINDS: Mapping[str, list[Any]] = TABLES["lora_kinds"]
# What PEFT takes for fields that are absent or null.
_LORA_DEFAULTS: Fields = TABLES["lora_defaults"]


def resolve_model(
    path_or_id: str,
    revision: str | None = None,
    *,
    need_weights: bool = True,
    key: str = "model.path",
) -> Path:
    """Return a local folder: the given one, or the hub snapshot of a model id at `revision` (fetched if absent).

    `key` is the setting that named the model; errors begin with it.

    Honours HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. Only json, safetensors and tokenizer files are fetched, without the
    weights if `need_weights` is false (a tokenizer or a config alone); the hub client's file locks let every process of
    a node call at once and one of them download. Raises FileNotFoundError saying what was tried.
    """
    folder = Path(expanduser(path_or_id))
    if folder.is_dir():
        return folder
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    unreached: Exception | None = None
    try:
        # asked first, because the download would wait for an answer without end; a model that is not reached may be in
        # the cache
        HfApi().model_info(path_or_id, revision=revision or "main", timeout=HUB_SECONDS)
    except HFValidationError:
        raise FileNotFoundError(
            f"{key} is {path_or_id!r}: there is no folder {folder.absolute()}, and no id of the hub is like that; "
            "correct the path"
        ) from None
    except Exception as error:
        unreached = error
    try:
        fetched = snapshot_download(
            path_or_id,
            revision=revision,
            allow_patterns=[*DOWNLOADED, "*.safetensors"] if need_weights else DOWNLOADED,
            ignore_patterns=NOT_DOWNLOADED,
            local_files_only=unreached is not None,
        )
    except (
        Exception
    ) as error:  # one of a dozen classes, which all mean that the model cannot be fetched
        cause = unreached or error
        reason = str(cause).strip().split("\n")[0]
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise FileNotFoundError(
            f"{key} is {path_or_id!r}: there is no folder {folder.absolute()}, and revision "
            f"{revision or 'main'} was not found at {constants.ENDPOINT}{offline} or in the cache "
            f"{constants.HF_HUB_CACHE} ({type(cause).__name__}: {reason:.90}); give a folder, correct the id, or log "
            "in for a gated model"
        ) from error
    return Path(fetched)


def read_config(folder: Path, **rope: object) -> ModelConfig:
    """Read config.json of a model folder; for an adapter's folder without one, that of its base.

    `rope` changes the rotary settings, as in ModelConfig.from_hf.
    """
    config = ModelConfig.from_hf(read_json(folder_with(folder, CONFIG) / CONFIG), **rope)
    ids = [("eos_token_id", token) for token in config.eos_token_id]
    # in old files -1 means that there is none
    ids.append(("pad_token_id", max(config.pad_token_id or 0, 0)))
    for name, token in ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"config.json has {name} {token!r:.60} but vocab_size {config.vocab_size}; correct one of them"
            )
    return config


def read_json(path: Path) -> Fields:
    """Read a file that holds one JSON object; raises FileNotFoundError or ValueError with its path."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}; a model folder needs it")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path.absolute()} is not a JSON object ({error}); download or write it again"
        ) from None


def read_adapter_config(folder: Path) -> Fields:
    """Read adapter_config.json, with what PEFT takes for absent fields.

    Raises ValueError for the first field that is wrong, or makes the adapter more than plain LoRA.
    """
    path = folder / ADAPTER_CONFIG
    raw = read_json(path)
    for field, plain in _PLAIN_LORA.items():
        if raw.get(field) not in plain:
            raise ValueError(
                f"{path.absolute()} has {field} = {raw.get(field)!r} but only plain LoRA is read; merge the adapter "
                "into its base with PEFT"
            )
    for field, (least, *examples) in _LORA_KINDS.items():
        value = raw.get(field)
        if type(value) not in map(type, examples) or (
            least and value is not None and not least <= value <= 1e9
        ):
            raise ValueError(
                f"{path.absolute()} has {field} = {value!r:.60}, which no adapter of PEFT has; correct the file"
            )
    return raw | {field: raw.get(field) or value for field, value in _LORA_DEFAULTS.items()}


def name_of_base(folder: Path) -> tuple[str, str | None]:
    """Return the folder or hub id of an adapter's base, and its revision."""
    raw = read_adapter_config(folder)
    base = raw.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"base_model_name_or_path in {(folder / ADAPTER_CONFIG).absolute()} is missing; write the base model's "
            "folder or hub id there"
        )
    beside = folder / Path(expanduser(base))
    return str(beside.absolute()) if beside.is_dir() else base, raw.get("revision")


def base_folder(
    folder: Path, *, need_weights: bool = True, above: tuple[Path, ...] = ()
) -> Path:
    """Return the local folder of the base model that an adapter's adapter_config.json names.

    `above` are the adapters that have this one as their base; its own base cannot be one of them.
    """
    base, revision = name_of_base(folder)
    key = f"base_model_name_or_path in {(folder / ADAPTER_CONFIG).absolute()}"
    resolved = resolve_model(base, revision, need_weights=need_weights, key=key)
    above = (*above, folder.resolve())
    if resolved.resolve() in above:
        raise ValueError(f"{key} is {base}, an adapter of itself; write the base model's there")
    if (resolved / ADAPTER_CONFIG).is_file():
        base_folder(resolved, need_weights=False, above=above)  # raises if they form a circle
    return resolved


def folder_with(folder: Path, pattern: str) -> Path:
    """Return the folder with files of the pattern: the model's own or, for an adapter that has none, its base's."""
    if (folder / ADAPTER_CONFIG).exists() and not any(folder.glob(pattern)):
        return folder_with(base_folder(folder, need_weights=False), pattern)
    return folder
