"""From a run's configuration and data to its plan: what layers keep, recompute or move, and how a step is cut.

All ranks ask the same question, and choose the fastest plan that fits.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from models.arch import ModelConfig, recognised
from models.folders import read_config, resolve_model
from models.kinds import model_class
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader, pack_step
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.hardware import GIB, Machine
from ulysses.plan.layer_cost import PlannedModel, plain_model
from ulysses.plan.step_cost import Plan, Question, fits, predict, states, step_seconds
from ulysses.stages.base import AuxiliaryModel, PlannedRollout, Stage

# Bytes of AdamW's two moments of a parameter; those in 8 bits have a scale for every block.
MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}
# Parameters of a layer times tokens that take a CPU so long that its overhead for a layer is a hundredth of the time.
CPU_WORK = 5e9


# ---------------------------------------------------------------- the question


def published_shape(config: Config) -> ModelConfig | None:
    """Return the published shape that model.path, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    shape = recognised(Path(config.model.path).name)
    return shape and ModelConfig.from_hf(shape.to_hf(), **config.model.rope.changes())


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
    settings, idle_adapters = stage.config.model, 0
    with torch.device("meta"):
        model = model_class(reward=stage.reward, value=stage.requirements.value)(shape)
    if settings.lora.rank:
        from models.lora import add_adapters

        add_adapters(model, settings.lora)
    if shape.moe:
        of_experts = sum(
            p.numel() for n, p in model.named_parameters() if ".experts.lora_" in n
        )
        N, k = shape.moe.num_experts, shape.moe.num_experts_per_tok
        idle_adapters = of_experts * (N - k) // N
    return PlannedModel(
        shape,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        has_head=not stage.reward,
        quantize=settings.quantize,
        idle_adapters=idle_adapters,
        rank=settings.lora.rank,
    )


def planner_question(
    stage: Stage, shape: ModelConfig, machine: Machine, tokens: int
) -> Question:
    """Return the question of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" becomes the smallest whose plan fits, or all processes if none does.
    """
    config, requirements = stage.config, stage.requirements
    degree, ppo, samples = (
        config.parallel.sequence_parallel_size,
        config.ppo,
        config.run.samples,
    )
    question = Question(
        planner_model(stage, shape),
        machine,
        tokens,
        documents=max(stage.sequences_per_example, tokens // requirements.longest_example),
        forwards=requirements.extra_forwards,
        logit_bytes=requirements.logit_bytes,
        element_size=getattr(torch, config.model.dtype).itemsize,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        **config.memory.model_dump(exclude={"host_memory"}),
    )
    if requirements.models:
        question = _with_models(question, requirements.models)
    if requirements.rollout:
        prompts = -(-requirements.examples_per_load // machine.gpus)
        rollout = requirements.rollout._replace(answers=prompts * requirements.rollout.answers)
        question = question._replace(rollout=rollout)
    if samples:  # every process answers all of them
        count = samples if isinstance(samples, int) else len(samples)
        lengths = ppo.planned_batch, config.data.max_length, ppo.max_new_tokens
        answers = PlannedRollout(count, *lengths, merged=config.model.lora.rank > 0)
        question = question._replace(samples=answers)
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    *others, last = (question._replace(sp=sp) for sp in degrees)
    return next((q for q in others if fits(choose(q))), last)


def _with_models(question: Question, models: Sequence[AuxiliaryModel]) -> Question:
    """Return the question with these frozen models, and with their passes in units of the trained model's."""
    trained, forwards, others = question.model.shape, question.forwards, []
    unit = plain_model(trained).forward_parameters
    for model in models:
        shape = trained  # of the initial policy; a model that is absent is taken to be as large
        with suppress(ValueError, OSError):
            if model.path:
                shape = read_config(resolve_model(model.path, need_weights=False))
        frozen = plain_model(shape, reward=model.is_reward)
        forwards += model.passes * frozen.forward_parameters / unit
        if not model.shares_weights:
            others.append(frozen)
        if model.role == "teacher":
            question = question._replace(teacher=frozen)
    return question._replace(forwards=forwards, others=tuple(others))


def run_question(
    stage: Stage, shape: ModelConfig, machine: Machine, train: TokenizedDataset | None
) -> Question:
    """Return the question of a run, with the micro-batches of its typical step.

    Prompts are shared unless layers that run as CUDA graphs, which take whole sequences, are faster.

    Args:
        train: the training data; None plans with examples of the greatest length that the settings allow.
    """
    config, requirements, sides = stage.config, stage.requirements, stage.sequences_per_example
    budget = config.batch.tokens_per_microbatch
    auto = budget == "auto"
    # a micro-batch must hold the longest example or, if that is unknown, the longest that there may be
    longest = sides * requirements.longest_example
    if train is None:
        tokens = longest if auto else budget
        question = planner_question(stage, shape, machine, tokens)
        whole = min(longest, tokens)
        pairs = sides * squares(whole / sides, windows=shape.windows)
        examples = requirements.examples_per_step
        step = PlannedStep([whole] * examples, [pairs] * examples)
        return cut_steps(question, step, step, auto)
    loader = StepLoader(
        stage.grouped(train) if stage.grouped else train,
        requirements.examples_per_load,
        tokens_per_microbatch=0,
        seed=config.run.seed,
    )
    typical, largest = loader.planned_steps()

    def question_of(data: TokenizedDataset) -> Question:
        tokens = budget
        if auto:
            is_sampled = requirements.longest_example > config.data.max_length
            tokens = longest if is_sampled else int(data.lengths.max())
        question = planner_question(stage, shape, machine, tokens)
        steps = (planned_step(stage, shape, data, each) for each in (typical, largest))
        return cut_steps(question, *steps, auto)

    question, unshared = question_of(train), train.apart
    if machine.is_gpu and (auto or unshared.lengths.max() <= budget):
        shared, whole = choose(question), choose(question_of(unshared))
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
    if stage.grouped:  # the first minibatch is as large as any
        groups = requirements.examples_per_step // requirements.rollout.answers
        lengths, prefixes = stage.grouped(data).sizes(indices[:groups])
    else:
        lengths, prefixes = data.sequence_lengths[indices], data.prefix_lengths[indices]
    if (stage.trained_type or stage.dataset_type) == "prompt":
        count = requirements.rollout.answers
        prompts = lengths.repeat(count, axis=0)[: requirements.examples_per_step]
        prefixes = (prompts - 1) * (1 - 1 / count) * data.share_prompts
        lengths = prompts + requirements.rollout.new_tokens - prefixes
    shares = bool(data.prefix_lengths.any() or prefixes.any())
    pairs = squares(1.0 * lengths, prefixes, shape.windows)
    tokens = np.rint(lengths.sum(1)).astype(int).tolist()
    return PlannedStep(tokens, pairs.sum(1).tolist(), shares)


# ---------------------------------------------------------------- the choice


def candidates(question: Question, resident: bool) -> Iterator[Plan]:
    """Yield plans that differ in what the layers keep and where; the last one takes the least memory.

    Each level comes with the next faster one on as many of the last layers as possible, on fewer, and on none; then
    with the activations of more and more of the first layers on the host.
    """
    count = question.model.shape.num_hidden_layers
    for faster, level in pairwise((None, *question.levels)):
        plan, most = Plan(question, (level,) * count, resident=resident), 0
        if question.offload != "none" and level != "none":
            room = question.machine.host_budget - predict(plan).host
            most = sum(x <= room for x in accumulate(plan.kept))
        if faster:
            for n in range(1, count):
                yield plan._replace(levels=(level,) * n + (faster,) * (count - n))
        for away in range(most + 1):
            yield plan._replace(offloaded_layers=away)


def resident_choices(question: Question) -> list[bool]:
    """Return which values of Plan.resident are allowed, the faster one first."""
    if question.offload_parameters or question.machine.gpus == 1:
        return [not question.offload_parameters]
    return {"resident": [True], "sharded": [False]}.get(question.weights, [True, False])


def choose(question: Question) -> Plan:
    """Return the fastest plan that fits or, if none does, the one that takes the least memory.

    Without GPUs the answer is given at once: nothing is recomputed unless the settings say so.
    """
    q = question
    if not q.machine.is_gpu:
        levels = q.levels[:1] * q.model.shape.num_hidden_layers
        return Plan(q, levels, resident=resident_choices(q)[0])
    plans = [plan for resident in resident_choices(q) for plan in candidates(q, resident)]
    return min(filter(fits, plans), key=step_seconds, default=plans[-1])


def choose_memory(question: Question) -> Plan:
    """Return the plan that a run takes.

    One that leaves no reserve is allowed, because settings made by hand are honoured as long as the GPU's whole memory
    might suffice.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change;
            on CPUs, if weights, optimizer and gradients alone exceed their machine's free memory.
    """
    plan, machine = choose(question), question.machine
    if machine.is_gpu:
        p = predict(plan)
        if not p.fits_host:
            raise ConfigError(_host_refusal(plan))
        if p.gpu > machine.gpu_bytes:
            raise ConfigError(_gpu_refusal(plan))
    elif (needed := sum(states(plan)) * machine.local_processes) > machine.host_bytes:
        raise ConfigError(
            f"on CPUs, weights, optimizer and gradients take {needed / GIB:.1f} GiB of this machine's memory but "
            f"{machine.host_bytes / GIB:.1f} GiB are free; use GPUs or a smaller model, train adapters "
            "(model.lora.rank), or set memory.host_memory if the machine has more than its kernel reports"
        )
    return plan


def _host_refusal(plan: Plan) -> str:
    machine, p = plan.question.machine, predict(plan)
    return (
        f"each process needs {p.host / GIB:.1f} GiB of host memory, {p.moved / GIB:.1f} of them for what is "
        f"offloaded, but has {machine.host_budget / GIB:.1f} GiB, its share of the node's "
        f"{machine.host_bytes / GIB:.1f} GiB; set memory.offload_optimizer and memory.offload_parameters to false, "
        "use more nodes, or set memory.host_memory if the node has more than its kernel reports"
    )


def _gpu_refusal(plan: Plan) -> str:
    p, beside = predict(plan), ""
    held, kept = "weights, optimizer and gradients", "activations"
    if plan.keeps_gradients:
        held, kept = "weights and optimizer", "activations and then gradients"
    if p.beside:
        beside = f"; sampling or passes without gradient {p.beside / GIB:.1f} above these"
    return (
        f'the run needs {p.gpu / GIB:.1f} GiB on each GPU with memory.recompute = "{plan.name}" '
        f"({held} {p.states / GIB:.1f}, {kept} {p.kept / GIB:.1f}, work "
        f"{p.working / GIB:.1f}{beside}, the rest for CUDA and NCCL) but a GPU has "
        f'{plan.question.machine.gpu_bytes / GIB:.1f} GiB; set memory.recompute and memory.offload to "auto" and '
        "memory.offload_optimizer = true, use more GPUs with a larger parallel.sequence_parallel_size, lower "
        "batch.tokens_per_microbatch or data.max_length, or train adapters (model.lora.rank); in a dry run, "
        "--gpu-memory says what a GPU has"
    )


# ---------------------------------------------------------------- micro-batches


def cut_steps(
    question: Question, typical: PlannedStep, largest: PlannedStep, auto: bool
) -> Question:
    """Return the question with the micro-batches that a typical step of the data is cut into.

    With `auto` these are the fewest that need no more recomputation or offload than the longest example alone; on a CPU
    they are no larger than CPU_WORK says.
    """
    longest, groups = question.tokens_per_microbatch, question.machine.gpus // question.sp
    widths = ATTENTION_WIDTHS * question.model.shape.hidden_size
    question = question._replace(shares=typical.shares)
    total, tokens = sum(typical.tokens) / groups, longest

    def pack(step: PlannedStep, tokens: int) -> list[list[list[int]]]:
        costs = [t + q / widths for t, q in zip(step.tokens, step.squares)]
        return pack_step(step.tokens, costs, tokens, groups)

    def sized(tokens: int) -> Question:
        return question._replace(
            tokens_per_microbatch=tokens,
            documents=max(1, question.documents * tokens // longest),
            whole_steps=groups * tokens >= sum(largest.tokens),
        )

    if auto:
        most = -(-sum(largest.tokens) // groups)  # all that a group has in the largest step
        if question.machine.is_gpu:
            plan, sizes = choose(sized(longest)), range(most + 1)

            def is_too_large(tokens: int) -> bool:
                return not fits(plan._replace(question=sized(tokens)))

            most = bisect_left(sizes, True, longest + 1, key=is_too_large) - 1
        else:
            largest_layer = max(layer.parameters for layer in question.model.layers)
            most = min(most, int(CPU_WORK / largest_layer))
        most = max(longest, most)
        for step in (typical, largest):
            for micro_batch in chain.from_iterable(pack(step, most)):  # of all groups
                tokens = max(tokens, sum(step.tokens[i] for i in micro_batch))
    count = len(pack(typical, tokens)[0])
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
        return fits([*candidates(sized, resident_choices(sized)[-1])][-1])

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if holds(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not holds(n)))


# ---------------------------------------------------------------- refusals and lines


def memory_line(plan: Plan) -> str:
    """Return the line that says what was chosen and why, and whether it leaves less than the usual reserve."""
    q, machine = plan.question, plan.question.machine
    auto = q.recompute == "auto"
    if not machine.is_gpu:
        return f"memory: recompute {plan.name}{' (auto: CPU)' * auto}"
    p = predict(plan)
    line = (
        f"memory: recompute {plan.name} ({'auto: ' * auto}{p.gpu / GIB:.1f} GiB predicted of "
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
        f"{question.tokens_per_microbatch:,} tokens{' (auto)' * auto}"
    )
