"""What a user's own DeepSpeed keys become."""

import torch

from ulysses.zero.settings import derive


def test_keys_that_observe_are_passed_on():
    raw = {"comms_logger": {"enabled": True}, "dump_state": True, "memory_breakdown": False}
    assert derive(dtype=torch.float32, raw=raw) == derive(dtype=torch.float32) | raw
