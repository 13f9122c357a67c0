"""A run whose GPU waits for the host is told so, with what to set."""

from collections import deque
from types import SimpleNamespace

import pytest

from ulysses.run.trainer import Trainer


@pytest.mark.parametrize(
    ("device", "waits", "told"),
    [("cuda", (0.9, 0.5), False), ("cuda", (0.01, 0.03), True), ("cpu", (0.0, 0.0), False)],
)
def test_only_a_gpu_that_waits_for_its_host_is_told_of(device, waits, told):
    trainer = SimpleNamespace(
        _waits=deque(waits), engine=SimpleNamespace(device=SimpleNamespace(type=device))
    )
    note = Trainer._host_note(trainer)
    assert bool(note) == told
    if told:
        assert (
            "waits for the GPU in 2% of a step only" in note
            and "batch.tokens_per_microbatch" in note
        )
