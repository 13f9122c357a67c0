"""What a user's own DeepSpeed keys become."""

import pytest
import torch

from ulysses.zero.settings import check_raw, derive


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "zero_quantized_gradients"])
def test_settings_that_the_engine_does_not_support_are_refused_by_name(key):
    with pytest.raises(
        ValueError, match=f"zero_optimization.{key} is owned by the engine and cannot be set there; use nothing: "
    ):
        derive(dtype=torch.float32, raw={"zero_optimization": {key: 2}})


def test_a_file_written_for_another_trainer_says_nothing_where_it_says_auto():
    raw = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "overlap_comm": False},
        "steps_per_print": 7,
    }
    wanted = derive(dtype=torch.float32) | {"steps_per_print": 7}
    wanted["zero_optimization"]["overlap_comm"] = False
    assert derive(dtype=torch.float32, raw=raw) == wanted


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (
            {"comms_loger": {"enabled": True}},
            "deepspeed.comms_loger is not passed on to DeepSpeed; leave it out, only these are: zero_opt",
        ),
        ({"gradient_predivide_factor": 2}, "deepspeed.gradient_predivide_factor is not passed on"),
        ({"zero_optimization": 3}, "deepspeed.zero_optimization is 3 but must be a table"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "deepspeed.zero_optimization.overlap_com: Extra inputs are not permitted",
        ),
        (
            {"zero_optimization": {"sub_group_size": -1}},
            "deepspeed.zero_optimization.sub_group_size: .*greater than or equal to 0",
        ),
    ],
)
def test_keys_that_mean_nothing_here_are_refused(raw, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_raw(raw)


def test_keys_that_observe_are_passed_on():
    raw = {"comms_logger": {"enabled": True}, "dump_state": True, "memory_breakdown": False}
    assert derive(dtype=torch.float32, raw=raw) == derive(dtype=torch.float32) | raw
