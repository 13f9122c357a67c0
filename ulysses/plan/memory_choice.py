"""From a configuration, a model's shape and the data to the planner's case, and to its plan.

The plan's levels, offload and micro-batch make a step fastest and fit, alike on all ranks.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from models.arch import ModelConfig
from models.kinds import empty_model
from ulysses.config.schema import Config
from ulysses.config.section import ConfigError
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import ATTENTION_WIDTHS, StepLoader, pack_step
from ulysses.environment import local_world_size
from ulysses.memory.levels import LayerMemory
from ulysses.options import stage_of
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.case import (
    GIB,
    Case,
    Machine,
    Model,
    Plan,
    PlannedStep,
    free_host_bytes,
    plain_model,
)
from ulysses.plan.costs import pass_tokens, pinned_layer, predict, step_flops, step_seconds

GAIN = 0.01  # of a step's time, for which a micro-batch is made larger
CUTS = (
    *range(1, 5),
    *(n << i for i in range(1, 16) for n in (3, 4)),
)  # of a step into micro-batches
MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}  # and absmax of every block


# ---------------------------------------------------------------- the case of a run


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
        model = model._replace(unmet=unmet)
        parameters += adapters
        trained = adapters + (score or shape.hidden_size * stage.reward)
        if lora.train:
            matrices = 1 if stage.reward or shape.tie_word_embeddings else 2
            trained += matrices * shape.vocab_size * shape.hidden_size
    return model._replace(
        parameters=parameters, trained=trained, quantize=config.model.quantize
    )


def planner_case(config: Config, shape: ModelConfig, machine: Machine, tokens: int) -> Case:
    """Return the planner's view of a run: one micro-batch of `tokens`, full of longest sequences.

    The degree "auto" is the smallest whose plan fits, or all processes if none does, with as many answers decoded at a
    time as then fit.
    """
    stage, degree = stage_of(config), config.parallel.sequence_parallel_size
    facts = stage.requirements
    case = Case(
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
        from ulysses.plan.auxiliary import with_models

        case = with_models(case, facts.models)
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    cases = [case._replace(sp=sp) for sp in degrees]
    if facts.rollout or config.run.samples:
        from ulysses.plan.decoding import decoding_cases

        cases = decoding_cases(config, facts, cases)
    *others, last = cases
    return next((case for case in others if predict(choose(case)).fits), last)


def planner_run(
    config: Config, shape: ModelConfig, machine: Machine, train: TokenizedDataset | None
) -> Case:
    """Return the planner's view of a run and of the micro-batches of its typical step.

    Args:
        train: the training data; None plans with examples of the greatest length that the settings allow.
    """
    stage, tokens = stage_of(config), config.batch.tokens_per_microbatch
    facts, sides, auto = stage.requirements, stage.sequences_per_example, tokens == "auto"
    if auto:
        # no fewer are chosen than the longest example has or, if that is not known, may have
        known = train and train.kind != "prompt"
        tokens = int(train.lengths.max()) if known else sides * facts.longest_example
    case = planner_case(config, shape, machine, tokens)
    if train:
        launched = choose(case).launched_tokens * machine.gpus / case.sp
        loader = StepLoader(
            train,
            facts.examples_per_load,
            tokens_per_microbatch=tokens,
            seed=config.run.seed,
        )
        steps = loader.planned_steps()
        typical, largest = (planned_step(config, shape, train, s, launched) for s in steps)
    else:
        longest = min(tokens, sides * facts.longest_example)
        pairs = sides * squares(longest / sides, windows=shape.windows)
        examples = facts.examples_per_step
        typical = largest = PlannedStep([longest] * examples, [pairs] * examples)
    return cut_steps(case, typical, largest, auto)


def planned_step(
    config: Config,
    shape: ModelConfig,
    data: TokenizedDataset,
    indices: list[int],
    launched: float,
) -> PlannedStep:
    """Return what an optimizer step trains of these examples of the data loader's step, as far as that is known.

    `launched` is the number of tokens up to which a step shares no prompts (StepLoader).
    """
    facts = stage_of(config).requirements
    lengths, prefixes = data.sequence_lengths[indices], data.prefix_lengths[indices]
    if facts.rollout:
        from ulysses.plan.decoding import answered

        lengths, prefixes = answered(config, facts, lengths)
    budget, whole = config.batch.tokens_per_microbatch, lengths + prefixes
    if whole.sum() <= launched and (budget == "auto" or whole.sum(1).max() <= budget):
        lengths, prefixes = whole, 0 * prefixes
    pairs = squares(1.0 * lengths, prefixes, shape.windows)
    tokens = np.rint(lengths.sum(1)).astype(int).tolist()
    return PlannedStep(tokens, pairs.sum(1).tolist(), bool(prefixes.any()))


# ---------------------------------------------------------------- the plan of a case


def candidates(case: Case) -> Iterator[Plan]:
    """Yield what the layers may keep, and where, the fastest plan first, copies to the host aside.

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
    # to move what a level keeps may take longer than to compute it again at the next one
    levels = [] if case.offload == "none" else case.allowed
    plans = []
    for place in places:
        own = case._replace(weights=place)
        found = (first_fit(own._replace(recompute=x)) for x in (*levels, case.recompute))
        plans += [plan._replace(case=own) for plan in found]
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
            whole_steps=groups * budget >= sum(largest.tokens) and count == 1,
            mean_tokens=tokens / count,
            squares=pairs / count,
            shares=typical.shares,
        )

    if auto:
        # those that share no prompts are longer than the data's longest example
        budget = max(budget, *typical.tokens, *largest.tokens)
        whole = max(budget, -(-sum(largest.tokens) // groups))
        budgets = sorted({max(budget, -(-whole // n)) for n in CUTS})
        # What packing finds is a little more, and takes long to find for steps of thousands of examples. Of the i
        # longest, no micro-batch holds more than it would if all were as short as the last of them.
        longest = [*enumerate(sorted(typical.tokens, reverse=True), 1)]
        counts = (
            max(tokens / n, *(i / (n // t) / groups for i, t in longest)) for n in budgets
        )
        plans = (choose(cut(n, math.ceil(count))) for n, count in zip(budgets, counts))
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
    p = predict(plan)
    if not p.fits_host or p.gpu > case.machine.gpu_bytes:
        from ulysses.plan import refusals

        raise ConfigError(refusals.of_gpu(plan) if p.fits_host else refusals.of_host(plan))
    return plan._replace(pass_tokens=pass_tokens(plan))


def check_host(config: Config, plan: Plan) -> None:
    """Refuse a run on CPUs whose weights, optimizer and gradients alone are more than their machine's memory."""
    free = config.memory.host_memory * GIB or free_host_bytes()
    states = predict(plan).states * local_world_size()
    if states > free and not plan.case.machine.is_gpu:
        from ulysses.plan import refusals

        raise ConfigError(refusals.of_cpu(states, free))


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
