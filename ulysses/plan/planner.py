"""From a run's configuration and data to its plan: what layers keep, recompute or move, and how a step is cut.

All ranks ask the same question, and choose the fastest plan that fits.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from models.arch import ModelConfig
from models.folders import read_config, resolve_model
from models.kinds import empty_model
from ulysses.config.section import ConfigError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader, pack_step
from ulysses.memory.levels import LEVELS
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.hardware import GIB, Machine
from ulysses.plan.layer_cost import PlannedModel, plain_model
from ulysses.plan.step_cost import Plan, Question, fits, predict, states, step_seconds
from ulysses.stages.base import PlannedRollout, Stage

# Bytes of AdamW's two moments of a parameter; those in 8 bits have a scale for every block.
MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}
# Parameters of a layer times tokens that take a CPU so long that its overhead for a layer is a hundredth of the time.
CPU_WORK = 5e9


# ---------------------------------------------------------------- the question


class PlannedStep(NamedTuple):
    """What a step trains.

    tokens, squares: of each example its tokens, and twice its pairs of a query and a key.
    shares: sequences share their prompts.
    """

    tokens: list[int]
    squares: list[float]
    shares: bool = False


@cache
def planner_model(stage: Stage, shape: ModelConfig) -> PlannedModel:
    """Return the planner's view of the trained model, counted on one that has no memory."""
    settings = stage.config.model
    idle_adapters = 0
    model = empty_model(shape, reward=stage.reward, value=stage.requirements.value)
    if settings.lora.rank:
        from models.lora import add_adapters

        add_adapters(model, settings.lora)
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    if shape.moe:
        of_experts = sum(size for name, size in trained.items() if ".experts.lora_" in name)
        N, k = shape.moe.num_experts, shape.moe.num_experts_per_tok
        idle_adapters = of_experts * (N - k) // N
    return PlannedModel(
        shape,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(trained.values()),
        has_head=not stage.reward,
        quantize=settings.quantize,
        idle_adapters=idle_adapters,
        lora_rank=settings.lora.rank,
    )


def planner_question(
    stage: Stage, shape: ModelConfig, machine: Machine, tokens: int
) -> Question:
    """Return the question of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" becomes the smallest whose plan fits, or all processes if none does.
    """
    config, requirements, model = stage.config, stage.requirements, planner_model(stage, shape)
    memory = config.memory
    # passes are counted in those of the trained model
    forwards = requirements.extra_forwards
    others = []
    teacher = None
    for other in requirements.models:
        frozen = shape  # of the initial policy; a model that is absent is taken to be as large
        with suppress(ValueError, OSError):
            if other.path:
                frozen = read_config(resolve_model(other.path, need_weights=False))
        frozen = plain_model(frozen, reward=other.is_reward)
        forwards += other.passes * frozen.forward_parameters / model.forward_parameters
        if not other.shares_weights:
            others.append(frozen)
        if other.role == "teacher":
            teacher = frozen
    rollout = requirements.rollout
    prompts = config.run.samples
    samples = None
    merged = config.model.lora.rank > 0
    if rollout:
        of_process = -(-requirements.examples_per_load // machine.gpus)
        rollout = rollout._replace(answers=of_process * rollout.answers, merged=merged)
    if prompts:  # every process answers all of them
        samples = PlannedRollout(
            answers=prompts if isinstance(prompts, int) else len(prompts),
            batch=config.ppo.planned_batch,
            prompt_tokens=config.data.max_length,
            new_tokens=config.ppo.max_new_tokens,
            merged=merged,
        )
    question = Question(
        model,
        machine,
        tokens,
        documents=max(stage.sequences_per_example, tokens // requirements.longest_example),
        forwards=forwards,
        logit_bytes=requirements.logit_bytes,
        rollout=rollout,
        samples=samples,
        element_size=getattr(torch, config.model.dtype).itemsize,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        others=tuple(others),
        teacher=teacher,
        recompute=memory.recompute,
        weights=memory.weights,
        offload=memory.offload,
        offload_optimizer=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
    )
    degree = config.parallel.sequence_parallel_size
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    *smaller, last = (question._replace(sp=sp) for sp in degrees)
    return next((q for q in smaller if fits(choose(q))), last)


def run_question(
    stage: Stage, shape: ModelConfig, machine: Machine, train: TokenizedDataset | None
) -> Question:
    """Return the question of a run, with the micro-batches of its typical step.

    Prompts are shared unless layers that run as CUDA graphs, which take whole sequences, are faster.

    Args:
        train: the training data; None plans with examples of the greatest length that the settings allow.
    """
    config = stage.config
    requirements = stage.requirements
    sides = stage.sequences_per_example
    longest = sides * requirements.longest_example
    budget = config.batch.tokens_per_microbatch
    auto = budget == "auto"
    # the longest example has answers that are not in the data
    is_sampled = requirements.longest_example > config.data.max_length
    if train:
        loader = StepLoader(
            stage.groups_of(train),
            requirements.examples_per_load,
            tokens_per_microbatch=0,
            seed=config.run.seed,
        )
        chosen = loader.planned_steps()

    def question_of(data: TokenizedDataset | None) -> Question:
        # a micro-batch must hold the longest example or, if that is unknown, the longest that there may be
        tokens = budget
        if auto:
            tokens = int(data.lengths.max()) if data and not is_sampled else longest
        if data:
            steps = [planned_step(stage, shape, data, indices) for indices in chosen]
        else:
            whole = min(longest, tokens)
            count = requirements.examples_per_step
            pairs = sides * squares(whole / sides, windows=shape.windows)
            steps = 2 * [PlannedStep([whole] * count, [pairs] * count)]
        return cut_steps(planner_question(stage, shape, machine, tokens), *steps, auto)

    question = question_of(train)
    if question.shares and (auto or train.apart.lengths.max() <= budget):
        shared, whole = choose(question), choose(question_of(train.apart))
        if whole.graphs and step_seconds(whole) <= step_seconds(shared):
            return whole.question
    return question


def planned_step(
    stage: Stage, shape: ModelConfig, data: TokenizedDataset, indices: list[int]
) -> PlannedStep:
    """Return what an optimizer step trains of the examples, or groups, with these indices.

    The answers of a rollout count with their greatest length. A shared prompt counts once, and its last token with
    every answer.
    """
    requirements = stage.requirements
    groups = stage.groups_of(data)
    if groups is not data:  # the first minibatch is as large as any
        count = requirements.examples_per_step // requirements.rollout.answers
        lengths, prefixes = groups.sizes(indices[:count])
    else:
        lengths, prefixes = data.sequence_lengths[indices], data.prefix_lengths[indices]
    if data.kind == "prompt":
        count = requirements.rollout.answers
        prompts = lengths.repeat(count, axis=0)[: requirements.examples_per_step]
        share = 1 - 1 / count if data.share_prompts else 0.0
        prefixes = (prompts - 1) * share
        lengths = prompts + requirements.rollout.new_tokens - prefixes
    shares = bool(data.prefix_lengths.any() or prefixes.any())
    pairs = squares(1.0 * lengths, prefixes, shape.windows)
    tokens = np.rint(lengths.sum(1)).astype(int).tolist()
    return PlannedStep(tokens, pairs.sum(1).tolist(), shares)


# ---------------------------------------------------------------- the choice


def candidates(question: Question) -> Iterator[Plan]:
    """Yield plans that differ in where the weights are and what the layers keep; the last one takes the least memory.

    Each level comes with the next faster one on as many of the last layers as possible, on fewer, and on none; then
    with the activations of more and more of the first layers on the host.
    """
    q = question
    count = question.model.shape.num_hidden_layers
    places = {"resident": [True], "sharded": [False]}.get(q.weights, [True, False])
    if q.offload_parameters or q.machine.gpus == 1:
        places = [not q.offload_parameters]
    for resident in places:
        faster = None
        for level in LEVELS if q.recompute == "auto" else (q.recompute,):
            plan = Plan(q, (level,) * count, resident=resident)
            if faster:
                for n in range(1, count):
                    yield plan._replace(levels=(level,) * n + (faster,) * (count - n))
            yield plan
            if q.offload != "none" and level != "none":
                room = q.machine.host_budget - predict(plan).host
                sums = accumulate(plan.kept)  # of the first layers
                most = len([taken for taken in sums if taken <= room])
                for away in range(1, most + 1):
                    yield plan._replace(offloaded_layers=away)
            faster = level


def choose(question: Question) -> Plan:
    """Return the fastest plan that fits or, if none does, the one that takes the least memory.

    Without GPUs the answer is given at once: nothing is recomputed unless the settings say so.
    """
    plans = candidates(question)
    if not question.machine.is_gpu:
        return next(plans)
    plans = [*plans]
    return min(filter(fits, plans), key=step_seconds, default=plans[-1])


def choose_memory(question: Question) -> Plan:
    """Return the plan that a run takes.

    One that leaves no reserve is allowed, because settings made by hand are honoured as long as the GPU's whole memory
    might suffice.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change;
            on CPUs, if weights, optimizer and gradients alone exceed their machine's free memory.
    """
    plan = choose(question)
    machine = question.machine
    if not machine.is_gpu:
        if (needed := sum(states(plan)) * machine.local_processes) > machine.host_bytes:
            raise ConfigError(
                f"on CPUs, weights, optimizer and gradients take {needed / GIB:.1f} GiB of this machine's memory but "
                f"{machine.host_bytes / GIB:.1f} GiB are free; use GPUs or a smaller model, train adapters "
                "(model.lora.rank), or set memory.host_memory if the machine has more than its kernel reports"
            )
        return plan
    p = predict(plan)
    if not p.fits_host:
        raise ConfigError(
            f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
            f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
            f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
            "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
        )
    if p.gpu > machine.gpu_bytes:
        held, kept, beside = "weights, optimizer and gradients", "activations", ""
        if plan.keeps_gradients:
            held, kept = "weights and optimizer", "activations and then gradients"
        if p.beside:
            beside = f"; sampling or passes without gradient {p.beside / GIB:.1f} above these"
        raise ConfigError(
            f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{plan.name}" '
            f"({held} {p.states / GIB:.1f}, {kept} {p.kept / GIB:.1f}, work "
            f"{p.working / GIB:.1f}{beside}, the rest for CUDA and NCCL) but a GPU has "
            f'{machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
            "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
            "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank); in a dry run, "
            "--gpu-memory says what a GPU has"
        )
    return plan


# ---------------------------------------------------------------- micro-batches


def cut_steps(
    question: Question, typical: PlannedStep, largest: PlannedStep, auto: bool
) -> Question:
    """Return the question with the micro-batches that a typical step of the data is cut into.

    With `auto` these are the fewest that need no more recomputation or offload than the longest example alone; on a CPU
    they are no larger than CPU_WORK says.
    """
    longest = question.tokens_per_microbatch
    groups = question.machine.gpus // question.sp
    widths = ATTENTION_WIDTHS * question.model.shape.hidden_size
    question = question._replace(shares=typical.shares)
    most_in_step = sum(largest.tokens)

    def pack(step: PlannedStep, tokens: int) -> list[list[int]]:
        """Return the tokens of every micro-batch of each group."""
        costs = [t + q / widths for t, q in zip(step.tokens, step.squares)]
        packed = pack_step(step.tokens, costs, tokens, groups)
        return [[sum(step.tokens[i] for i in members) for members in group] for group in packed]

    def sized(tokens: int) -> Question:
        return question._replace(
            tokens_per_microbatch=tokens,
            documents=max(1, question.documents * tokens // longest),
            whole_steps=groups * tokens >= most_in_step,
        )

    tokens = longest
    if auto:
        most = -(-most_in_step // groups)  # all that a group has in the largest step
        if question.machine.is_gpu:
            plan = choose(sized(longest))
            most = largest_that(lambda n: fits(plan._replace(question=sized(n))), longest, most)
        else:
            most = min(most, int(CPU_WORK / question.model.largest_layer))
        most = max(longest, most)
        tokens = max(longest, *chain(*pack(typical, most), *pack(largest, most)))
    count = len(pack(typical, tokens)[0])
    total = sum(typical.tokens) / groups
    question = sized(tokens)
    return question._replace(
        micro_batches=count,
        whole_steps=question.whole_steps and count == 1,
        fill=total / count / tokens,
        squares=sum(typical.squares) / groups / count,
    )


def longest_sequence(question: Question) -> int:
    """Return the most tokens per document, a multiple of 1024, that fit at some allowed level; 0 if not even 1024 do.

    The question says how many equal documents are in the micro-batch, and how many ranks share it.
    """

    def holds(blocks: int) -> bool:
        tokens = 1024 * blocks * question.documents
        sized = question._replace(tokens_per_microbatch=tokens)
        *_, smallest = candidates(sized)
        return fits(smallest)

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if holds(1 << i)), default=0)
    return 1024 * largest_that(holds, low, 2 * low - 1)


def largest_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number up to `high` that `holds`, as `low` does and every number between them."""
    return bisect_left(range(high + 1), True, low + 1, key=lambda n: not holds(n)) - 1


# ---------------------------------------------------------------- lines that a run prints


def memory_line(plan: Plan) -> str:
    """Return the line that says what was chosen and why, and whether it leaves less than the usual reserve."""
    machine = plan.question.machine
    is_auto = plan.question.recompute == "auto"
    if not machine.is_gpu:
        why = " (auto: CPU)" if is_auto else ""
        return f"memory: recompute {plan.name}{why}"
    p = predict(plan)
    line = (
        f"memory: recompute {plan.name} ({'auto: ' if is_auto else ''}{p.gpu / GIB:.1f} GiB predicted of "
        f"{machine.gpu_bytes / GIB:.1f} GiB); weights {'resident' if plan.resident else 'sharded'}"
    )
    if plan.graphs:
        line += ", layers run as CUDA graphs"
    if plan.offloaded_layers:
        line += f"; {plan.offloaded_layers} of {len(plan.levels)} layers' activations in host memory"
    if not fits(plan):
        line += "; this leaves less than the usual reserve and may run out"
    return line


def micro_batch_line(question: Question, auto: bool) -> str:
    """Return the line that says what a step is cut into."""
    return (
        f"micro-batches: {question.micro_batches} in a typical step, each of at most "
        f"{question.tokens_per_microbatch:,} tokens{' (auto)' if auto else ''}"
    )
