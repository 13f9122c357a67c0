"""From the [memory] section to what the layers do: levels, offload and tiles, decided once and alike on all ranks."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from models.arch import ModelConfig as Shape
from models.decoder import count_parameters, empty_model
from models.hf_format import read_config, resolve_model
from ulysses.memory.levels import LEVELS
from ulysses.memory.plan import (
    GIB,
    H200_FLOPS,
    Case,
    Machine,
    Model,
    choose,
    divisors,
    longest_sequence,
    one_level,
    predict,
    recommend,
    step_seconds,
)
from ulysses.training.config import DTYPES, Config
from ulysses.training.metrics import device_peak_flops
from ulysses.training.section import ConfigError

ASSUMED_GIB = 80.0  # of a GPU, where there is none and --gpu-memory is not given


class MemoryChoice(NamedTuple):
    """What each of the trained model's layers keeps, the first layer's first, and where; `line` says why."""

    recompute: tuple[str, ...]
    offloaded_layers: int = 0
    host_bytes: int = 0  # budget of pinned memory of one process
    line: str = ""


def adapter_parameters(config: Config, shape: Shape) -> int:
    """Count the parameters that LoRA trains; 0 without it."""
    lora, value = config.model.lora, config.stage_class.facts(config).value
    if not lora.rank:
        return 0
    adapters = lora.rank * sum(
        sum(module.weight.shape)
        for name, module in empty_model(shape).named_modules()
        if name.rpartition(".")[2] in lora.targets
    )
    score = shape.hidden_size * bool(config.stage_class.reward or value)
    return adapters * (1 + (value == "separate")) + score


def plain_model(shape: Shape, *, adapters: int = 0, reward: bool = False) -> Model:
    """Return the planner's view of a model that trains all its weights, or only this many of `adapters`."""
    parameters = count_parameters(shape, reward=reward)
    return Model(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.vocab_size,
        shape.num_hidden_layers,
        parameters + adapters,
        trained=adapters or parameters,
        has_head=not reward,
        qk_norm=shape.qk_norm,
    )


def planner_model(config: Config, shape: Shape) -> Model:
    """Return the planner's view of the trained model; PPO's value is part of it."""
    adapters, where = adapter_parameters(config, shape), config.stage_class.facts(config).value
    model = plain_model(shape, adapters=adapters, reward=config.stage_class.reward)
    scores = count_parameters(shape, reward=True)
    value = {"": 0, "shared": shape.hidden_size, "separate": scores}[where]
    return model._replace(
        parameters=model.parameters + value,
        trained=model.trained + value * (not adapters),
        decoders=1 + (where == "separate"),
    )


def planner_case(
    config: Config,
    shape: Shape,
    machine: Machine,
    tokens: int,
    micro_batches: int = 1,
    squares: float = 0.0,
) -> Case:
    """Return the planner's view of a run: micro-batches of `tokens`, full of longest sequences.

    The degree "auto" is the smallest whose plan fits, or all processes if none does. `squares` counts what the tokens
    attend to, as Case has it; 0 is what sequences that share nothing do.
    """
    stage, facts = config.stage_class, config.stage_class.facts(config)
    others = [
        plain_model(_other(other.path, shape), reward=other.reward)
        for other in stage.other_models(config)
    ]
    others += [plain_model(shape)] * facts.keeps_initial
    case = Case(
        planner_model(config, shape),
        machine,
        tokens,
        config.parallel.sequence_parallel_size,
        micro_batches,
        documents=max(stage.sequences_per_example, tokens // facts.longest_example),
        squares=squares,
        forwards=facts.extra_forwards,
        rollout=stage.planned_rollout(config, machine.gpus),
        common_heads=gcd(shape.num_attention_heads, *(other.heads for other in others)),
        allowed=allowed_levels(config),
        element_size=DTYPES[config.model.dtype].itemsize,
        others=tuple(others),
        saves=True,
        **config.memory.model_dump(exclude={"recompute", "host_memory"}),
    )
    if config.parallel.sequence_parallel_size == "auto":
        degrees = divisors(machine.gpus)[:-1]
        fitting = (sp for sp in degrees if choose(case._replace(sp=sp)))
        case = case._replace(sp=next(fitting, machine.gpus))
    return case


def _other(path: str, shape: Shape) -> Shape:
    """Return another model's shape; one that is not here counts as large as the trained one."""
    with suppress(ValueError, OSError):
        return read_config(resolve_model(path, need_weights=False))
    return shape


def allowed_levels(config: Config) -> tuple[str, ...]:
    """Return the levels that the settings leave open, the fastest first."""
    wanted = config.memory.recompute
    if wanted != "auto":
        return (wanted,)
    return LEVELS[1:] if config.memory.offload == "checkpoints" else LEVELS


def choose_memory(
    config: Config, shape: Shape, machine: Machine | None, tokens: int
) -> MemoryChoice:
    """Decide every layer's level and the offload for micro-batches of `tokens`.

    machine: None is the CPU, where "auto" keeps everything. Settings made by hand are honoured while the GPU's whole
    memory might do; the line says if the reserve is gone, or if the host seems too small although nothing is moved
    there.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    offload, layers = config.memory.offload, shape.num_hidden_layers
    auto = config.memory.recompute == "auto"
    if machine is None:
        level, why = allowed_levels(config)[0], " (auto: CPU)" * auto
        away = layers * (offload == "checkpoints")
        return MemoryChoice((level,) * layers, away, 0, f"memory: recompute {level}{why}")
    if offload == "checkpoints" and not machine.host_bytes:
        raise ConfigError(
            'memory.offload is "checkpoints" but the node\'s memory is unknown, so nothing can be moved there; set '
            "memory.host_memory"
        )
    case = planner_case(config, shape, machine, tokens)
    choice = choose(case)
    if choice is None:
        uniform = [one_level(case, level) for level in case.allowed]
        choice = min(uniform, key=lambda c: (not predict(c).fits_host, predict(c).gpu))
        _refuse_too_large(choice)
    away, p = choice.offloaded_layers, predict(choice)
    line = (
        f"memory: recompute {choice.name} ({'auto: ' * auto}{p.gpu / GIB:.1f} GiB predicted of "
        f"{machine.gpu_bytes / GIB:.1f} GiB)"
    )
    if away:
        line += f"; {away} of {layers} layers' activations in host memory"
    if machine.host_bytes:
        line += (
            f"; host {p.host / GIB:.1f} GiB per process of {machine.host_budget / GIB:.1f} GiB"
        )
        if p.host > machine.host_budget:
            line += " that seem free (if the node has more, memory.host_memory says so)"
    if not p.fits:
        line += "; this leaves less than the usual reserve and may run out"
    room = int(machine.host_budget - p.host + p.offloaded) if away else 0
    return MemoryChoice(choice.levels, away, room, line)


def _refuse_too_large(smallest: Case) -> None:
    """Refuse a run whose smallest choice is predicted to exceed the GPU's whole memory, or the host's share."""
    p, machine = predict(smallest), smallest.machine
    if not p.fits_host:
        raise ConfigError(
            f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
            f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
            f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
            "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
        )
    if p.gpu > machine.gpu_bytes:
        rest = p.gpu - p.states - p.kept - p.working
        raise ConfigError(
            f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{smallest.name}" (weights, '
            f"optimizer and gradients {p.states / GIB:.1f}, activations {p.kept / GIB:.1f}, work "
            f"{p.working / GIB:.1f}, CUDA, NCCL and reserve {rest / GIB:.1f}) but a GPU has "
            f'{machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
            "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
            "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank)"
        )


def planned_machine(config: Config, given: dict[str, float], world: int) -> Machine:
    """Return the machine to plan for: the one that --gpus and the like describe, else this one, else GPUs of 80 GiB."""
    gib, here = given.get("gpu_memory", ASSUMED_GIB), torch.cuda.is_available()
    if here and "gpu_memory" not in given:
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    host = given.get("host_memory", config.memory.host_memory) * GIB
    if not host and "gpus" not in given:
        host = free_host_bytes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", min(world, 8)))
    peak = device_peak_flops() or H200_FLOPS
    # an H200's float32 is that much slower than its bfloat16
    if config.model.dtype == "float32":
        peak /= 15
    return Machine(world, gib * GIB, host, local, peak)


def plan_lines(
    config: Config,
    shape: Shape,
    given: dict[str, float],
    world: int,
    tokens: int,
    micro_batches: int,
    squares: float = 0.0,
) -> Iterator[str]:
    """Yield what --dry-run prints about memory and time.

    That is a line per level, the longest sequence, the settings to use, and what the run itself would choose. `given`
    holds what the command line has of --gpus, --gpu-memory and --host-memory; `tokens` fill a micro-batch, `squares`
    counts what they attend to (planner_case).

    Raises:
        ConfigError: at the end, if the run does not fit a GPU whose memory is known.
    """
    machine = planned_machine(config, given, world)
    stage, known = config.stage_class, "gpu_memory" in given or torch.cuda.is_available()
    facts = stage.facts(config)
    case = planner_case(config, shape, machine, tokens, micro_batches, squares)
    assumed = "" if known else " (assumed; --gpu-memory says otherwise)"
    speed = "" if device_peak_flops() else ", as fast as an H200"
    told = f"{machine.host_bytes / GIB:.0f} GiB of host memory per node"
    host = told if machine.host_bytes else "host memory unknown (--host-memory)"
    yield (
        f"predicted for {world} GPU{'s' * (world > 1)} of {machine.gpu_bytes / GIB:.1f} GiB{assumed}{speed}, {host}:"
    )
    yield (
        f"{case.model.parameters:,} parameters, {case.model.trained:,} trained; {micro_batches} "
        f"micro-batch{'es' * (micro_batches > 1)} per group and step, the fullest: {tokens:,} tokens in "
        f"{case.documents} sequence{'s' * (case.documents > 1)}"
    )
    if case.others:
        frozen = sum(other.parameters for other in case.others)
        yield f"the run's other models have {frozen:,} parameters, all frozen"
    yield f"  {'recompute':<16}{'GPU GiB':>9}{'host GiB / node':>17}{'layers offloaded':>18}{'s / step':>10}"
    for level in LEVELS[1:] if case.offload == "checkpoints" else LEVELS:
        choice = one_level(case, level)
        p = predict(choice)
        yield (
            f"  {level:<16}{p.gpu / GIB:9.1f}{p.host * machine.local_processes / GIB:17.1f}"
            f"{choice.offloaded_layers:18}{step_seconds(choice):10.2f}{'' if p.fits else '   does not fit'}"
        )
    if case.rollout:
        yield f"  (each step's share of a rollout to {facts.examples_per_load} prompts included)"
    answer = facts.longest_example - config.data.max_length
    note = f", {answer:,} of them the answer" if answer else ""
    if stage.sequences_per_example == 2:
        note = " on each side of a pair"
    for sp in sorted({case.sp, world}):
        like = case._replace(sp=sp, documents=stage.sequences_per_example)
        longest = longest_sequence(like)
        yield f"longest sequence at sequence_parallel_size {sp}: {longest:,} tokens{note}"
    yield _recommendation(config, case)
    try:
        yield choose_memory(config, shape, machine, tokens).line
    except ConfigError as error:
        if known:
            raise
        yield f"does not fit: {error}"


def _recommendation(config: Config, case: Case) -> str:
    """Return the fastest settings for this length; what the configuration fixes by hand is left open here."""
    groups = case.machine.gpus // case.sp
    batches = min(
        config.stage_class.facts(config).examples_per_step, case.micro_batches * groups
    )
    for names in ((), ("offload_optimizer",), ("offload_optimizer", "offload_parameters")):
        choice = recommend(case._replace(**dict.fromkeys(names, True)), batches)
        if choice is not None:
            p, more = predict(choice), "".join(f", memory.{name} = true" for name in names)
            return (
                f"recommended for this length: parallel.sequence_parallel_size = {choice.sp}, "
                f'memory.recompute = "auto" ({choice.name}), memory.offload = "{choice.offload}"{more}: '
                f"{p.gpu / GIB:.1f} GiB, {p.host * case.machine.local_processes / GIB:.0f} GiB of a node, "
                f"{step_seconds(choice):.2f} s / step"
            )
    return "no sequence_parallel_size fits this length on these GPUs, with any recompute and offload"


def this_machine(device: torch.device, host_gib: float = 0.0) -> Machine | None:
    """Return the smallest GPU and host memory of all ranks and the largest node, so that they decide alike.

    None on CPU. `host_gib` is a node's host memory (memory.host_memory), 0 what its kernel reports. All ranks call it
    together, before they allocate.
    """
    if device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory
    facts = [memory, host_gib * GIB or free_host_bytes(), -int(os.environ["LOCAL_WORLD_SIZE"])]
    values = torch.tensor(facts, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    gpu, host, node = values.tolist()
    return Machine(dist.get_world_size(), gpu, host, -int(node))


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered.

    A machine that is given memory on demand reports less than there will be; memory.host_memory is for it.
    """
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return max(free, 0)
