"""A DeepSpeed that would train wrongly is refused before the model is built."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as ZeroOptimizer

from tests.harness import run_distributed
from ulysses.zero.canary import check_deepspeed
from ulysses.zero.construct import initialize_distributed


def taken(self: Any, parameter: torch.nn.Parameter) -> None:
    """What DeepSpeed would do if it stopped asking whether a gradient is ready."""
    parameter.grad = None


def halved(self: Any, group: int, own: Any = ZeroOptimizer._optimizer_step) -> None:
    self.fp32_partitioned_groups_flat[group].grad.mul_(0.5)
    own(self, group)


# A method of DeepSpeed, what it becomes, or nothing if it is gone, and what is said.
CHANGES: list[tuple[str, Any, str]] = [
    (
        "reduce_ready_partitions_and_remove_grads",
        taken,
        r"\d+ of \d+ trained parameters received no gradient in this step, the first is \S+",
    ),
    ("_optimizer_step", halved, "its gradients or updates are wrong"),
    ("_partition_all_parameters", None, "AttributeError: .*_partition_all_parameters"),
]


def refusals() -> list[str]:
    where, said = initialize_distributed(), []
    for name, replacement, _ in CHANGES:
        with mock.patch.object(ZeroOptimizer, name, replacement):
            if replacement is None:
                delattr(ZeroOptimizer, name)
            with pytest.raises(RuntimeError) as refusal:
                check_deepspeed(where)
        said.append(str(refusal.value))
        check_deepspeed(where)  # this DeepSpeed is right
    return said


def test_a_deepspeed_that_trains_wrongly_is_refused_in_one_sentence():
    # on a GPU the update is not DeepSpeed's
    for said in run_distributed(refusals, 2, cpu=True):
        for text, (_, _, reason) in zip(said, CHANGES, strict=True):
            wrong = rf"deepspeed \S+ does not train correctly .*\(.*{reason}.*\); install deepspeed [\d.]+"
            assert re.fullmatch(wrong, text), text
