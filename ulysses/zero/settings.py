"""The DeepSpeed configuration, derived from ours; DeepSpeed is told nothing about sequence parallelism."""

import tomllib
from pathlib import Path
from typing import Any

import torch

# The settings that are the same for all models, and the keys that users may not set.
_TABLES = Path(__file__).with_name("deepspeed.toml").read_text()


def derive(
    *,
    dtype: torch.dtype,
    offload_parameters: bool = False,
    layer_matrices: int = 1 << 20,
    vocabulary_matrices: int = 0,
    raw: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration dictionary for `deepspeed.initialize` and `zero.Init`.

    Args:
        dtype: dtype of the weights, torch.bfloat16 or torch.float32.
        layer_matrices: parameters in the matrices of one decoder layer; exactly one layer is gathered ahead.
        vocabulary_matrices: parameters of embedding and head together.
        raw: the user's keys of ZeRO, which `check_raw` has accepted.
    """
    settings = tomllib.loads(_TABLES)["settings"]
    zero = settings["zero_optimization"]
    zero["stage3_prefetch_bucket_size"] = layer_matrices
    # DeepSpeed stops gathering ahead when so many parameters are whole; deepspeed_internals.py keeps the host from
    # running far ahead of the GPU.
    zero["stage3_max_live_parameters"] = vocabulary_matrices + 4 * layer_matrices
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_parameters:
        zero["offload_param"] = host
    zero |= raw or {}
    return {**settings, "bf16": {"enabled": dtype == torch.bfloat16}}


def check_raw(raw: dict[str, Any]) -> None:
    """Refuse keys of ZeRO that the engine sets itself, and keys that DeepSpeed does not know.

    Raises:
        ValueError: naming the key and, where there is one, the setting to use instead.
    """
    for key, instead in tomllib.loads(_TABLES)["owned"].items():
        if key in raw:
            raise ValueError(
                f"deepspeed.zero_optimization.{key} is owned by the engine and cannot be set there; use {instead}"
            )
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds to import
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"deepspeed.zero_optimization.{key}: {first['msg']}") from None
