"""Why a plan cannot run, and what to change, in a sentence; imported where one is needed."""

from ulysses.plan.case import GIB, Plan
from ulysses.plan.costs import predict


def of_host(plan: Plan) -> str:
    """Say that what is moved to host memory does not fit there."""
    machine, p = plan.case.machine, predict(plan)
    return (
        f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
        f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
        f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
        "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
    )


def of_gpu(plan: Plan) -> str:
    """Say that a GPU is too small, and for what."""
    p = predict(plan)
    states, kept = "weights, optimizer and gradients", "activations"
    if plan.keeps_gradients:
        states, kept = "weights and optimizer", "activations and then gradients"
    beside = ""
    if (more := p.allocated - p.states - p.kept - p.working) > 0:
        beside = f"; sampling or passes without gradient {more / GIB:.1f} above these"
    return (
        f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{plan.name}" '
        f"({states} {p.states / GIB:.1f}, {kept} {p.kept / GIB:.1f}, work "
        f"{p.working / GIB:.1f}{beside}, the rest for CUDA and NCCL) but a GPU has "
        f'{plan.case.machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
        "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
        "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank); in a dry run, "
        "--gpu-memory says what a GPU has"
    )


def of_cpu(states: float, free: float) -> str:
    """Say that a machine without GPUs has less memory free than a run's states take, both in bytes."""
    return (
        f"on CPUs, weights, optimizer and gradients take {states / GIB:.1f} GiB of this machine's memory but "
        f"{free / GIB:.1f} GiB are free; use GPUs or a smaller model, train adapters (model.lora.rank), or set "
        "memory.host_memory if the machine has more than its kernel reports"
    )
