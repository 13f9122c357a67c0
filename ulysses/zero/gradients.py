"""The reduced, accumulated ZeRO-3 gradient as this rank's flat slices.

They are float32, filled by reduce.py, and edits in place are what the optimizer then sees.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.gradients.gradients import Gradients, GradientSlice

# What this folder reads and calls of DeepSpeed's ZeRO-3 optimizer and of its parameters; none of it is a documented interface.
NEEDED = (
    "fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer", "offload_optimizer",
    "optimizer", "parameter_offload", "reset_cpu_buffers", "sub_group_to_group_id", "zero_grad", "_optimizer_step",
    "_partition_all_parameters", "_post_step", "_pre_step", "_reassign_or_swap_out_partitioned_parameters",
)  # fmt: skip
NEEDED_OF_PARAMETERS = ("ds_numel", "ds_shape", "ds_tensor", "partition_numel")


def check_deepspeed(zero: Any) -> None:
    """Refuse a DeepSpeed whose ZeRO-3 optimizer or parameters lack what the engine uses.

    Raises:
        RuntimeError: naming the missing attribute and the tested version.
    """
    missing = [f"ZeRO-3 optimizer has no {name}" for name in NEEDED if not hasattr(zero, name)]
    parameters = [p for group in getattr(zero, "fp16_groups", []) for p in group]
    missing += [
        f"partitioned parameters have no {name}"
        for name in NEEDED_OF_PARAMETERS
        if not all(hasattr(p, name) for p in parameters)
    ]
    if missing:
        raise RuntimeError(
            f"this DeepSpeed's {missing[0]}, which the engine needs; install deepspeed 0.19.8"
        )


def rank_slices(zero: Any) -> Iterator[tuple[int, nn.Parameter, int, Tensor]]:
    """Give (sub-group, parameter, offset in the sub-group's flat partition, float32 gradient slice) of every trained parameter.

    The slice is without padding, possibly empty. The slices of a sub-group lie side by side: on the GPU in one buffer of
    all sub-groups, with the optimizer in host memory in its flat partition's `.grad`.
    """
    rank, start = dist.get_rank(), 0
    for index, parameters in enumerate(zero.fp16_groups):
        master, offset = zero.fp32_partitioned_groups_flat[index], 0
        flat = (
            master.grad
            if zero.offload_optimizer
            else zero.grad_partitions_flat_buffer.narrow(0, start, master.numel())
        )
        start += master.numel()
        for p in parameters:
            size = p.partition_numel()
            yield (
                index,
                p,
                offset,
                flat.narrow(0, offset, max(0, min(size, p.ds_numel - rank * size))),
            )
            offset += size


def zero_gradients(zero: Any, names: dict[int, str], device: torch.device) -> Gradients:
    """Return the view between the last backward of a step and the update.

    Args:
        zero: DeepSpeed's ZeRO-3 optimizer.
        names: parameter names by id().
        device: where collectives run.
    """
    rank, entries = dist.get_rank(), []
    for index, p, offset, grad in rank_slices(zero):
        weights = zero.fp32_partitioned_groups_flat[index].detach().narrow(0, offset, grad.numel())
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]].get(
            "scope", "default"
        )
        start = min(rank * p.partition_numel(), p.ds_numel)
        entries.append(
            GradientSlice(
                name=names[id(p)], shape=tuple(p.ds_shape), numel=p.ds_numel, grad=grad, start=start, group=group, weight=weights
            )
        )  # fmt: skip

    def all_reduce(tensor: Tensor, op: str) -> Tensor:
        moved = tensor.to(device)
        dist.all_reduce(moved, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return moved.to(tensor.device)

    return Gradients(entries, all_reduce)
