"""From the [memory] section to what the layers do: levels, offload and tiles, decided once and alike on all ranks."""

import os
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.arch import ModelConfig as Shape
from models.hf_format import read_config, resolve_model
from ulysses.memory.case import GIB, Machine, Model, Options, Work
from ulysses.memory.levels import AUTOGRAD, LEVELS
from ulysses.memory.plan import (
    FASTEST_FIRST,
    Choice,
    choices,
    choose_level,
    host_budget,
    keep_gathered,
)
from ulysses.memory.tiling import TilingOptions, head_chunk_counts
from ulysses.training.config import Config
from ulysses.training.section import ConfigError

ELEMENT_SIZE = {"bfloat16": 2, "float32": 4}


class MemoryChoice(NamedTuple):
    """Say what each of the trained model's layers keeps, the first layer's first, and where; `line` says why."""

    recompute: tuple[str, ...] = ()
    offloaded_layers: int = 0
    host_bytes: int = 0  # budget of pinned memory of one process
    line: str = ""
    head_chunks: int = 1
    gathered_layers: int = (
        0  # the last ones, whose gathered weights stay from the forward to the backward pass
    )


def check_memory(config: Config) -> None:
    """Refuse memory settings that contradict each other or have no meaning."""
    memory = config.memory
    if memory.mlp_tile != "auto" and memory.mlp_tile < 0:
        raise ConfigError(
            f'memory.mlp_tile is {memory.mlp_tile} but must be "auto", 0 (never tile) or a number of rows'
        )
    if memory.logits_tile != "auto" and memory.logits_tile < 1:
        raise ConfigError(
            f'memory.logits_tile is {memory.logits_tile} but must be "auto" or at least 1 row'
        )
    if memory.gathered_layers != "auto" and memory.gathered_layers < 0:
        raise ConfigError(
            f'memory.gathered_layers is {memory.gathered_layers} but must be "auto", 0 (none) or a number of layers'
        )
    if memory.head_chunks != "auto" and memory.head_chunks < 1:
        raise ConfigError(
            f'memory.head_chunks is {memory.head_chunks} but must be "auto", 1 (all heads at once) or a number of groups'
        )
    if memory.head_chunks not in ("auto", 1) and memory.recompute in AUTOGRAD:
        raise ConfigError(
            f'memory.head_chunks is {memory.head_chunks} but memory.recompute "{memory.recompute}" keeps all heads at once; set '
            'memory.head_chunks to 1, or memory.recompute to "auto", "pair", "block", "keep_attention" or "keep_exchange"'
        )
    if memory.offload == "checkpoints" and memory.recompute in AUTOGRAD:
        raise ConfigError(
            f'memory.offload is "checkpoints" but memory.recompute "{memory.recompute}" makes no checkpoints; set memory.recompute to '
            '"auto", "pair", "block", "keep_attention" or "keep_exchange", or memory.offload to "none"'
        )


def check_head_chunks(config: Config, shape: Shape) -> None:
    """Refuse a number of head groups that the model's heads, or the ranks that share them, do not allow."""
    try:
        tiling(config).check_heads(
            shape.num_attention_heads, shape.num_key_value_heads, _head_ranks(config, shape)
        )
    except ValueError as error:
        raise ConfigError(f"memory.{error}") from None


def planner_work(config: Config, tokens: int, *, micro_batches: int = 1, world: int = 1) -> Work:
    """Return the planner's view of a step on `world` processes whose micro-batches are full of longest sequences."""
    stage = config.stage_class
    documents = max(stage.sequences_per_example, tokens // stage.longest_example(config))
    return Work(
        tokens,
        config.parallel.sequence_parallel_size,
        micro_batches,
        documents,
        stage.extra_forwards(config),
        stage.planned_rollout(config, world),
    )


def _head_divisor(config: Config, shape: Shape) -> int:
    """Return what the ranks that exchange heads must divide besides the trained model's: one mesh serves all; 0 for no other."""
    return gcd(
        *(
            _other(other.path, shape).num_attention_heads
            for other in config.stage_class.other_models(config)
        )
    )


def _head_ranks(config: Config, shape: Shape) -> int:
    return gcd(
        config.parallel.sequence_parallel_size,
        shape.num_attention_heads,
        _head_divisor(config, shape),
    )


def tiling(config: Config, head_chunks: int | None = None) -> TilingOptions:
    """Return how the layers cut their MLPs and heads; `head_chunks` is what was chosen, None what is set ("auto": 1)."""
    wanted = config.memory.head_chunks if head_chunks is None else head_chunks
    return TilingOptions(
        mlp_rows=config.memory.mlp_tile, head_chunks=1 if wanted == "auto" else wanted
    )


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
    stage = config.stage_class
    if stage.value(config) == "separate":
        adapters *= 2
    return adapters + (d if stage.reward or stage.value(config) else 0)


def plain_model(shape: Shape, *, adapters: int = 0, reward: bool = False) -> Model:
    """Return the planner's view of a model of which all weights are trained, or only so many of `adapters`."""
    parameters = shape.num_parameters(reward=reward)
    return Model(
        width=shape.hidden_size,
        intermediate=shape.intermediate_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
        layers=shape.num_hidden_layers,
        parameters=parameters + adapters,
        trained=adapters or parameters,
        has_head=not reward,
    )


def planner_model(config: Config, shape: Shape) -> Model:
    """Return the planner's view of the trained model; PPO's value is part of it."""
    adapters = adapter_parameters(config, shape) if config.model.lora.rank else 0
    model = plain_model(shape, adapters=adapters, reward=config.stage_class.reward)._replace(
        head_divisor=_head_divisor(config, shape)
    )
    where = config.stage_class.value(config)
    if not where:
        return model
    separate = where == "separate"
    value = shape.num_parameters(reward=True) if separate else shape.hidden_size
    trained = model.trained if adapters else model.trained + value
    return model._replace(
        parameters=model.parameters + value, trained=trained, decoders=2 if separate else 1
    )


def planner_options(config: Config, shape: Shape) -> Options:
    """Return the planner's view of the settings, models beside the trained one included."""
    memory, rows = config.memory, config.memory.logits_tile
    stage = config.stage_class
    frozen = sum(
        _other(other.path, shape).num_parameters(reward=other.reward)
        for other in stage.other_models(config)
    )
    if stage.keeps_initial(config):
        frozen += shape.num_parameters()
    counts = head_chunk_counts(
        shape.num_attention_heads, shape.num_key_value_heads, _head_ranks(config, shape)
    )
    return Options(
        tiling=tiling(config),
        head_chunks=counts if memory.head_chunks == "auto" else (),
        logits_rows=0 if rows == "auto" else rows,
        element_size=ELEMENT_SIZE[config.model.dtype],
        gathered_layers=0
        if memory.gathered_layers == "auto"
        else min(memory.gathered_layers, shape.num_hidden_layers),
        offload_optimizer=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
        frozen_parameters=frozen,
        saves=True,
    )


def _other(path: str, shape: Shape) -> Shape:
    """Return another model's shape; one that is not here counts as large as the trained one."""
    try:
        return read_config(resolve_model(path, need_weights=False))
    except (ValueError, OSError):
        return shape


def allowed_levels(config: Config) -> tuple[str, ...]:
    """Return the levels that the settings leave open, the fastest first; MLPs are cut "auto"-matically where "none" needs it."""
    wanted, memory = config.memory.recompute, config.memory
    levels = (
        FASTEST_FIRST
        if wanted == "auto"
        else AUTOGRAD[::-1]
        if wanted == "none" and memory.mlp_tile == "auto"
        else (wanted,)
    )
    without = (
        AUTOGRAD
        if memory.offload == "checkpoints" or (wanted == "auto" and tiling(config).head_chunks > 1)
        else ()
    )
    return tuple(level for level in levels if level not in without)


def choose_memory(
    config: Config, shape: Shape, machine: Machine | None, work: Work
) -> MemoryChoice:
    """Decide every layer's level and the offload for one machine (None: CPU, where "auto" keeps everything).

    Settings made by hand are honoured while the GPU's whole memory might do; the line says if the reserve is gone, or if the
    host seems too small although nothing is moved there.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    levels, offload, layers = allowed_levels(config), config.memory.offload, shape.num_hidden_layers
    if machine is None:
        away = layers if offload == "checkpoints" else 0
        level = levels[-1] if offload == "checkpoints" else levels[0]
        why = " (auto: CPU)" if config.memory.recompute == "auto" else ""
        gathered = planner_options(config, shape).gathered_layers
        return MemoryChoice(
            (level,) * layers,
            away,
            0,
            f"memory: recompute {level}{why}",
            tiling(config).head_chunks,
            gathered,
        )
    if offload == "checkpoints" and not machine.host_bytes:
        raise ConfigError(
            'memory.offload is "checkpoints" but the node\'s memory is unknown, so nothing can be moved there; set memory.host_memory'
        )
    model, options = planner_model(config, shape), planner_options(config, shape)
    choice = choose_level(model, machine, work, options, levels=levels, offload=offload)
    fits = choice is not None
    if choice is None:
        found = list(choices(model, machine, work, options, levels=levels, offload=offload))
        choice = min(
            found, key=lambda c: (not c.prediction.fits_host(machine), c.prediction.gpu_bytes)
        )
        _refuse_too_large(config, model, machine, work, choice)
    if fits and config.memory.gathered_layers == "auto":
        choice = keep_gathered(model, machine, work, choice)
    elsewhere = choice.prediction.host_bytes - choice.prediction.offloaded
    room = int(host_budget(machine) - elsewhere) if choice.offloaded_layers else 0
    line = _line(config, machine, choice, fits)
    gathered = choice.options.gathered_layers
    return MemoryChoice(
        choice.levels, choice.offloaded_layers, room, line, choice.head_chunks, gathered
    )


def _line(config: Config, machine: Machine, choice: Choice, fits: bool) -> str:
    why = "auto: " if config.memory.recompute == "auto" else ""
    need, have = choice.prediction.gpu_bytes / GIB, machine.gpu_bytes / GIB
    text = f"memory: recompute {choice.name} ({why}{need:.1f} GiB predicted of {have:.1f} GiB)"
    if choice.head_chunks > 1:
        text += f"; attention in {choice.head_chunks} groups of heads"
    if choice.options.gathered_layers:
        text += f"; weights of {choice.options.gathered_layers} of {choice.layers} layers stay gathered for the backward pass"
    if choice.offloaded_layers:
        text += f"; {choice.offloaded_layers} of {choice.layers} layers' activations in host memory"
    if machine.host_bytes:
        text += f"; host {choice.prediction.host_bytes / GIB:.1f} GiB per process of {host_budget(machine) / GIB:.1f} GiB"
        if choice.prediction.host_bytes > host_budget(machine):
            text += " that seem free (if the node has more, memory.host_memory says so)"
    return text if fits else text + "; this leaves less than the usual reserve and may run out"


def _refuse_too_large(
    config: Config, model: Model, machine: Machine, work: Work, smallest: Choice
) -> None:
    """Refuse a run whose smallest choice is predicted to exceed the GPU's whole memory, or the host's share."""
    p, memory = smallest.prediction, config.memory
    if not p.fits_host(machine):
        named = (
            ("offload_optimizer", memory.offload_optimizer),
            ("offload_parameters", memory.offload_parameters),
        )
        ways = [f"set memory.{name} = false" for name, on in named if on]
        raise ConfigError(
            f"each process needs {p.host_bytes / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is offloaded, but "
            f"has {host_budget(machine) / GIB:.1f} GiB, its share of the node's {machine.host_bytes / GIB:.1f} GiB; {', '.join(ways)}, "
            "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
        )
    if p.gpu_bytes > machine.gpu_bytes:
        what = (
            f'with memory.recompute = "{config.memory.recompute}"'
            if config.memory.recompute != "auto"
            else ""
        )
        rest = p.gpu_bytes - p.states - p.kept - p.working
        raise ConfigError(
            f"the run needs {p.gpu_bytes / GIB:.1f} GiB on each GPU {what or 'even with the least kept in memory'} (weights, "
            f"optimizer and gradients {p.states / GIB:.1f}, activations {p.kept / GIB:.1f}, work {p.working / GIB:.1f}, "
            f"CUDA, NCCL and {'rollouts' if work.rollout else 'reserve'} {rest / GIB:.1f}) but a GPU has "
            f"{machine.gpu_bytes / GIB:.1f} GiB; {_advice(config, model)}"
        )


def _advice(config: Config, model: Model) -> str:
    ways = [
        "use more GPUs with a larger parallel.sequence_parallel_size",
        "lower batch.tokens_per_microbatch or data.max_length",
    ]
    if config.memory.recompute not in ("auto", LEVELS[0]):
        ways.insert(0, 'set memory.recompute = "auto"')
    if config.memory.offload == "none":
        ways.append('set memory.offload = "auto"')
    if not config.memory.offload_optimizer:
        ways.append("set memory.offload_optimizer = true")
    if model.is_full:
        ways.append("train adapters (model.lora.rank)")
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def this_machine(
    device: torch.device, peak_flops: float | None, host_gib: float = 0.0
) -> Machine | None:
    """Return the smallest GPU and host memory of all ranks and the largest node, so that they decide alike; None on CPU.

    `host_gib` is a node's host memory, 0 what its kernel reports (memory.host_memory). All ranks call it together, before they allocate.
    """
    if device.type != "cuda":
        return None
    size = dist.get_world_size() if dist.is_initialized() else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    values = torch.tensor(
        [
            torch.cuda.get_device_properties(device).total_memory,
            host_gib * GIB or free_host_bytes(),
            peak_flops or 0.0,
            -local,
        ],
        dtype=torch.float64,
        device=device,
    )
    if size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
    gpu, host, peak, node = values.tolist()
    machine = Machine(size, gpu, host, -int(node))
    return machine._replace(peak_flops=peak) if peak else machine


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered; 0 if unknown.

    A machine that is given memory on demand reports less than there will be; memory.host_memory is for it.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
        group = Path("/sys/fs/cgroup")
        limit = (
            (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
        )
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
        return max(free, 0)
    except (OSError, ValueError, StopIteration):
        return 0
