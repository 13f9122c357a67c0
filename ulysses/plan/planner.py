"""From a run's configuration and data to its plan: what layers keep, recompute or move, and how a step is cut.

All ranks ask the same question, and choose the fastest plan that fits.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from models.arch import ModelConfig, recognised
from models.folders import read_config, resolve_model
from models.kinds import empty_model
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader, pack_step
from ulysses.environment import local_world_size
from ulysses.options import stage_of
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.hardware import GIB, Machine, free_host_bytes
from ulysses.plan.layer_cost import Model, plain_model
from ulysses.plan.step_cost import Plan, Question, fits, predict, states, step_seconds
from ulysses.stages.base import AuxiliaryModel, PlannedRollout

MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}  # and absmax of every block
# parameters of a layer times tokens, which take a CPU so long that its overhead for the layer is a hundredth
CPU_WORK = 5e9


# ---------------------------------------------------------------- the question


def published_shape(config: Config, absent: str) -> ModelConfig | None:
    """Return the shape that a model's id, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    shape = recognised(Path(absent).name)
    return shape and ModelConfig.from_hf(shape.to_hf(), **config.model.rope.changes())


class PlannedStep(NamedTuple):
    """What a step trains: of each example its tokens, and twice the pairs of a query and a key that it sees.

    shares: sequences share their prompts.
    """

    tokens: list[int]
    squares: list[float]
    shares: bool = False


def planner_model(config: Config, shape: ModelConfig) -> Model:
    """Return the planner's view of the trained model, adapters and the score head of PPO's value included."""
    stage, lora = stage_of(config), config.model.lora
    model = plain_model(shape, reward=stage.reward)
    score = shape.hidden_size * stage.requirements.value
    parameters = trained = model.parameters + score
    if lora.rank:
        from models.expert_files import adapter_parameters

        added = adapter_parameters(empty_model(shape), lora.targets)
        adapters, unmet = (lora.rank * count for count in added)
        model = model._replace(unmet=unmet, rank=lora.rank)
        parameters += adapters
        trained = adapters + (score or shape.hidden_size * stage.reward)
        if lora.train:
            matrices = 1 if stage.reward or shape.tie_word_embeddings else 2
            trained += matrices * shape.vocab_size * shape.hidden_size
    return model._replace(
        parameters=parameters, trained=trained, quantize=config.model.quantize
    )


def planner_question(
    config: Config, shape: ModelConfig, machine: Machine, tokens: int
) -> Question:
    """Return the question of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" is the smallest whose plan fits, or all processes if none does, with as many answers decoded at a
    time as then fit.
    """
    stage, degree, ppo = stage_of(config), config.parallel.sequence_parallel_size, config.ppo
    facts, wanted = stage.requirements, config.run.samples
    question = Question(
        planner_model(config, shape),
        machine,
        tokens,
        documents=max(stage.sequences_per_example, tokens // facts.longest_example),
        forwards=facts.extra_forwards,
        logit_bytes=facts.logit_bytes,
        element_size=getattr(torch, config.model.dtype).itemsize,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        **config.memory.model_dump(exclude={"host_memory"}),
    )
    if facts.models:
        question = _with_models(question, facts.models)
    if facts.rollout:
        prompts = -(-facts.examples_per_load // machine.gpus)
        rollout = facts.rollout._replace(answers=prompts * facts.rollout.answers)
        question = question._replace(rollout=rollout)
    if wanted:  # every process answers all of them
        count = wanted if isinstance(wanted, int) else len(wanted)
        lengths = ppo.planned_batch, config.data.max_length, ppo.max_new_tokens
        samples = PlannedRollout(count, *lengths, merged=config.model.lora.rank > 0)
        question = question._replace(samples=samples)
    halvings = 1
    if (facts.rollout or wanted) and ppo.generation_batch == "auto":
        halvings = ppo.planned_batch.bit_length()
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    *others, last = (
        question._replace(halvings=n, sp=sp) for n in range(halvings) for sp in degrees
    )
    return next((q for q in others if fits(choose(q))), last)


def _with_models(question: Question, models: Sequence[AuxiliaryModel]) -> Question:
    """Return the question with these models, and with their passes, each of which costs what its own size says."""
    shape = question.model.shape
    own, forwards, others = plain_model(shape).forward_parameters, question.forwards, []
    for model in models:
        found = shape  # of the initial policy, and as large as the policy is what is not here
        with suppress(ValueError, OSError):
            if model.path:
                found = read_config(resolve_model(model.path, need_weights=False))
        frozen = plain_model(found, reward=model.is_reward)
        forwards += model.passes * frozen.forward_parameters / own
        if not model.shares_weights:
            others.append(frozen)
        if model.role == "teacher":
            question = question._replace(teacher=frozen)
    return question._replace(forwards=forwards, others=tuple(others))


def run_question(
    config: Config, shape: ModelConfig, machine: Machine, train: TokenizedDataset | None
) -> Question:
    """Return the question of a run and of the micro-batches of its typical step.

    Prompts are shared unless layers that run as CUDA graphs, which take whole sequences, are faster.

    Args:
        train: the training data; None plans with examples of the greatest length that the settings allow.
    """
    stage, given = stage_of(config), config.batch.tokens_per_microbatch
    facts, sides, auto = stage.requirements, stage.sequences_per_example, given == "auto"
    # no fewer are chosen than the longest example has or, if that is not known, may have
    longest = sides * facts.longest_example
    if train is None:
        tokens = longest if auto else given
        question = planner_question(config, shape, machine, tokens)
        whole = min(longest, tokens)
        pairs = sides * squares(whole / sides, windows=shape.windows)
        examples = facts.examples_per_step
        step = PlannedStep([whole] * examples, [pairs] * examples)
        return cut_steps(question, step, step, auto)
    loader = StepLoader(
        train, facts.examples_per_load, tokens_per_microbatch=0, seed=config.run.seed
    )
    typical, largest = loader.planned_steps()

    def asked(data: TokenizedDataset) -> Question:
        tokens = given
        if auto:
            tokens = longest if data.kind == "prompt" else int(data.lengths.max())
        question = planner_question(config, shape, machine, tokens)
        steps = (planned_step(config, shape, data, each) for each in (typical, largest))
        return cut_steps(question, *steps, auto)

    question, whole = asked(train), train.apart
    if machine.is_gpu and (auto or whole.lengths.max() <= given):
        shared, alone = choose(question), choose(asked(whole))
        if alone.graphs and step_seconds(alone) <= step_seconds(shared):
            return alone.question
    return question


def planned_step(
    config: Config, shape: ModelConfig, data: TokenizedDataset, indices: list[int]
) -> PlannedStep:
    """Return what an optimizer step trains of these examples of the data loader's step, as far as that is known.

    Answers of a rollout are as long as they may be; a prompt counts once, and its last token with every answer.
    """
    facts = stage_of(config).requirements
    lengths, prefixes = data.sequence_lengths[indices], data.prefix_lengths[indices]
    if facts.rollout:
        count, wanted = facts.rollout.answers, slice(facts.examples_per_step)
        prompts = lengths.repeat(count, axis=0)[wanted]
        prefixes = (prompts - 1) * (1 - 1 / count) * data.share_prompts
        lengths = prompts + facts.rollout.new_tokens - prefixes
    shares = bool(data.prefix_lengths.any() or prefixes.any())
    pairs = squares(1.0 * lengths, prefixes, shape.windows)
    tokens = np.rint(lengths.sum(1)).astype(int).tolist()
    return PlannedStep(tokens, pairs.sum(1).tolist(), shares)


# ---------------------------------------------------------------- the choice


def candidates(question: Question, resident: bool) -> Iterator[Plan]:
    """Yield what the layers may keep, and where: the fastest plan first, copies to the host aside, the smallest last.

    Every level is tried with the next faster one on as many of the last layers as possible, on fewer, and on none;
    then with the activations of more and more of the first layers on the host.
    """
    count, offload = question.model.shape.num_hidden_layers, question.offload
    for faster, level in pairwise((None, *question.levels)):
        plan, most = Plan(question, (level,) * count, resident=resident), 0
        if "none" not in (offload, level):
            room = question.machine.host_budget - predict(plan).host
            most = sum(x <= room for x in accumulate(plan.kept))
        least = most if offload == "checkpoints" else 0
        if faster and not least:
            for n in range(1, count):
                yield plan._replace(levels=(level,) * n + (faster,) * (count - n))
        for away in range(least, most + 1):
            yield plan._replace(offloaded_layers=away)


def places(question: Question) -> list[bool]:
    """Return whether the weights are resident, the faster place first if both are allowed."""
    if question.offload_parameters or question.machine.gpus == 1:
        return [not question.offload_parameters]
    return {"resident": [True], "sharded": [False]}.get(question.weights, [True, False])


def choose(question: Question) -> Plan:
    """Return the fastest plan that fits, with resident or sharded weights, or the one that comes nearest.

    Processes without GPUs recompute nothing unless they are told to.
    """
    q = question
    if not q.machine.is_gpu:
        level, count = q.levels[0], q.model.shape.num_hidden_layers
        away = count * (q.offload == "checkpoints" and level != "none")
        return Plan(q, (level,) * count, away, places(q)[0])
    # to move what a level keeps may take longer than to compute it again at the next one
    asked = [q] if q.offload == "none" else [q, *(q._replace(recompute=x) for x in q.levels)]
    tried = [candidates(x, resident) for resident in places(q) for x in asked]
    fitting = [plan for plans in tried if (plan := next(filter(fits, plans), None))]
    nearest = [*candidates(q, places(q)[-1])][-1]
    return min(fitting, key=step_seconds, default=nearest)._replace(question=q)


def choose_memory(question: Question) -> Plan:
    """Return the plan of a question, as a run takes it.

    Settings made by hand are honoured while the GPU's whole memory might do.

    Raises:
        ConfigError: if the GPU, or the host for what is moved there, is predicted to be too small, with what to change.
    """
    plan = choose(question)
    if question.machine.is_gpu:
        p = predict(plan)
        if not p.fits_host:
            raise ConfigError(_host_refusal(plan))
        if p.gpu > question.machine.gpu_bytes:
            raise ConfigError(_gpu_refusal(plan))
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

    With `auto` these are the fewest for which nothing more is recomputed or moved than for the longest example alone.
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
        most = _most_tokens(sized, longest, -(-sum(largest.tokens) // groups))
        parts = [(x, part) for x in (typical, largest) for own in pack(x, most) for part in own]
        tokens = max(longest, *(sum(x.tokens[i] for i in part) for x, part in parts))
    count = len(pack(typical, tokens)[0])
    question = sized(tokens)
    return question._replace(
        micro_batches=count,
        whole_steps=question.whole_steps and count == 1,
        fill=total / count / tokens,
        squares=sum(typical.squares) / groups / count,
    )


def _most_tokens(sized: Callable[[int], Question], least: int, most: int) -> int:
    """Return how large a micro-batch may be, up to `most`, to take per token what one of `least` tokens takes."""
    plan = choose(sized(least))
    if not plan.question.machine.is_gpu:
        enough = CPU_WORK / max(layer.parameters for layer in plan.question.model.layers)
        return max(least, min(most, int(enough)))

    def is_too_large(tokens: int) -> bool:
        return not fits(plan._replace(question=sized(tokens)))

    return max(least, bisect_left(range(most + 1), True, least + 1, key=is_too_large) - 1)


def longest_sequence(question: Question) -> int:
    """Return the most tokens per document, a multiple of 1024, that some allowed level fits; 0 if not even 1024 do.

    The question says how many equal documents are in the micro-batch and how many ranks share it.
    """

    def holds(blocks: int) -> bool:
        tokens = 1024 * blocks * question.documents
        asked = question._replace(tokens_per_microbatch=tokens)
        return fits([*candidates(asked, places(asked)[-1])][-1])

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if holds(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not holds(n)))


# ---------------------------------------------------------------- refusals and lines


def check_host(config: Config, plan: Plan) -> None:
    """Refuse a run on CPUs whose weights, optimizer and gradients alone are more than their machine's memory."""
    free = config.memory.host_memory * GIB or free_host_bytes()
    needed = sum(states(plan)) * local_world_size()
    if needed > free and not plan.question.machine.is_gpu:
        raise ConfigError(
            f"on CPUs, weights, optimizer and gradients take {needed / GIB:.1f} GiB of this machine's memory but "
            f"{free / GIB:.1f} GiB are free; use GPUs or a smaller model, train adapters (model.lora.rank), or set "
            "memory.host_memory if the machine has more than its kernel reports"
        )


def memory_line(plan: Plan) -> str:
    """Return a line that says what was chosen and why, and whether the reserve is gone."""
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
    """Return a line that says what a step is cut into."""
    return (
        f"micro-batches: {question.micro_batches} in a typical step, each of at most "
        f"{question.tokens_per_microbatch:,} tokens{' (auto)' * auto}"
    )
