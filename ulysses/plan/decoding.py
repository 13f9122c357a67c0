"""The planner's view of decoding, for runs that sample: answers, their examples, and what they take of a GPU."""

from collections.abc import Iterable

import numpy as np

from ulysses.config.schema import Config
from ulysses.plan.case import Case, Model, Plan
from ulysses.rl.sampler import sampling_bytes
from ulysses.stages.base import PlannedRollout, Requirements


def decoding_cases(config: Config, facts: Requirements, cases: Iterable[Case]) -> list[Case]:
    """Return the cases with their answers, and after them with fewer and fewer that are decoded at a time."""
    rollout, samples, halvings = facts.rollout, None, 1
    if wanted := config.run.samples:
        samples = PlannedRollout(
            # every process answers all of them
            wanted if isinstance(wanted, int) else len(wanted),
            config.ppo.planned_batch,
            config.data.max_length,
            config.ppo.max_new_tokens,
            merged=config.model.lora.rank > 0,
        )
    if config.ppo.generation_batch == "auto":
        halvings = config.ppo.planned_batch.bit_length()
    found = []
    for case in cases:
        if rollout:
            prompts = -(-facts.examples_per_load // case.machine.gpus)
            case = case._replace(rollout=rollout._replace(answers=prompts * rollout.answers))
        found.append(case._replace(samples=samples))
    return [case._replace(halvings=n) for n in range(halvings) for case in found]


def answered(
    config: Config, facts: Requirements, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and prefixes of a step's examples, one for each answer, of prompts of these lengths [n, 1].

    Answers are as long as they may be; a prompt counts once, and its last token with every answer.
    """
    assert facts.rollout is not None
    count = facts.rollout.answers
    prompts = prompts.repeat(count, axis=0)
    prefixes = (prompts - 1) * (1 - 1 / count) * config.batch.share_prompts
    lengths = prompts + facts.rollout.new_tokens - prefixes
    return lengths[: facts.examples_per_step], prefixes[: facts.examples_per_step]


def decoding_bytes(plan: Plan) -> float:
    """Return the bytes of the decoding that takes most: a rollout's, or a model's that answers run.samples."""
    case = plan.case
    asked = [(case.model, case.rollout), (case.model, case.samples)]
    asked += [(other, case.samples) for other in case.others if other.has_head]
    return max(_sampler_bytes(plan, *each) for each in asked)


def _sampler_bytes(plan: Plan, model: Model, rollout: PlannedRollout | None) -> float:
    """Return the bytes of the gathered model, and of what the sampler takes."""
    if rollout is None or not rollout.batch:
        return 0.0
    size, longest = plan.case.element_size, rollout.prompt_tokens + rollout.new_tokens
    weights = size * model.parameters * (rollout.merged and model is plan.case.model)
    weights += model.weight_bytes(size) * (not plan.resident)
    fixed, each = sampling_bytes(model.shape, longest, size)
    return weights + fixed + each * min(rollout.answers, rollout.batch >> plan.case.halvings)
