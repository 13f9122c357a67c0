"""Offload to host memory: every byte comes back, and layers leave one behind and return one ahead."""

from unittest.mock import Mock

import pytest
import torch

from tests.memory_case import (
    TILE,
    all_chunks_are_free,
    assert_same_gradients,
    batch,
    build,
    gradients,
)
from ulysses.memory.offload import Offloader

MIXTURES = [("pair", "pair", "block"), ("pair", "pair", "pair"), ("block", "block", "keep_attention"),
            ("keep_attention", "keep_attention", "none"), ("none", "none", "none")]  # fmt: skip


@pytest.mark.parametrize("away", [3, 2, 1])
@pytest.mark.parametrize("levels", MIXTURES, ids="+".join)
def test_offload_returns_every_byte(levels, away):
    expected = gradients(build())[1]
    offloader = Offloader("cpu", chunk_bytes=1024)
    model = build(recompute=levels, mlp_tile=TILE, offloader=offloader, offloaded_layers=away)
    for _ in range(2):
        model.zero_grad()
        assert_same_gradients(gradients(model)[1], expected)
    held = offloader.allocated
    assert (held > 0) == (levels[0] != "none")
    dropped = model(batch()).logps.sum()
    del dropped
    assert offloader.allocated == held and all_chunks_are_free(offloader)


def test_memory_that_cannot_be_pinned_says_what_to_change(monkeypatch):
    offloader = Offloader("cpu", chunk_bytes=64)
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError) as error:
        offloader.take(64)
    assert "lower memory.host_memory or raise the memlock limit" in error.value.__notes__[0]
