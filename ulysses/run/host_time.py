"""Whether a GPU waits for its host: it is told after a few steps, with what to set that "auto" could not choose."""

from collections import deque

LOOK_AT = 8  # the step at which it is told: kernels are compiled and graphs recorded by then
LEAST_WAIT = 0.05  # share of a step


class HostTime:
    """Follow for what share of its steps a host waits for its GPU.

    Args:
        tokens: batch.tokens_per_microbatch; "auto" cuts a step if larger micro-batches gain nothing, or do not fit.
        processes: of the run.
    """

    def __init__(self, tokens: int | str, processes: int) -> None:
        self.auto, self.processes = tokens == "auto", processes
        self.shares: deque[float] = deque(maxlen=LOOK_AT // 2)

    def note(self, step: int, share: float, cuts: int) -> str:
        """Take in a step of so many micro-batches; return what to set if the GPU has nothing to do, or "" if it has."""
        self.shares.append(share)
        mean = sum(self.shares) / len(self.shares)
        if step != LOOK_AT or mean > LEAST_WAIT or (self.auto and cuts > 1):
            return ""
        advice = "more batch.examples" if self.auto else 'batch.tokens_per_microbatch = "auto"'
        fewer = ", or use fewer GPUs" if self.processes > 1 else ""
        return (
            f"the GPU waits for its host, which waits for the GPU in {mean:.0%} of a step only: give it more work at "
            f"a time by {advice}{fewer}"
        )
