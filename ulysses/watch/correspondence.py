"""What the processes of a run tell each other, their user and their launcher.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/claims        the first process that finds a reason for the run to end claims it, and prints it
    ulysses/reason        then it writes it here, and whoever reads it ends

All of it lies in the store through which the processes have met.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch.distributed as dist

from ulysses.watch.complaint import record, say

ALIVE, CLAIMS, REASON = "ulysses/alive", "ulysses/claims", "ulysses/reason"
BEAT_SECONDS = 1.0
# So long without a beat, while others wait for a process, means that it is gone or stopped.
SILENT_SECONDS = 6.0
PATIENCE = 10.0  # seconds, with a question to the store


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
        beats: what the processes that this one listens to last wrote.
        answered: when the store last answered.
        broken: the connection is.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store, self.beats = store, list[Beat]()
        self.answered, self.broken = monotonic(), False

    def exchange(self, own: Beat, others: Iterable[int]) -> str:
        """Write a beat, read those of other ranks, and return why the run ends; "" as long as it goes on."""
        known = {beat[:-1]: beat for beat in self.beats}
        try:
            self.store.set(f"{ALIVE}/{own.rank}", json.dumps(own[:-1]))
            said = [self._said(rank) for rank in others]
            # what was there before keeps the time at which it was read
            self.beats = [known.get(one) or Beat(*one, monotonic()) for one in said]
            reason = self.store.get(REASON).decode() if self.store.check([REASON]) else ""
            self.answered, self.broken = monotonic(), False
            return reason
        except Exception:
            self.broken = True
            return ""

    def _said(self, rank: int) -> tuple[Any, ...]:
        if self.store.check([f"{ALIVE}/{rank}"]):
            return tuple(json.loads(self.store.get(f"{ALIVE}/{rank}")))
        # it has met the others, but not begun
        return -1, 0, 0.0, rank, "its node", "its start"

    def tell(self, reason: str, *, alone: bool) -> None:
        """Print why the run ends unless another process does, and let all processes end.

        `alone` says whether this process prints it if the store does not answer.
        """
        silent = monotonic() - self.answered > SILENT_SECONDS
        claim = None if silent else within(PATIENCE, self.store.add, CLAIMS, 1)
        # who was the first may have died before it could print
        told = within(PATIENCE, self.store.get, REASON) if claim and claim > 1 else None
        if told:
            record(told.decode())
        elif claim or alone:
            say(reason)
            if claim:
                within(PATIENCE, self.store.set, REASON, reason)
            # the others leave before their connections to this process break noisily
            sleep(2.5 * BEAT_SECONDS)


def within(seconds: float, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a question to the store gives, or None after an error or so many seconds without an answer."""
    with suppress(Exception):
        return ThreadPoolExecutor(1).submit(ask, *arguments).result(seconds)
