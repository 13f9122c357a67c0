"""From the [memory] section to what the layers do: levels, offload and tiles, decided once and alike on all ranks."""

import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from models.arch import ModelConfig
from models.decoder import count_parameters, empty_model
from models.hf_format import read_config, resolve_model
from ulysses.config.schema import Config, Options
from ulysses.config.section import ConfigError
from ulysses.environment import local_world_size
from ulysses.memory.choose import choose, one_level
from ulysses.memory.levels import LEVELS
from ulysses.memory.plan import (
    GIB,
    H200_FLOPS,
    Machine,
    Model,
    Workload,
    divisors,
    predict,
)
from ulysses.parallel.mesh import gather
from ulysses.run.metrics import device_peak_flops
from ulysses.run.registry import STAGES, requirements

ASSUMED_GIB = 80.0  # of a GPU, where there is none and --gpu-memory is not given


class MemoryChoice(NamedTuple):
    """What each of the trained model's layers keeps, the first layer's first, and where; `line` says why.

    resident: whether the weights of all models stay whole on every rank. graphs: whether layers run as CUDA graphs.
    """

    recompute: tuple[str, ...]
    offloaded_layers: int = 0
    host_bytes: int = 0  # budget of pinned memory of one process
    line: str = ""
    resident: bool = False
    graphs: bool = False


def adapter_parameters(config: Config, shape: ModelConfig) -> int:
    """Count the parameters that LoRA trains; 0 without it."""
    lora, value = config.model.lora, requirements(config).value
    if not lora.rank:
        return 0
    adapters = lora.rank * sum(
        sum(module.weight.shape)
        for name, module in empty_model(shape).named_modules()
        if name.rpartition(".")[2] in lora.targets
    )
    score = shape.hidden_size * (STAGES[config.stage].reward or value)
    return adapters + score


def plain_model(shape: ModelConfig, *, reward: bool = False) -> Model:
    """Return the planner's view of a model that trains all its weights."""
    parameters = count_parameters(shape, reward=reward)
    return Model(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.vocab_size,
        shape.num_hidden_layers,
        parameters,
        trained=parameters,
        has_head=not reward,
        qk_norm=shape.qk_norm,
    )


def planner_model(config: Config, shape: ModelConfig) -> Model:
    """Return the planner's view of the trained model, the score head of PPO's value included."""
    model = plain_model(shape, reward=STAGES[config.stage].reward)
    adapters = adapter_parameters(config, shape)
    whole = model.parameters + shape.hidden_size * requirements(config).value
    return model._replace(parameters=whole + adapters, trained=adapters or whole)


def planner_case(config: Config, shape: ModelConfig, machine: Machine, tokens: int) -> Workload:
    """Return the planner's view of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" is the smallest whose plan fits, or all processes if none does.
    """
    stage, facts, wanted = STAGES[config.stage], requirements(config), config.memory.recompute
    levels = LEVELS[1:] if config.memory.offload == "checkpoints" else LEVELS
    others, teacher, forwards = [], None, facts.extra_forwards
    forward_parameters = plain_model(shape).forward_parameters
    for model in facts.models:
        frozen = plain_model(_other(model.path, shape), reward=model.is_reward)
        forwards += model.passes * frozen.forward_parameters / forward_parameters
        if not model.shares_weights:
            others.append(frozen)
        if model.gives_logits:
            teacher = frozen
    rollout = facts.rollout
    if rollout:
        prompts = -(-facts.examples_per_load // machine.gpus)
        rollout = rollout._replace(answers=prompts * rollout.answers)
    case = Workload(
        planner_model(config, shape),
        machine,
        tokens,
        config.parallel.sequence_parallel_size,
        documents=max(stage.sequences_per_example, tokens // facts.longest_example),
        forwards=forwards,
        logits_once=facts.logits_once,
        rollout=rollout,
        common_heads=math.gcd(shape.num_attention_heads, *(other.heads for other in others)),
        allowed=levels if wanted == "auto" else (wanted,),
        element_size=getattr(torch, config.model.dtype).itemsize,
        others=tuple(others),
        teacher=teacher,
        **config.memory.model_dump(exclude={"recompute", "host_memory"}),
    )
    if config.parallel.sequence_parallel_size == "auto":
        cases = [case._replace(sp=sp) for sp in divisors(machine.gpus)]
        case = next(filter(choose, cases), cases[-1])
    return case


def _other(path: str, shape: ModelConfig) -> ModelConfig:
    """Return another model's shape; the initial policy, and one that is not here, are as large as the trained one."""
    with suppress(ValueError, OSError):
        if path:
            return read_config(resolve_model(path, need_weights=False))
    return shape


def choose_memory(case: Workload) -> MemoryChoice:
    """Decide every layer's level and the offload.

    Settings made by hand are honoured while the GPU's whole memory might do; the line says if the
    reserve is gone.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    machine, layers, auto = case.machine, case.model.layers, len(case.allowed) > 1
    # where nothing fits, the level that keeps least comes nearest
    choice = choose(case) or one_level(case, case.allowed[-1])
    away, p = choice.offloaded_layers, predict(choice)
    if machine.gpu_bytes == math.inf:
        line = f"memory: recompute {choice.name}{' (auto: CPU)' * auto}"
        return MemoryChoice(choice.levels, away, 0, line, choice.resident)
    if not p.fits_host:
        raise ConfigError(
            f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
            f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
            f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
            "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
        )
    if p.gpu > machine.gpu_bytes:
        raise ConfigError(
            f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{choice.name}" (weights, '
            f"optimizer and gradients {p.states / GIB:.1f}, activations {p.kept / GIB:.1f}, work "
            f"{p.working / GIB:.1f}, the rest for CUDA and NCCL) but a GPU has "
            f'{machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
            "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
            "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank); in a dry run, "
            "--gpu-memory says what a GPU has"
        )
    line = (
        f"memory: recompute {choice.name} ({'auto: ' * auto}{p.gpu / GIB:.1f} GiB predicted of "
        f"{machine.gpu_bytes / GIB:.1f} GiB)"
    )
    line += f"; weights {'resident' if choice.resident else 'sharded'}"
    if choice.graphs:
        line += ", layers run as CUDA graphs"
    if away:
        line += f"; {away} of {layers} layers' activations in host memory"
    if not p.fits:
        line += "; this leaves less than the usual reserve and may run out"
    room = int(machine.host_budget - p.host + p.offloaded) if away else 0
    return MemoryChoice(choice.levels, away, room, line, choice.resident, choice.graphs)


def planned_machine(config: Config, options: Options, world: int) -> Machine:
    """Return the machine to plan for: the one that --gpus and the like describe, else this one, else GPUs of 80 GiB."""
    gpu = (options.gpu_memory or ASSUMED_GIB) * GIB
    if torch.cuda.is_available() and not options.gpu_memory:
        gpu = torch.cuda.get_device_properties(0).total_memory
    host = options.host_memory or config.memory.host_memory
    return Machine(
        world,
        gpu,
        host * GIB or (0.0 if options.gpus else free_host_bytes()),
        local_world_size(8),
        device_peak_flops() or H200_FLOPS,
    )


def this_machine(device: torch.device, host_gib: float = 0.0) -> Machine:
    """Return the smallest GPU and host memory of all ranks and the largest node, so that they decide alike.

    On CPU there is no limit. `host_gib` is a node's host memory (memory.host_memory), 0 what its kernel reports. All
    ranks call it together, before they allocate.
    """
    own: tuple[float, float, int] = math.inf, math.inf, 1
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        own = memory, host_gib * GIB or free_host_bytes(), local_world_size()
    gpus, hosts, nodes = zip(*gather(own))
    return Machine(len(nodes), min(gpus), min(hosts), max(nodes))


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered.

    A machine that is given memory on demand reports less than there will be; memory.host_memory is for it.
    """
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
