"""What a user's own DeepSpeed keys become."""

import torch

from ulysses.zero.settings import derive


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


def test_keys_that_observe_are_passed_on():
    raw = {"comms_logger": {"enabled": True}, "dump_state": True, "memory_breakdown": False}
    assert derive(dtype=torch.float32, raw=raw) == derive(dtype=torch.float32) | raw
