"""What a user's own DeepSpeed keys become."""

import pytest
import torch

from ulysses.zero.settings import derive


def test_auto_leaves_the_engines_own_value() -> None:
    raw = {"zero_optimization": {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}, "steps_per_print": 7}
    assert derive(dtype=torch.float32, raw=raw) == derive(dtype=torch.float32) | {"steps_per_print": 7}


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "zero_quantized_gradients"])
def test_settings_that_the_engine_does_not_support_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"zero_optimization.{key} is owned by the engine and cannot be set there; use nothing: "):
        derive(dtype=torch.float32, raw={"zero_optimization": {key: 2}})
