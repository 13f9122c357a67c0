"""A run whose GPU waits for the host is told so, with what to set that "auto" could not choose."""

import pytest

from tests import rows_of
from ulysses.run.stragglers import LOOK_AT, HostTime

# the host's share of a step, tokens_per_microbatch, micro-batches and processes; what is said
NOTES = """
0.7 auto 1 2 =>
0.02 auto 1 2 => at a time by more batch.examples, or use fewer GPUs
0.02 auto 1 1 => at a time by more batch.examples
0.02 auto 2 2 =>
0.02 1024 2 2 => by batch.tokens_per_microbatch = "auto", or use fewer GPUs
0.02 1024 3 1 => by batch.tokens_per_microbatch = "auto"
"""


@pytest.mark.parametrize("given, told", rows_of(NOTES))
def test_a_host_that_keeps_its_gpu_waiting_is_told_of(given, told):
    share, tokens, micro_batches, processes = (
        word if word == "auto" else float(word) for word in given.split()
    )
    host = HostTime(tokens, processes)
    assert not host.note(LOOK_AT - 1, share, micro_batches)
    note = host.note(LOOK_AT, share, micro_batches)
    assert note.endswith(told) and bool(note) == bool(told)
    if told:
        assert "waits for the GPU in 2% of a step only" in note
