"""The DeepSpeed configuration, derived from ours; DeepSpeed is told nothing about sequence parallelism."""

from typing import Any

import torch

# Keys that decide what the engine computes. Setting them from outside would break the gradient rule or the
# state layout.
OWNED = {
    "train_batch_size": "batch.examples",
    "train_micro_batch_size_per_gpu": "batch.tokens_per_microbatch",
    "gradient_accumulation_steps": "batch.examples",
    "gradient_clipping": "gradients.max_norm",
    "optimizer": "optimizer.lr and its section",
    "scheduler": "optimizer.schedule",
    "bf16": "model.dtype",
    "fp16": "model.dtype (float16 is not supported)",
    "communication_data_type": "optimizer.reduce_dtype",
    "sequence_parallel_size": "parallel.sequence_parallel_size",
    "activation_checkpointing": "memory.recompute",
    "zero_optimization.stage": "nothing: the engine runs ZeRO stage 3",
    "zero_optimization.reduce_scatter": "nothing: the engine reduces gradients itself",
    "zero_optimization.zero_quantized_gradients": "nothing: the engine reduces gradients itself",
    "zero_optimization.zero_hpz_partition_size": "nothing: its copies would be made before the weights are filled in",
    "zero_optimization.offload_optimizer": "memory.offload_optimizer",
    "zero_optimization.offload_param": "memory.offload_parameters",
    "checkpoint": "run.save_every and run.resume",
}
PASSED_ON = (
    "zero_optimization",
    "comms_logger",
    "dump_state",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
)


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
        raw: the user's own DeepSpeed keys, which `check_raw` has seen.
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
        "sub_group_size": int(1e9),
        # Off: DeepSpeed would replace torch.nn.functional.linear in the whole process; our projections need
        # no such help.
        "memory_efficient_linear": False,
    }
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_optimizer:
        zero["offload_optimizer"] = host
    if offload_parameters:
        zero["offload_param"] = host
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 40,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return merge(config, raw or {})


def check_raw(raw: dict[str, Any]) -> None:
    """Refuse raw DeepSpeed keys that the engine derives itself, does not pass on, or DeepSpeed does not know.

    Raises:
        ValueError: naming the key and, where there is one, the setting to use instead.
    """
    zero = raw.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"deepspeed.zero_optimization is {zero!r} but must be a table")
    for key in (*raw, *(f"zero_optimization.{key}" for key in zero)):
        if key in OWNED:
            raise ValueError(
                f"deepspeed.{key} is owned by the engine and cannot be set there; use {OWNED[key]}"
            )
        if key.partition(".")[0] not in PASSED_ON:
            raise ValueError(
                f"deepspeed.{key} is not passed on to DeepSpeed; leave it out, only these are: {', '.join(PASSED_ON)}"
            )
    if zero:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds to import
        from pydantic import ValidationError

        try:
            DeepSpeedZeroConfig(**zero)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("zero_optimization", *first["loc"])))
            raise ValueError(f"deepspeed.{place}: {first['msg']}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay the nested table `over` on `base`, in place; return `base`."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base
