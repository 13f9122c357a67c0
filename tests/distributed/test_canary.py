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


CHANGES: dict[str, tuple[str, Any, str]] = {
    "gradients are taken before us": (
        "reduce_ready_partitions_and_remove_grads",
        taken,
        r"\d+ of \d+ trained parameters received no gradient in this step, the first is \S+",
    ),
    "an update is wrong": ("_optimizer_step", halved, "its gradients or updates are wrong"),
    "a name is gone": (
        "_partition_all_parameters",
        None,
        "AttributeError: .*_partition_all_parameters",
    ),
}


def checked(change: str) -> str:
    where = initialize_distributed()
    check_deepspeed(where)  # this DeepSpeed is right
    name, replacement, _ = CHANGES[change]
    with mock.patch.object(ZeroOptimizer, name, replacement):
        if replacement is None:
            delattr(ZeroOptimizer, name)
        with pytest.raises(RuntimeError) as refusal:
            check_deepspeed(where)
    check_deepspeed(where)
    return str(refusal.value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_deepspeed_that_trains_wrongly_is_refused_in_one_sentence(change):
    on_cpu = change == "an update is wrong"  # on a GPU it is not DeepSpeed's
    for text in run_distributed(checked, 2, change, cpu=on_cpu):
        assert re.fullmatch(
            rf"deepspeed \S+ does not train correctly .*\(.*{CHANGES[change][2]}.*\); install deepspeed [\d.]+",
            text,
        ), text
