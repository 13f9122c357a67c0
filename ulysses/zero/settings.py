"""The DeepSpeed configuration, derived from ours; DeepSpeed is told nothing about sequence parallelism."""

from typing import Any

import torch

# Keys of ZeRO that decide what the engine computes, and what to set instead. From outside they would break the gradient
# rule or the state layout.
OWNED = {
    "stage": "nothing: the engine runs ZeRO stage 3",
    "reduce_scatter": "nothing: the engine reduces gradients itself",
    "zero_quantized_gradients": "nothing: the engine reduces gradients itself",
    "zero_hpz_partition_size": "nothing: its copies would be made before the weights are filled in",
    "offload_optimizer": "memory.offload_optimizer",
    "offload_param": "memory.offload_parameters",
}


def derive(
    *,
    dtype: torch.dtype,
    offload_optimizer: bool = False,
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
        raw: the user's own keys of ZeRO, which `check_raw` has seen.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": False,  # no buffer for gradients: reduce.py takes them as they are
        "reduce_scatter": True,
        "reduce_bucket_size": 1 << 20,  # smaller gradients travel together (reduce.py)
        "stage3_prefetch_bucket_size": layer_matrices,
        "stage3_param_persistence_threshold": 100_000,
        # DeepSpeed counts what is gathered against this and stops gathering ahead at the limit; the engine
        # itself keeps the host from running far ahead of the GPU.
        "stage3_max_live_parameters": vocabulary_matrices + 4 * layer_matrices,
        "stage3_max_reuse_distance": 0,  # a layer is released after its forward pass, whatever comes next
        "sub_group_size": 10**8,  # updated at a time
        # Off: DeepSpeed would replace torch.nn.functional.linear in the whole process; our projections need
        # no such help.
        "memory_efficient_linear": False,
    }
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_optimizer:
        zero["offload_optimizer"] = host
    if offload_parameters:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 40,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero | (raw or {}),
    }


def check_raw(raw: dict[str, Any]) -> None:
    """Refuse keys of ZeRO that the engine sets itself, and those that DeepSpeed does not know.

    Raises:
        ValueError: naming the key and, where there is one, the setting to use instead.
    """
    for key in OWNED:
        if key in raw:
            raise ValueError(
                f"deepspeed.zero_optimization.{key} is owned by the engine and cannot be set there; use {OWNED[key]}"
            )
    if not raw:
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds to import
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"deepspeed.zero_optimization.{key}: {first['msg']}") from None
