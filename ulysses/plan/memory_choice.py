"""The plan of a case: levels, offload and micro-batch that make a step fastest and fit, alike on all ranks."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from ulysses.config.section import ConfigError
from ulysses.data.serve.steps import ATTENTION_WIDTHS, pack_step
from ulysses.memory.levels import LayerMemory
from ulysses.plan.case import Case, Plan, PlannedStep
from ulysses.plan.footprint import pinned_layer, predict
from ulysses.plan.machine import GIB
from ulysses.plan.seconds import pass_tokens, step_flops, step_seconds

GAIN = 0.01  # of a step's time, for which a micro-batch is made larger
CUTS = (
    *range(1, 5),
    *(n << i for i in range(1, 16) for n in (3, 4)),
)  # of a step into micro-batches


def candidates(case: Case) -> Iterator[Plan]:
    """Yield what the layers may keep, and where, the fastest plan first.

    Every level is tried with the next faster one on as many of the last layers as possible, on fewer, and on none;
    then with the activations of more and more of the first layers on the host.
    """
    layers, offload = case.model.layers, case.offload
    stays = case.weights == "resident" or case.machine.gpus == 1
    resident = stays and not case.offload_parameters
    for faster, level in pairwise((None, *case.allowed)):
        plan = Plan(case, (level,) * layers, resident=resident)
        most = 0
        if "none" not in (offload, level):
            room = case.machine.host_budget - predict(plan).host
            most = int(max(0, min(layers, room / pinned_layer(plan))))
        least = most if offload == "checkpoints" else 0
        if faster and not least:
            for n in range(1, layers):
                yield plan._replace(levels=(level,) * n + (faster,) * (layers - n))
        for away in range(least, most + 1):
            yield plan._replace(offloaded_layers=away)


def first_fit(case: Case) -> Plan:
    """Return the first candidate that fits, or the last one, which comes nearest; weights are sharded unless told."""
    for plan in candidates(case):
        if predict(plan).fits:
            break
    return plan


def choose(case: Case) -> Plan:
    """Return the fastest plan that fits, with resident or sharded weights, or the one that comes nearest."""
    places = ["resident", "sharded"] if case.weights == "auto" else [case.weights]
    plans = [first_fit(case._replace(weights=place)) for place in places]
    fitting = [plan for plan in plans if predict(plan).fits]
    return min(fitting, key=step_seconds, default=plans[-1])


def cut_steps(case: Case, typical: PlannedStep, largest: PlannedStep, auto: bool) -> Case:
    """Return the case with the micro-batches that a typical step of the data is cut into; all ranks find the same.

    With `auto` they hold the longest example, and up to a whole step as far as that pays.
    """
    groups, budget = case.machine.gpus // case.sp, case.tokens
    tokens, pairs = sum(typical.tokens) / groups, sum(typical.squares) / groups

    def cut(budget: int, count: int) -> Case:
        return case._replace(
            tokens=budget,
            documents=max(1, case.documents * budget // case.tokens),
            micro_batches=count,
            mean_tokens=tokens / count,
            squares=pairs / count,
            shares=typical.shares,
        )

    if auto:
        whole = max(budget, -(-sum(largest.tokens) // groups))
        budgets = sorted({max(budget, -(-whole // n)) for n in CUTS})
        # what packing finds is a little more, and takes long to find for steps of thousands of examples
        plans = (choose(cut(n, math.ceil(tokens / n))) for n in budgets)
        budget = _size_that_pays(*plans).case.tokens
    widths = ATTENTION_WIDTHS * case.model.shape.hidden_size
    costs = [t + q / widths for t, q in zip(typical.tokens, typical.squares)]
    return cut(budget, len(pack_step(typical.tokens, costs, budget, groups)[0]))


def _size_that_pays(smallest: Plan, *others: Plan) -> Plan:
    """Return the plan with the smallest micro-batch that no other makes faster by GAIN.

    Nothing more than with the smallest one is recomputed or moved to the host for it.
    """
    if not predict(smallest).fits:
        return smallest
    least = sum(step_flops(smallest))

    def is_free(plan: Plan) -> bool:
        again = sum(step_flops(smallest._replace(levels=plan.levels))) > least
        moved = plan.offloaded_layers > smallest.offloaded_layers
        return predict(plan).fits and not again and not moved

    allowed = [smallest, *filter(is_free, others)]
    fastest = min(allowed, key=step_seconds)
    trained = fastest.case
    if trained.rollout:  # passes over it have micro-batches of their own
        trained = trained._replace(forwards=0.0, rollout=None)
    enough = step_seconds(fastest) + GAIN * step_seconds(fastest._replace(case=trained))
    return next(plan for plan in allowed if step_seconds(plan) <= enough)


def choose_memory(case: Case) -> Plan:
    """Return the plan of a case, as a run takes it.

    Settings made by hand are honoured while the GPU's whole memory might do.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    plan = choose(case)
    machine, p = case.machine, predict(plan)
    if not p.fits_host:
        raise ConfigError(
            f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
            f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
            f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
            "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
        )
    if p.gpu > machine.gpu_bytes:
        raise ConfigError(
            f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{plan.name}" (weights, '
            f"optimizer and gradients {p.states / GIB:.1f}, activations {p.kept / GIB:.1f}, work "
            f"{p.working / GIB:.1f}, the rest for CUDA and NCCL) but a GPU has "
            f'{machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
            "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
            "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank); in a dry run, "
            "--gpu-memory says what a GPU has"
        )
    return plan._replace(pass_tokens=pass_tokens(plan))


def memory_line(plan: Plan) -> str:
    """Return a line that says what was chosen and why, and whether the reserve is gone."""
    case, machine, p = plan.case, plan.case.machine, predict(plan)
    auto = case.recompute == "auto"
    if not machine.is_gpu:
        return f"memory: recompute {plan.name}{' (auto: CPU)' * auto}"
    line = (
        f"memory: recompute {plan.name} ({'auto: ' * auto}{p.gpu / GIB:.1f} GiB predicted of "
        f"{machine.gpu_bytes / GIB:.1f} GiB); weights {'resident' if plan.resident else 'sharded'}"
    )
    if plan.graphs:
        line += ", layers run as CUDA graphs"
    if plan.offloaded_layers:
        line += f"; {plan.offloaded_layers} of {case.model.layers} layers' activations in host memory"
    if not p.fits:
        line += "; this leaves less than the usual reserve and may run out"
    return line


def micro_batch_line(plan: Plan, auto: bool) -> str:
    """Return a line that says what a step is cut into."""
    count, tokens = plan.case.micro_batches, plan.case.tokens
    return (
        f"micro-batches: {count} in a typical step, each of at most {tokens:,} tokens{' (auto)' * auto}; "
        f"without gradient {plan.pass_tokens:,}"
    )


def layer_memory(plan: Plan) -> LayerMemory:
    """Return what the layers of the trained model keep, and where.

    The first layers' activations wait longest for their backward, so they leave the GPU first. Without a GPU they
    have nowhere else to go.
    """
    away, offloader = plan.offloaded_layers, None
    if away and plan.case.machine.is_gpu:
        from ulysses.memory.offload import Offloader

        offloader = Offloader("cuda" if torch.cuda.is_available() else "cpu")
    return LayerMemory(
        plan.levels, offloader=offloader, offloaded_layers=away, graphs=plan.graphs
    )
