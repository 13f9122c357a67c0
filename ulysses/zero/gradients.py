"""The reduced, accumulated ZeRO-3 gradient as this rank's flat slices.

Without offload DeepSpeed keeps one slice per parameter in `averaged_gradients`; with the optimizer in host memory the
slices are parts of the flat partitions' `.grad`. Both are float32, both end in padding that nobody may touch, and edits
in place are what the optimizer then sees. The norms that DeepSpeed keeps for its own clipping go stale with them; nothing
reads those, because ZeroEngine.step clips by gradient policies alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.gradients.gradients import Gradients, GradientSlice

# What this folder reads and calls of DeepSpeed's ZeRO-3 optimizer and of its parameters; none of it is a documented interface.
NEEDED = (
    "averaged_gradients", "fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer",
    "max_param_reduce_events", "offload_optimizer", "optimizer", "reduce_and_partition_stream", "reset_cpu_buffers",
    "sub_group_to_group_id", "zero_grad", "_optimizer_step", "_partition_all_parameters", "_post_step", "_pre_step",
    "_reassign_or_swap_out_partitioned_parameters",
)  # fmt: skip
NEEDED_OF_PARAMETERS = ("ds_numel", "ds_shape", "ds_tensor", "partition_numel")


def check_deepspeed(zero: Any) -> None:
    """Refuse a DeepSpeed whose ZeRO-3 optimizer or parameters lack what the engine uses.

    Raises:
        RuntimeError: naming the missing attribute and the tested version.
    """
    missing = [f"ZeRO-3 optimizer has no {name}" for name in NEEDED if not hasattr(zero, name)]
    parameters = [p for group in getattr(zero, "fp16_groups", []) for p in group]
    missing += [f"partitioned parameters have no {name}" for name in NEEDED_OF_PARAMETERS if not all(hasattr(p, name) for p in parameters)]
    if missing:
        raise RuntimeError(f"this DeepSpeed's {missing[0]}, which the engine needs; install deepspeed 0.19.8")


def zero_gradients(zero: Any, names: dict[int, str], device: torch.device) -> Gradients:
    """Return the view between the last backward of a step and the update.

    Args:
        zero: DeepSpeed's ZeRO-3 optimizer.
        names: parameter names by id().
        device: where collectives run.
    """
    if zero.offload_optimizer and device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # the slices were copied to the host asynchronously
        zero.reduce_and_partition_stream.synchronize()
    rank, entries = dist.get_rank(), []
    for index, parameters in enumerate(zero.fp16_groups):
        master = zero.fp32_partitioned_groups_flat[index]
        weights = master.detach()
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]].get("scope", "default")
        offset = 0
        for j, p in enumerate(parameters):
            size = p.partition_numel()
            start = min(rank * size, p.ds_numel)
            real = min(size, p.ds_numel - start)
            whole = master.grad.narrow(0, offset, size) if zero.offload_optimizer else zero.averaged_gradients[index][j].view(-1)
            entries.append(
                GradientSlice(
                    name=names[id(p)], shape=tuple(p.ds_shape), numel=p.ds_numel, grad=whole[:real], start=start, group=group,
                    weight=weights.narrow(0, offset, real),
                )
            )  # fmt: skip
            offset += size

    def all_reduce(tensor: Tensor, op: str) -> Tensor:
        moved = tensor.to(device)
        dist.all_reduce(moved, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return moved.to(tensor.device)

    return Gradients(entries, all_reduce)
