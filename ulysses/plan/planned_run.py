"""From a configuration, a model's shape and the data to the case that the planner is asked about."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from models.arch import ModelConfig
from models.folders import read_config, resolve_model
from models.kinds import count_parameters, empty_model
from ulysses.config.schema import Config
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.case import Case, Model, PlannedStep
from ulysses.plan.footprint import predict
from ulysses.plan.machine import Machine
from ulysses.plan.memory_choice import choose, cut_steps
from ulysses.registry import stage_of
from ulysses.stages.base import AuxiliaryModel, PlannedRollout

MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}  # and absmax of every block


def plain_model(shape: ModelConfig, *, reward: bool = False) -> Model:
    """Return the planner's view of a model that trains all its weights."""
    parameters = count_parameters(shape, reward=reward)
    return Model(shape, parameters, trained=parameters, has_head=not reward)


def planner_model(config: Config, shape: ModelConfig) -> Model:
    """Return the planner's view of the trained model, adapters and the score head of PPO's value included."""
    stage, lora = stage_of(config), config.model.lora
    model = plain_model(shape, reward=stage.reward)
    score = shape.hidden_size * stage.requirements.value
    parameters = trained = model.parameters + score
    if lora.rank:
        from models.expert_files import adapter_parameters

        adapters = lora.rank * adapter_parameters(empty_model(shape), lora.targets)
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

    The degree "auto" is the smallest whose plan fits, or all processes if none does.
    """
    stage, degree = stage_of(config), config.parallel.sequence_parallel_size
    facts = stage.requirements
    auxiliary = [(model, _auxiliary_model(model, shape)) for model in facts.models]
    # a pass costs what its own model's size says
    own = plain_model(shape).forward_parameters
    passes = (model.passes * frozen.forward_parameters / own for model, frozen in auxiliary)
    rollout = facts.rollout
    if rollout:
        prompts = -(-facts.examples_per_load // machine.gpus)
        rollout = rollout._replace(answers=prompts * rollout.answers)
    wanted = config.run.samples
    samples = PlannedRollout(
        wanted if isinstance(wanted, int) else len(wanted),  # every process answers all of them
        config.ppo.planned_batch,
        config.data.max_length,
        config.ppo.max_new_tokens,
        merged=config.model.lora.rank > 0,
    )
    case = Case(
        planner_model(config, shape),
        machine,
        tokens,
        documents=max(stage.sequences_per_example, tokens // facts.longest_example),
        forwards=sum(passes, start=facts.extra_forwards),
        logit_bytes=facts.logit_bytes,
        rollout=rollout,
        samples=samples if wanted else None,
        element_size=getattr(torch, config.model.dtype).itemsize,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        others=tuple(frozen for model, frozen in auxiliary if not model.shares_weights),
        teacher=next((frozen for model, frozen in auxiliary if model.role == "teacher"), None),
        **config.memory.model_dump(exclude={"host_memory"}),
    )
    degrees = divisors(machine.gpus) if degree == "auto" else [degree]
    *smaller, largest = (case._replace(sp=sp) for sp in degrees)
    return next((case for case in smaller if predict(choose(case)).fits), largest)


def planner_run(config: Config, shape: ModelConfig, machine: Machine, train: Any) -> Case:
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
    config: Config, shape: ModelConfig, data: Any, indices: list[int], launched: float
) -> PlannedStep:
    """Return what an optimizer step trains of these examples of the data loader's step, as far as that is known.

    `launched` is the number of tokens up to which a step shares no prompts (StepLoader).
    """
    facts = stage_of(config).requirements
    lengths, prefixes = data.sequence_lengths[indices], data.prefix_lengths[indices]
    if facts.rollout:
        # as long as they may be; a prompt counts once, and its last token with every answer
        count, prompts = facts.rollout.answers, lengths.repeat(facts.rollout.answers, axis=0)
        prefixes = (prompts - 1) * (1 - 1 / count) * config.batch.share_prompts
        lengths = prompts + facts.rollout.new_tokens - prefixes
        lengths, prefixes = (x[: facts.examples_per_step] for x in (lengths, prefixes))
    if (lengths + prefixes).sum() <= launched:
        lengths, prefixes = lengths + prefixes, 0 * prefixes
    pairs = squares(1.0 * lengths, prefixes, shape.windows)
    tokens = np.rint(lengths.sum(1)).astype(int).tolist()
    return PlannedStep(tokens, pairs.sum(1).tolist(), bool(prefixes.any()))


def _auxiliary_model(model: AuxiliaryModel, shape: ModelConfig) -> Model:
    """Return the planner's view of it; the initial policy, and a model that is not here, are as large as the policy."""
    with suppress(ValueError, OSError):
        if model.path:
            shape = read_config(resolve_model(model.path, need_weights=False))
    return plain_model(shape, reward=model.is_reward)
