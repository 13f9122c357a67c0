"""From the [memory] section to what the layers do: levels, offload and tiles, decided once and alike on all ranks."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.arch import ModelConfig as Shape
from ulysses.memory.plan import (
    FASTEST_FIRST,
    GIB,
    Choice,
    Machine,
    Model,
    Options,
    Work,
    choices,
    choose_level,
)
from ulysses.memory.tiling import TilingOptions
from ulysses.training.command_line import ConfigError
from ulysses.training.config import Config

PAIRED = ("dpo", "rm")
ELEMENT_SIZE = {"bfloat16": 2, "float32": 4}


class MemoryChoice(NamedTuple):
    """Say what the trained model's layers keep, and where; `line` says why."""

    recompute: str = "none"
    offloaded_layers: int = 0
    host_bytes: int = 0  # budget of pinned memory of one process
    line: str = ""


def check_memory(config: Config) -> None:
    """Refuse memory settings that contradict each other or have no meaning."""
    memory = config.memory
    if memory.mlp_tile != "auto" and memory.mlp_tile < 0:
        raise ConfigError(f'memory.mlp_tile is {memory.mlp_tile} but must be "auto", 0 (never tile) or a number of rows')
    if memory.logits_tile != "auto" and memory.logits_tile < 1:
        raise ConfigError(f'memory.logits_tile is {memory.logits_tile} but must be "auto" or at least 1 row')
    if memory.offload == "checkpoints" and memory.recompute == "none":
        raise ConfigError(
            'memory.offload is "checkpoints" but memory.recompute "none" makes no checkpoints; set memory.recompute to '
            '"auto", "block", "keep_attention" or "keep_exchange", or memory.offload to "none"'
        )


def planner_work(config: Config, tokens: int, micro_batches: int = 1) -> Work:
    """Return the planner's view of a step whose micro-batches are full: one sequence each, or one pair."""
    documents = 2 if config.stage in PAIRED else 1
    return Work(tokens, config.parallel.sequence_parallel_size, micro_batches, documents)


def tiling(config: Config) -> TilingOptions:
    """Return how the layers cut their MLPs."""
    return TilingOptions(mlp_rows=config.memory.mlp_tile)


def adapter_parameters(config: Config, shape: Shape) -> int:
    """Count the parameters that LoRA trains."""
    d, f = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sides = {
        "q_proj": d + q, "k_proj": d + kv, "v_proj": d + kv, "o_proj": q + d,
        "gate_proj": d + f, "up_proj": d + f, "down_proj": f + d,
    }  # fmt: skip
    lora = config.model.lora
    adapters = shape.num_hidden_layers * lora.rank * sum(sides[name] for name in set(lora.targets))
    if config.stage == "ppo" and config.ppo.value == "separate":
        adapters *= 2
    return adapters + (d if config.stage in ("rm", "ppo") else 0)


def planner_model(config: Config, shape: Shape) -> Model:
    """Return the planner's view of the trained model."""
    reward = config.stage == "rm"
    parameters = shape.num_parameters(reward=reward)
    return Model(
        width=shape.hidden_size,
        intermediate=shape.intermediate_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
        layers=shape.num_hidden_layers,
        parameters=parameters,
        trained=adapter_parameters(config, shape) if config.model.lora.rank else parameters,
        has_head=not reward,
    )


def planner_options(config: Config, model: Model) -> Options:
    """Return the planner's view of the settings; a reference model beside the trained one counts as one of its size."""
    memory, rows = config.memory, config.memory.logits_tile
    reference = getattr(config, config.stage).reference if config.stage in ("dpo", "kto", "ppo") else "cached"
    beside = reference != "cached" and not (reference == "live" and config.model.lora.rank)
    return Options(
        tiling=tiling(config),
        logits_rows=0 if rows == "auto" else rows,
        element_size=ELEMENT_SIZE[config.model.dtype],
        reduce_size=ELEMENT_SIZE[config.optimizer.reduce_dtype],
        offload_optimizer=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
        frozen_parameters=model.parameters if beside else 0,
    )


def allowed_levels(config: Config) -> tuple[str, ...]:
    """Return the levels that the settings leave open, the fastest first."""
    wanted = config.memory.recompute
    levels = FASTEST_FIRST if wanted == "auto" else (wanted,)
    return tuple(level for level in levels if config.memory.offload != "checkpoints" or level != "none")


def choose_memory(config: Config, model: Model, machine: Machine | None, work: Work) -> MemoryChoice:
    """Decide levels and offload for one machine (None: CPU, where "auto" keeps everything).

    A level set by hand is honoured even if the prediction says it does not fit; the line then says so.

    Raises:
        ConfigError: if not even the smallest level is predicted to fit, with the sizes.
    """
    wanted, offload = config.memory.recompute, config.memory.offload
    levels = allowed_levels(config)
    if machine is None:
        level = levels[0] if offload == "none" or wanted != "auto" else levels[-1] if offload == "checkpoints" else "none"
        away = model.layers if offload == "checkpoints" else 0
        return MemoryChoice(level, away, 0, f"memory: recompute {level}" + (" (auto: CPU)" if wanted == "auto" else ""))
    options = planner_options(config, model)
    refuse_too_large(config, model, machine, work, options)
    choice = choose_level(model, machine, work, options, levels=levels, offload=offload)
    fits = choice is not None
    if choice is None:
        found = list(choices(model, machine, work, options, levels=levels, offload=offload))
        choice = min(found, key=lambda c: c.prediction.gpu_bytes)
    return MemoryChoice(
        choice.level, choice.offloaded_layers, int(machine.host_bytes_per_gpu), _line(config, model, machine, choice, fits)
    )


def _line(config: Config, model: Model, machine: Machine, choice: Choice, fits: bool) -> str:
    why = "auto: " if config.memory.recompute == "auto" else ""
    need, have = choice.prediction.gpu_bytes / GIB, machine.gpu_bytes / GIB
    text = f"memory: recompute {choice.level} ({why}{need:.1f} GiB predicted of {have:.1f} GiB)"
    if choice.offloaded_layers:
        text += (
            f"; {choice.offloaded_layers} of {model.layers} layers' activations in host memory, "
            f"{choice.prediction.host_bytes / GIB:.1f} GiB per process of {machine.host_bytes_per_gpu / GIB:.1f} GiB"
        )
    return text if fits else text + "; this leaves less than the usual reserve and may run out"


def refuse_too_large(config: Config, model: Model, machine: Machine, work: Work, options: Options) -> None:
    """Refuse a run whose smallest level is predicted to exceed the GPU's whole memory.

    Raises:
        ConfigError: with the sizes and what to change.
    """
    found = choices(model, machine, work, options, levels=FASTEST_FIRST, offload=config.memory.offload)
    smallest = min((c.prediction for c in found), key=lambda p: p.gpu_bytes)
    if smallest.gpu_bytes > machine.gpu_bytes:
        raise ConfigError(
            f"the run needs {smallest.gpu_bytes / GIB:.1f} GiB on each GPU even with the least kept in memory (weights, "
            f"optimizer and gradients {smallest.states / GIB:.1f}, activations {smallest.kept / GIB:.1f}, work "
            f"{smallest.working / GIB:.1f}) but a GPU has {machine.gpu_bytes / GIB:.1f} GiB; {_advice(config)}"
        )


def _advice(config: Config) -> str:
    ways = ["use more GPUs with a larger parallel.sequence_parallel_size", "lower batch.tokens_per_microbatch or data.max_length"]
    if config.memory.offload == "none":
        ways.append('set memory.offload = "auto"')
    if not config.memory.offload_optimizer:
        ways.append("set memory.offload_optimizer = true")
    if not config.model.lora.rank:
        ways.append("train adapters (model.lora.rank)")
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def this_machine(device: torch.device, peak_flops: float | None) -> Machine | None:
    """Return the smallest GPU and host memory of all ranks, so that they decide alike; None on CPU.

    All ranks call it together, before they allocate.
    """
    if device.type != "cuda":
        return None
    size = dist.get_world_size() if dist.is_initialized() else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    values = torch.tensor(
        [torch.cuda.get_device_properties(device).total_memory, free_host_bytes(), peak_flops or 0.0],
        dtype=torch.float64,
        device=device,
    )
    if size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
    gpu, host, peak = values.tolist()
    machine = Machine(size, gpu, host, local)
    return machine._replace(peak_flops=peak) if peak else machine


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
        return max(free, 0)
    except (OSError, ValueError, StopIteration):
        return 0
