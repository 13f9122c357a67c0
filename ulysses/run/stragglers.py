"""Who keeps the others waiting: a rank that is slower than they are waits less in collectives."""

from collections import Counter
from time import time_ns

from ulysses.environment import NODE
from ulysses.parallel.mesh import HOST_WAITS, ParallelMesh, gather
from ulysses.stages.base import Metrics, MetricSums
from ulysses.zero.construct import flight_record

STEPS = 50
SLOWER = 1.3


class Stragglers:
    """Compare every 50 steps for what share of the time each rank waited; all ranks call the methods together."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.named = mesh, set[int]()
        self._last = 0, 0.0  # the time, and how long the host had waited

    def add(self, step: int, metrics: MetricSums) -> None:
        """Add what `note` takes out again to the sums that are reduced anyway."""
        if step % STEPS and self._last[0]:
            return
        share = self._share()  # the first step takes longer than others, and does not count
        if step % STEPS == 0:
            for rank in range(self.mesh.world_size):
                metrics.add(f"waits/{rank}", share * (rank == self.mesh.rank))

    def _share(self) -> float:
        """Return for what share of the time since the last call this rank's GPU or, on a CPU, its host waited."""
        since, before = self._last
        self._last = now, waited = time_ns(), HOST_WAITS.seconds
        entries, sums = flight_record(active=False), Counter[int]()
        if not entries:
            return 1e9 * (waited - before) / (now - since)
        since = max(since, entries[0]["time_created_ns"])
        for entry in entries:
            if entry["time_created_ns"] >= since:
                sums[entry["pg_id"]] += entry.get("duration_ms", 0.0)
        # a group's collectives run one after the other, those of two groups at the same time
        return 1e6 * max(sums.values(), default=0.0) / (now - since)

    def note(self, step: int, values: Metrics) -> str:
        """Return a line if a rank is slower than the others by 30%, once for each rank."""
        of_ranks = [f"waits/{rank}" for rank in range(self.mesh.world_size)]
        if of_ranks[0] not in values:
            return ""
        waits = [*map(values.pop, of_ranks)]
        least = min(waits)
        rank = waits.index(least)
        # what the others wait for beyond that is time that they would not have taken
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
