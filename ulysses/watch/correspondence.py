"""What the processes of a run tell each other; imported when there are several.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/reason        the first process that finds a reason for the run to end writes it here, with its rank, and
                          prints it; whoever reads it ends

All of it lies in the store through which the processes have met. A run has stopped when nobody makes progress, which
rank 0 sees; the others see to rank 0. The victim is the rank whose beats stop, or else the rank with the fewest phases
and collectives.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from threading import Event
from time import monotonic, sleep
from typing import NamedTuple, Protocol

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch.failure import BEAT_SECONDS, REASON, SILENT_SECONDS, record, say_below, tell
from ulysses.zero.construct import collectives_begun

ALIVE = "ulysses/alive"
DOUBTS = 2  # glances at a run that does not move, before it ends
BYTES_OF_PROGRESS = 1 << 14  # in a beat: more than log lines, and than the watch itself reads


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


class Notes(Protocol):
    """What a process knows of itself (watch.py)."""

    warning: float
    timeout: float
    hurried: float
    phases: int
    place: str
    moved: float
    stopped: Event

    def renew(self) -> None: ...

    def leave(self, code: int) -> None: ...


class Correspondence:
    """A connection to the store of all processes.

    Attributes:
        beats: what the processes that this one listens to last wrote, by its text.
        answered: when the store last answered.
        broken: the connection is.
    """

    def __init__(self, own: Notes, store: dist.Store) -> None:
        self.own, self.store, self.beats = own, store, dict[str, Beat]()
        self.answered, self.broken = monotonic(), False
        self._begun, self._doubts, self._warned = 0, 0, -1  # collectives; glances; the phase

    # ---------------------------------------------------------------- the clerk thread

    def keep_up(self) -> None:
        """Write and read what is in the store, for ever; if the store is gone, the other thread acts."""
        own, size = self.own, 0
        while not own.stopped.is_set():
            begun, enough = self._begun, size + BYTES_OF_PROGRESS
            with suppress(RuntimeError):
                self._begun = collectives_begun()
            size = _bytes_moved()
            if self._begun != begun or size > enough:
                own.renew()
            beat = self._beat()
            hurried = own.hurried < inf
            # rank 0 listens to all, and the others to rank 0 as long as nothing has happened
            others = range(environment.world_size() if hurried or beat.rank == 0 else 1)
            waits = hurried or beat.idle > 2 * BEAT_SECONDS
            if reason := self._exchange(beat, others if waits else ()):
                record(reason)
                sleep(BEAT_SECONDS)  # until the others have read it too
                own.leave(1)
            own.stopped.wait(BEAT_SECONDS)

    def _beat(self) -> Beat:
        """Say where this process is."""
        now, own = monotonic(), self.own
        idle, rank = now - own.moved, environment.rank()
        return Beat(own.phases, self._begun, idle, rank, NODE, own.place, now)

    def _exchange(self, own: Beat, others: Iterable[int]) -> str:
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

    # ---------------------------------------------------------------- the watch thread

    def judge(self) -> None:
        """Warn of a run that does not move, and end it.

        It ends if rank 0 knows of nobody who moves, or if this process does not move and no longer hears another one.
        """
        own, now, beats = self.own, monotonic(), self.beats.values()
        is_first, agent = environment.rank() == 0, environment.agent_holds_store()
        idle = now - max([own.moved, *(beat.moved for beat in beats)])
        # without the store nobody's beats come
        silence = now - min([self.answered, *(beat.read for beat in beats)])
        patience = min(own.timeout, own.hurried)
        if self.broken and not agent:
            patience = SILENT_SECONDS
        all_wait = is_first and idle > own.timeout
        stuck = all_wait or min(now - own.moved, silence) > patience
        # this process may itself have been frozen, and first hears how the others are
        self._doubts = self._doubts + 1 if stuck else 0
        if self._doubts > DOUBTS:
            # where nobody can be asked the first process of a node speaks; rank 0 may be the one that is gone
            second = environment.rank() == environment.local_rank() and not agent
            alone = environment.local_rank() == (1 if second else 0)
            answers = monotonic() - self.answered < SILENT_SECONDS
            tell(self.store if answers else None, f"error: {self._sentence()}", alone=alone)
            own.leave(1)
        if idle > own.warning > 0 and self._warned != own.phases and is_first:
            self._warned = own.phases
            say_below(f"warning: {self._sentence()}")

    def _sentence(self) -> str:
        """Name the victim, its node, where it was and how long ago."""
        now, unheard = monotonic(), monotonic() - self.answered
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if environment.agent_holds_store() else "rank 0"
            state = "is gone" if self.broken else "or its network does not answer"
            told = f"{holder} at {environment.store_address()} {state}, {unheard:.0f} s ago"
            return f"{told}; rank {environment.rank()} on {NODE} was at {self.own.place}"
        beats = [*self.beats.values()] or [self._beat()]
        silent = [beat for beat in beats if now - beat.read > SILENT_SECONDS]
        victim = min(silent or beats, key=lambda b: (b.phases, b.collectives, b.moved))
        why = "its process is alive, and the others wait for it"
        if silent:
            why = "its process is gone, stopped or cut off"
        return (
            f"rank {victim.rank} on {victim.node} has not moved since {victim.place}, {now - victim.moved:.0f} s ago: "
            f"{why}"
        )


def _bytes_moved() -> int:
    """Count the bytes of files that this process has read, also through memory maps, and written; 0 if nobody does."""
    with suppress(psutil.Error, OSError):
        io = psutil.Process().io_counters()
        return io.read_chars + io.write_chars + io.read_bytes
    return 0
