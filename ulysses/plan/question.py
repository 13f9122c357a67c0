"""From a configuration, a model's shape and the data to the planner's question; all ranks ask the same."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from models.arch import ModelConfig
from models.folders import read_config, resolve_model
from models.kinds import empty_model
from models.published import recognised
from ulysses.config.schema import Config
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.options import stage_of
from ulysses.parallel.layout import squares
from ulysses.parallel.mesh import divisors
from ulysses.plan.hardware import Machine
from ulysses.plan.layer_cost import Model, plain_model
from ulysses.plan.planner import PlannedStep, choose, cut_steps
from ulysses.plan.step_cost import Question, fits, step_seconds
from ulysses.stages.base import AuxiliaryModel, PlannedRollout

MOMENT_BYTES = {"32bit": 8.0, "8bit": 2 * (1 + 4 / 256)}  # and absmax of every block


def published_shape(config: Config, absent: str) -> ModelConfig | None:
    """Return the shape that a model's id, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    shape = recognised(Path(absent).name)
    return shape and ModelConfig.from_hf(shape.to_hf(), **config.model.rope.changes())


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
