"""Distillation on the student's own answers: prompts, and what the planner is told."""

import numpy as np
import pytest

from tests import rows_of
from ulysses.config.command_line import check
from ulysses.options import stage_of
from ulysses.parallel.batch import Sequence
from ulysses.rl.on_policy import OnPolicyStage, prompt_of
from ulysses.stages.base import PlannedRollout
from ulysses.stages.distill import DistillStage

# the weights of a row's tokens, how many of them are the prompt, and why
PROMPTS = """
0 0 1 1 => 2 => the answer is the end
0 .5 .5 0 0 1 => 5 => the last of two answers
0 1 1 0 0 => 1 => what follows the last answer is no part of the prompt
0 0 0 => 3 => a prompt alone
1 1 1 => 1 => nothing predicts the first token
1 => 1 => nor the only one
"""


@pytest.mark.parametrize("weights, prompt, why", rows_of(PROMPTS))
def test_a_prompt_ends_where_the_last_answer_begins(weights, prompt, why):
    weights = np.array(weights.split(), np.float32)
    row = Sequence(np.arange(len(weights)), weights)
    assert prompt_of(row) == [*range(int(prompt))], why


def test_sampled_answers_are_planned_for():
    def stage(share, **ppo):
        tables = {"distill": {"teacher": "m", "on_policy": share}, "data": {"max_length": 100}}
        return stage_of(check({"stage": "distill", "ppo": ppo, **tables}))

    half, whole, off = (stage(share, max_new_tokens=30) for share in (0.5, 1.0, 0.0))
    assert half.requirements.rollout == PlannedRollout(1, 1, 100, 30)
    assert half.requirements.longest_example == 130
    assert half.requirements.models == off.requirements.models
    served = stage(0.5, sampler="vllm+http://a:1", max_new_tokens=30)
    assert served.requirements.rollout == PlannedRollout(1, 0, 100, 30)
    # only where every row is sampled may rows lack an answer
    assert [one.trained_type for one in (half, whole)] == ["", "prompt"]
    assert type(whole) is OnPolicyStage and whole.dataset_type == "sequence"
    assert type(off) is DistillStage and off.requirements.longest_example == 100
