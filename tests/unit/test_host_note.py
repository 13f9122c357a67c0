"""A run whose GPU waits for the host is told so, with what to set that "auto" could not choose."""

from collections import deque
from types import SimpleNamespace

import pytest

from ulysses.run.trainer import Trainer


@pytest.mark.parametrize(
    ("device", "waits", "tokens", "micro_batches", "told"),
    [
        ("cuda", (0.9, 0.5), "auto", 1, ""),
        ("cuda", (0.01, 0.03), "auto", 1, "more batch.examples, or use fewer GPUs"),
        ("cuda", (0.01, 0.03), "auto", 2, ""),
        ("cuda", (0.01, 0.03), 1024, 2, 'batch.tokens_per_microbatch = "auto", or use fewer GPUs'),
        ("cpu", (0.0, 0.0), "auto", 1, ""),
    ],
)  # fmt: skip
def test_only_a_gpu_that_waits_for_its_host_is_told_of(
    device, waits, tokens, micro_batches, told
):
    batch = SimpleNamespace(tokens_per_microbatch=tokens)
    trainer = SimpleNamespace(
        _waits=deque(waits),
        _cuts=micro_batches,
        engine=SimpleNamespace(device=SimpleNamespace(type=device)),
        stage=SimpleNamespace(config=SimpleNamespace(batch=batch)),
        mesh=SimpleNamespace(world_size=2),
    )
    note = Trainer._host_note(trainer)
    assert note.endswith(told) and bool(note) == bool(told)
    if told:
        assert "waits for the GPU in 2% of a step only" in note
