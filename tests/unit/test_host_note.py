"""A run whose GPU waits for the host is told so, with what to set that "auto" could not choose."""

import pytest

from ulysses.run.host_time import LOOK_AT, HostTime


@pytest.mark.parametrize(
    ("share", "tokens", "micro_batches", "processes", "told"),
    [
        (0.7, "auto", 1, 2, ""),
        (0.02, "auto", 1, 2, "at a time by more batch.examples, or use fewer GPUs"),
        (0.02, "auto", 1, 1, "at a time by more batch.examples"),
        (0.02, "auto", 2, 2, ""),
        (0.02, 1024, 2, 2, 'by batch.tokens_per_microbatch = "auto", or use fewer GPUs'),
        (0.02, 1024, 3, 1, 'by batch.tokens_per_microbatch = "auto"'),
    ],
)
def test_a_host_that_keeps_its_gpu_waiting_is_told_of(
    share, tokens, micro_batches, processes, told
):
    host = HostTime(tokens, processes)
    assert not host.note(LOOK_AT - 1, share, micro_batches)
    note = host.note(LOOK_AT, share, micro_batches)
    assert note.endswith(told) and bool(note) == bool(told)
    if told:
        assert "waits for the GPU in 2% of a step only" in note
