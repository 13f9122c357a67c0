"""What keeps a run waiting, told in a line: a rank that is slower than the others, or a host slower than its GPU."""

from collections import Counter, deque
from time import time_ns

from ulysses.environment import NODE
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.stages.base import Metrics, MetricSums
from ulysses.zero.construct import flight_record

STEPS = 50  # between two comparisons of the ranks
SLOWER = 1.3  # times the others' step, from which on a rank is named
# the step at which a host is judged: kernels are compiled and graphs recorded by then
LOOK_AT = 8
LEAST_WAIT = 0.05  # share of a step that a host waits for a GPU which has enough to do


class Stragglers:
    """Compare, every 50 steps, for what share of the time each rank waited in collectives: a slow rank waits least.

    All ranks call the methods together.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.named = mesh, set[int]()
        self._last = 0  # when `_share` was last called

    def add(self, step: int, metrics: MetricSums) -> None:
        """Add this rank's wait to the sums that are reduced anyway; `note` takes it out again."""
        if step % STEPS and self._last:
            return
        share = self._share()  # begins after the first step, which takes longer than others
        if step % STEPS == 0:
            for rank in range(self.mesh.world_size):
                metrics.add(f"waits/{rank}", share if rank == self.mesh.rank else 0.0)

    def _share(self) -> float:
        """Return for what share of the time since the last call this rank's GPU waited; 0 without one."""
        now = time_ns()
        entries = flight_record(active=False)
        sums = Counter[int]()
        # the recorder may hold the last part of this time alone
        since = max(self._last, *(entry["time_created_ns"] for entry in entries[:1]), 0)
        self._last = now
        for entry in entries:
            if entry["time_created_ns"] >= since:
                sums[entry["pg_id"]] += entry.get("duration_ms", 0.0)
        # collectives of one group run one after the other, and those of two groups at the same time
        return 1e6 * max(sums.values(), default=0.0) / (now - since)

    def note(self, step: int, values: Metrics) -> str:
        """Return a line if a rank is slower than the others by 30%, once for each rank, or ""."""
        of_ranks = [f"waits/{rank}" for rank in range(self.mesh.world_size)]
        if of_ranks[0] not in values:
            return ""
        waits = [*map(values.pop, of_ranks)]
        least = min(waits)
        rank = waits.index(least)
        # what the others wait longer than the slowest rank does is time that they lose to it
        lost = min(0.99, (sum(waits) - least) / (len(waits) - 1) - least)
        slower = 1 / (1 - lost)
        if rank in self.named or slower < SLOWER:
            return ""
        self.named.add(rank)
        return (
            f"rank {rank} on {gather(NODE)[rank]} was slower than the others by {slower - 1:.0%} up to step {step}: "
            f"they wait for it in {lost:.0%} of the time; see what else runs on that host, and whether its processors "
            "and GPUs keep their clocks"
        )


class HostTime:
    """Follow for what share of its steps a host waits for its GPU; one that hardly waits is too slow for it.

    Args:
        tokens: batch.tokens_per_microbatch; "auto" cuts a step only if larger micro-batches gain nothing or do not fit.
        processes: of the run.
    """

    def __init__(self, tokens: int | str, processes: int) -> None:
        self.auto, self.processes = tokens == "auto", processes
        self.shares: deque[float] = deque(maxlen=LOOK_AT // 2)

    def note(self, step: int, share: float, micro_batches: int) -> str:
        """Take in a step's share; return at step LOOK_AT what to set if the GPU lacks work, or ""."""
        self.shares.append(share)
        mean = sum(self.shares) / len(self.shares)
        if step != LOOK_AT or mean > LEAST_WAIT or (self.auto and micro_batches > 1):
            return ""
        advice = "more batch.examples" if self.auto else 'batch.tokens_per_microbatch = "auto"'
        fewer = ", or use fewer GPUs" if self.processes > 1 else ""
        return (
            f"the GPU waits for its host, which waits for the GPU in {mean:.0%} of a step only: give it more work at "
            f"a time by {advice}{fewer}"
        )
