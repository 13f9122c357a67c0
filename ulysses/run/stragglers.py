"""Who keeps the others waiting: a rank that is slower than they are waits less in collectives."""

from ulysses.environment import NODE
from ulysses.parallel.mesh import ParallelMesh, gather
from ulysses.stages.base import Metrics, MetricSums
from ulysses.zero.construct import CollectiveTime

STEPS = 50
SLOWER = 1.3


class Stragglers:
    """Compare every 50 steps for what share of the time each rank waited; all ranks call the methods together."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.time, self.named = mesh, CollectiveTime(), set[int]()

    def add(self, step: int, metrics: MetricSums) -> None:
        """Add what `note` takes out again to the sums that are reduced anyway."""
        share = self.time.share() if step % STEPS == 0 or step == 1 else 0.0
        if step % STEPS == 0:
            for rank in range(self.mesh.world_size):
                metrics.add(f"waits/{rank}", share if rank == self.mesh.rank else 0.0)

    def note(self, step: int, values: Metrics) -> str:
        """Return a line if a rank is slower than the others by 30%, once for each rank."""
        if step % STEPS:
            return ""
        waits = [values.pop(f"waits/{rank}") for rank in range(self.mesh.world_size)]
        rank, least = min(enumerate(waits), key=lambda found: found[1])
        # what the others wait for beyond that is the time that they would not have taken
        lost = min(0.99, (sum(waits) - least) / (len(waits) - 1) - least)
        if rank in self.named or 1 / (1 - lost) < SLOWER:
            return ""
        self.named.add(rank)
        return (
            f"rank {rank} on {gather(NODE)[rank]} was slower than the others by {1 / (1 - lost) - 1:.0%} up to step "
            f"{step}: they wait for it in {lost:.0%} of the time; see what else runs on that host, and whether its "
            "processors and GPUs keep their clocks"
        )
