"""Whether a GPU waits for its host: it is told after a few steps, with what to set that "auto" could not choose."""

from collections import deque

LOOK_AT = 8  # the step at which it is told: kernels are compiled and graphs recorded by then
LEAST_WAIT = 0.05  # share of a step


class HostTime:
    """Follow for what share of its steps a host waits for its GPU.

    Args:
        tokens: batch.tokens_per_microbatch.
        processes: of the run.
    """

    def __init__(self, tokens: int | str, processes: int) -> None:
        self.tokens, self.processes = tokens, processes
        self.shares: deque[float] = deque(maxlen=LOOK_AT // 2)

    def note(self, step: int, share: float, cuts: int) -> str:
        """Take in a step of so many micro-batches, and return what to say after it, or an empty text."""
        self.shares.append(share)
        if step != LOOK_AT:
            return ""
        return host_note(sum(self.shares) / len(self.shares), self.tokens, cuts, self.processes)


def host_note(share: float, tokens: int | str, cuts: int, processes: int) -> str:
    """Return what to set if a GPU has nothing to do while its host prepares the work, or an empty text.

    Args:
        share: of a step in which the host waits for the GPU.
        tokens: batch.tokens_per_microbatch.
        cuts: micro-batches of a step; "auto" chose several because larger ones gain nothing, or do not fit.
    """
    auto = tokens == "auto"
    if share > LEAST_WAIT or (auto and cuts > 1):
        return ""
    advice = "more batch.examples" if auto else 'batch.tokens_per_microbatch = "auto"'
    fewer = ", or use fewer GPUs" if processes > 1 else ""
    return (
        f"the GPU waits for its host, which waits for the GPU in {share:.0%} of a step only: give it more work at "
        f"a time by {advice}{fewer}"
    )
