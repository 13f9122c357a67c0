"""From the [memory] section to what the layers do: levels, offload and tiles, decided once and alike on all ranks."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from operator import le
from pathlib import Path
from typing import Any

import psutil
import torch

from models.arch import ModelConfig
from models.decoder import count_parameters, empty_model
from models.expert_files import adapted_experts
from models.folders import read_config, resolve_model
from ulysses.config.schema import Config, Options
from ulysses.config.section import ConfigError
from ulysses.data.serve.steps import ATTENTION_WIDTHS, PlannedStep, pack_step
from ulysses.environment import local_world_size
from ulysses.memory.levels import LayerMemory
from ulysses.memory.offload import Offloader
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors, gather
from ulysses.plan.model_size import Model
from ulysses.plan.planner import (
    CPU_FLOPS,
    GAIN,
    GIB,
    H200_FLOPS,
    H200_RATE,
    Machine,
    Workload,
    pass_tokens,
    pinned_bytes,
    predict,
    step_flops,
    step_seconds,
)
from ulysses.registry import stage_of
from ulysses.run.metrics import device_peaks
from ulysses.stages.base import AuxiliaryModel

ASSUMED_GIB = 80.0  # of a GPU, where there is none and --gpu-memory is not given
CUTS = (
    *range(1, 5),
    *(n << i for i in range(1, 16) for n in (3, 4)),
)  # of a step into micro-batches


def plain_model(shape: ModelConfig, *, reward: bool = False) -> Model:
    """Return the planner's view of a model that trains all its weights."""
    parameters, moe = count_parameters(shape, reward=reward), shape.moe
    sparse = [kind.feed_forward for kind in shape.layers].count("experts")
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
        qk_norm=shape.family.qk_norm != "none",
        windows=shape.windows,
        norms_after=sum(map(bool, shape.family.norms[1::2])),
        sparse_layers=sparse,
        experts=moe.num_experts if moe else 0,
        active_experts=moe.num_experts_per_tok if moe else 0,
        expert_width=moe.moe_intermediate_size if moe else 0,
    )


def planner_model(config: Config, shape: ModelConfig) -> Model:
    """Return the planner's view of the trained model, adapters and the score head of PPO's value included."""
    stage, lora = stage_of(config), config.model.lora
    model = plain_model(shape, reward=stage.reward)
    score = shape.hidden_size * stage.requirements.value
    parameters = trained = model.parameters + score
    if lora.rank:
        matrices = empty_model(shape).named_parameters()
        own = adapted_experts(lora.targets)
        sides = 0
        for name, matrix in matrices:
            stem = name.removesuffix(".weight").rpartition(".")[2]
            if matrix.dim() == 3:  # of all experts
                sides += len(matrix) * sum(matrix.shape[1:]) * (stem in own)
            elif matrix.dim() == 2 and stem in lora.targets:
                sides += sum(matrix.shape)
        adapters = lora.rank * sides
        parameters += adapters
        trained = adapters + (score or shape.hidden_size * stage.reward)
    return model._replace(
        parameters=parameters, trained=trained, quantize=config.model.quantize
    )


def planner_case(config: Config, shape: ModelConfig, machine: Machine, tokens: int) -> Workload:
    """Return the planner's view of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" is the smallest whose plan fits, or all processes if none does.
    """
    stage = stage_of(config)
    facts = stage.requirements
    degree = config.parallel.sequence_parallel_size
    auxiliary = [(model, _auxiliary_model(model, shape)) for model in facts.models]
    others = tuple(frozen for model, frozen in auxiliary if not model.shares_weights)
    # a pass costs what its own model's size says
    own = plain_model(shape).forward_parameters
    passes = (model.passes * frozen.forward_parameters / own for model, frozen in auxiliary)
    rollout = facts.rollout
    if rollout:
        prompts = -(-facts.examples_per_load // machine.gpus)
        rollout = rollout._replace(answers=prompts * rollout.answers)
    case = Workload(
        planner_model(config, shape),
        machine,
        tokens,
        documents=max(stage.sequences_per_example, tokens // facts.longest_example),
        forwards=sum(passes, start=facts.extra_forwards),
        rollout=rollout,
        element_size=getattr(torch, config.model.dtype).itemsize,
        others=others,
        teacher=next((frozen for model, frozen in auxiliary if model.role == "teacher"), None),
        **config.memory.model_dump(exclude={"host_memory"}),
    )
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    cases = [case._replace(sp=sp) for sp in degrees]
    return next((case for case in cases if predict(choose(case)).fits), cases[-1])


def planner_run(prepared: Any, machine: Machine, train: Any) -> Workload:
    """Return the planner's view of a run and of the micro-batches of its typical step.

    Args:
        prepared: what the checks found (ulysses.check.preflight.Prepared).
        train: the training data; None plans with examples of the greatest length that the settings allow.
    """
    stage, tokens, windows = prepared.stage, prepared.budget(train), prepared.shape.windows
    case = planner_case(prepared.config, prepared.shape, machine, tokens)
    if train:
        steps = prepared.loader(train, tokens).planned_steps()
        launched = choose(case).launched_tokens * machine.gpus / case.sp
        typical, largest = (
            stage.planned_step(train, found, launched, windows) for found in steps
        )
    else:
        facts, sides = stage.requirements, stage.sequences_per_example
        longest = min(tokens, sides * facts.longest_example)
        examples = [longest] * facts.examples_per_step
        typical = largest = PlannedStep(
            examples, [sides * squares(n / sides, windows=windows) for n in examples]
        )
    auto = prepared.config.batch.tokens_per_microbatch == "auto"
    return cut_steps(case, typical, largest, auto)


def _auxiliary_model(model: AuxiliaryModel, shape: ModelConfig) -> Model:
    """Return the planner's view of it; the initial policy, and a model that is not here, are as large as the policy."""
    with suppress(ValueError, OSError):
        if model.path:
            shape = read_config(resolve_model(model.path, need_weights=False))
    return plain_model(shape, reward=model.is_reward)


def candidates(case: Workload) -> Iterator[Workload]:
    """Yield what the layers may keep, and where, the fastest choice first.

    Every level is tried with the next faster one on as many of the last layers as possible, on fewer, and on none;
    then with the activations of more and more of the first layers on the host.
    """
    layers, offload = case.model.layers, case.offload
    for faster, level in pairwise((None, *case.allowed)):
        alone = case._replace(levels=(level,) * layers, offloaded_layers=0)
        room = case.machine.host_budget - predict(alone).host
        most = int(max(0, min(layers, room / pinned_bytes(alone))))
        most *= "none" not in (offload, level)
        least = most if offload == "checkpoints" else 0
        if faster and not least:
            for n in range(1, layers):
                yield alone._replace(levels=(level,) * n + (faster,) * (layers - n))
        for away in range(least, most + 1):
            yield alone._replace(offloaded_layers=away)


def first_fit(case: Workload) -> Workload:
    """Return the first candidate that fits, or the last one, which comes nearest."""
    for found in candidates(case):
        if predict(found).fits:
            break
    return found


def choose(case: Workload) -> Workload:
    """Return the fastest choice that fits, with resident or sharded weights, or the one that comes nearest."""
    places = ["resident", "sharded"] if case.weights == "auto" else [case.weights]
    found = [first_fit(case._replace(weights=place)) for place in places]
    fitting = [choice for choice in found if predict(choice).fits]
    return min(fitting, key=step_seconds, default=found[-1])


def cut_steps(
    case: Workload, typical: PlannedStep, largest: PlannedStep, auto: bool
) -> Workload:
    """Return the case with the micro-batches that a typical step of the data is cut into; all ranks find the same.

    With `auto` they are made as large as makes a step faster by GAIN, up to a whole step, as long as nothing more than
    in the smallest, which hold the longest example, is recomputed or moved to the host for it.
    """
    groups = case.machine.gpus // case.sp
    tokens, pairs = sum(typical.tokens) / groups, sum(typical.squares) / groups

    costs = [t + q / (ATTENTION_WIDTHS * case.model.width) for t, q in zip(*typical)]

    def cut(budget: int, counted: int = 0) -> Workload:
        counted = counted or len(pack_step(typical.tokens, costs, budget, groups)[0])
        return case._replace(
            tokens=budget,
            documents=max(1, case.documents * budget // case.tokens),
            micro_batches=counted,
            mean_tokens=tokens / counted,
            squares=pairs / counted,
        )

    if not auto:
        return cut(case.tokens)
    whole = max(case.tokens, -(-sum(largest.tokens) // groups))
    budgets = sorted({max(case.tokens, -(-whole // n)) for n in CUTS})
    # what packing finds is a little more, and takes long to find for steps of thousands of examples
    smallest, *others = [choose(cut(n, math.ceil(tokens / n))) for n in budgets]

    def is_free(choice: Workload) -> bool:
        flops = (
            sum(step_flops(smallest._replace(levels=x.levels))) for x in (choice, smallest)
        )
        moved = choice.offloaded_layers > smallest.offloaded_layers
        return le(*flops) and not moved and predict(choice).fits

    allowed = [smallest, *filter(is_free, others)] if predict(smallest).fits else [smallest]
    enough = (1 + GAIN) * min(map(step_seconds, allowed))
    return cut(next(c for c in allowed if step_seconds(c) <= enough).tokens)


def longest_sequence(case: Workload) -> int:
    """Return the most tokens per document, a multiple of 1024, that some allowed level fits; 0 if not even 1024 do.

    The case says how many equal documents are in the micro-batch and how many ranks share it.
    """

    def fits(blocks: int) -> bool:
        return predict(first_fit(case._replace(tokens=1024 * blocks * case.documents))).fits

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if fits(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not fits(n)))


def choose_memory(case: Workload) -> Workload:
    """Return the case with every layer's level and the offload, as a run takes them.

    Settings made by hand are honoured while the GPU's whole memory might do.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    choice = choose(case)
    machine, p = case.machine, predict(choice)
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
    return choice._replace(pass_tokens=pass_tokens(choice))


def memory_line(choice: Workload) -> str:
    """Return a line that says what was chosen and why, and whether the reserve is gone."""
    machine, p, auto = choice.machine, predict(choice), choice.recompute == "auto"
    if not machine.is_gpu:
        return f"memory: recompute {choice.name}{' (auto: CPU)' * auto}"
    line = (
        f"memory: recompute {choice.name} ({'auto: ' * auto}{p.gpu / GIB:.1f} GiB predicted of "
        f"{machine.gpu_bytes / GIB:.1f} GiB); weights {'resident' if choice.resident else 'sharded'}"
    )
    if choice.graphs:
        line += ", layers run as CUDA graphs"
    if choice.offloaded_layers:
        line += f"; {choice.offloaded_layers} of {choice.model.layers} layers' activations in host memory"
    if not p.fits:
        line += "; this leaves less than the usual reserve and may run out"
    return line


def micro_batch_line(choice: Workload, auto: bool) -> str:
    """Return a line that says what a step is cut into."""
    count = choice.micro_batches
    return (
        f"micro-batches: {count} in a typical step, each of at most {choice.tokens:,} tokens{' (auto)' * auto}; "
        f"without gradient {choice.pass_tokens:,}"
    )


def layer_memory(choice: Workload) -> LayerMemory:
    """Return what the layers of the trained model keep, and where.

    The first layers' activations wait longest for their backward, so they leave the GPU first. Without a GPU they
    have nowhere else to go.
    """
    away, device = choice.offloaded_layers, "cuda" if torch.cuda.is_available() else "cpu"
    return LayerMemory(
        choice.levels,
        offloader=Offloader(device) if away and choice.machine.is_gpu else None,
        offloaded_layers=away,
        graphs=choice.graphs,
    )


def planned_machine(config: Config, options: Options, world: int) -> Machine:
    """Return the machine to plan for: the one that --gpus and the like describe, else this one, else GPUs of 80 GiB."""
    gpu = (options.gpu_memory or ASSUMED_GIB) * GIB
    if torch.cuda.is_available() and not options.gpu_memory:
        gpu = torch.cuda.get_device_properties(0).total_memory
    host = options.host_memory or config.memory.host_memory
    host_bytes = host * GIB or (0.0 if options.gpus else free_host_bytes())
    return Machine(world, gpu, host_bytes, local_world_size(8), *_peaks("cuda"))


def this_machine(device: torch.device, host_gib: float = 0.0) -> Machine:
    """Return the slowest and smallest GPU and host memory of all ranks and the largest node, so that they decide alike.

    On CPU there is no limit. `host_gib` is a node's host memory (memory.host_memory), 0 what its kernel reports. All
    ranks call it together, before they allocate.
    """
    own: tuple[float, float, int] = math.inf, math.inf, 1
    if device.type == "cuda":
        # of what this process may take: all, unless the program set a smaller share
        memory = int(
            torch.cuda.get_device_properties(device).total_memory
            * torch.cuda.get_per_process_memory_fraction(device)
        )
        own = memory, host_gib * GIB or free_host_bytes(), local_world_size()
    gpus, hosts, nodes, *peaks = zip(*gather((*own, *_peaks(device.type))))
    return Machine(len(nodes), min(gpus), min(hosts), max(nodes), *map(min, peaks))


def _peaks(kind: str) -> tuple[float, float]:
    """Return FLOP/s and bytes/s of this machine's GPU, of an H200 for one that is not known, or of a CPU."""
    return (
        (CPU_FLOPS, CPU_FLOPS) if kind == "cpu" else device_peaks() or (H200_FLOPS, H200_RATE)
    )


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, container limits considered.

    A machine that is given memory on demand reports less than there will be; memory.host_memory is for it.
    """
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
