"""What the processes of a run tell each other, their user and their launcher.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/reason        the first process that finds a reason for the run to end writes it here, with its rank, and
                          prints it; whoever reads it ends

All of it lies in the store through which the processes have met.
"""

import json
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

import torch.distributed as dist

from ulysses.watch.failure import REASON

ALIVE = "ulysses/alive"
# So long without a beat, while others wait for a process, means that it is gone or stopped.
SILENT_SECONDS = 6.0


class Beat(NamedTuple):
    """What a process last wrote about itself, and when this process first read it."""

    phases: int
    collectives: int
    idle: float
    rank: int
    node: str
    place: str
    read: float

    @property
    def moved(self) -> float:
        """When it last made progress, by this process's clock."""
        return self.read - self.idle


class Correspondence:
    """A connection to the store of all processes.

    Attributes:
        beats: what the processes that this one listens to last wrote, by its text.
        answered: when the store last answered.
        broken: the connection is.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store, self.beats = store, dict[str, Beat]()
        self.answered, self.broken = monotonic(), False

    def exchange(self, own: Beat, others: Iterable[int]) -> str:
        """Write a beat, read those of other ranks, and return why the run ends; "" as long as it goes on."""
        try:
            self.store.set(f"{ALIVE}/{own.rank}", json.dumps(own[:-1]))
            beats: dict[str, Beat] = {}
            for rank in others:
                # it has met the others, but not begun
                unbegun = json.dumps([-1, 0, 0.0, rank, "its node", "its start"])
                text = self._read(f"{ALIVE}/{rank}", unbegun)
                # what was there before keeps the time at which it was read
                beats[text] = self.beats.get(text) or Beat(*json.loads(text), monotonic())
            self.beats = beats
            _, _, reason = self._read(REASON).partition(" ")
            self.answered, self.broken = monotonic(), False
            return reason
        except Exception:
            self.broken = True
            return ""

    def _read(self, key: str, default: str = "") -> str:
        return self.store.get(key).decode() if self.store.check([key]) else default
