"""The settings of ZeRO, and DeepSpeed's configuration among them, which is told nothing of sequence parallelism."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The settings that are the same for all models, and the keys that users may not set.
_TABLES = Path(__file__).with_name("deepspeed.toml").read_text()


class ZeroSettings(NamedTuple):
    """How the weights of a model and their updates are divided.

    Args:
        dtype: of the weights, torch.bfloat16 or torch.float32.
        offload_parameters: whether they are kept in host memory.
        sub_group_size: parameters that are updated at a time (update.py).
        reduce_bucket_size: gradients with fewer elements travel together (reduce.py).
        deepspeed: the dictionary for `deepspeed.initialize` and `zero.Init`; weights that stay whole do not read it.
    """

    dtype: torch.dtype
    offload_parameters: bool
    sub_group_size: int
    reduce_bucket_size: int
    deepspeed: dict[str, Any]


def derive(
    *,
    dtype: torch.dtype,
    offload_parameters: bool = False,
    layer_matrices: int = 1 << 20,
    vocabulary_matrices: int = 0,
    raw: dict[str, Any],
) -> ZeroSettings:
    """Return the settings of a model.

    Args:
        dtype, offload_parameters: as in ZeroSettings.
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
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    zero |= raw
    settings["bf16"] = {"enabled": dtype == torch.bfloat16}
    return ZeroSettings(
        dtype=dtype,
        offload_parameters=offload_parameters,
        # ZeRO's names, but without an optimizer DeepSpeed reads neither
        sub_group_size=zero.pop("sub_group_size"),
        reduce_bucket_size=zero.pop("reduce_bucket_size"),
        deepspeed=settings,
    )


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
