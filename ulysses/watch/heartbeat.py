"""How far every process has come, and who keeps the others waiting.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/reason        the first process that finds a reason for the run to end writes it here, with its rank, and
                          prints it; whoever reads it ends

All of it lies in the store through which the processes have met; one alone has none. A run has stopped when nobody
makes progress, which rank 0 sees; the others see to rank 0. The victim is the rank whose beats stop, or else the rank
with the fewest phases and collectives.
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
from ulysses.watch.failure import (
    ADVICE,
    BEAT_SECONDS,
    REASON,
    SILENT_SECONDS,
    in_background,
    record,
    say_below,
    tell,
)
from ulysses.zero.construct import collectives_begun

ALIVE = "ulysses/alive"
DOUBTS = 2  # looks at a run that does not move, before it ends
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


class Progress(Protocol):
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


class Heartbeats:
    """This process's beats, and those of the processes that it listens to.

    Args:
        own: of this process.
        store: a connection of its own, because the common one may be blocked in a wait; None for one process.

    Attributes:
        beats: what the others last wrote, by its text.
        answered: when the store last answered; broken: the connection is.
    """

    def __init__(self, own: Progress, store: dist.Store | None) -> None:
        self.own, self.store, self.beats = own, store, dict[str, Beat]()
        self.answered, self.broken = monotonic() if store else inf, False
        self._begun = self._size = self._doubts = 0  # collectives; bytes; looks
        self._warned = -1  # the phase
        self._asked = in_background(bool)

    def beat(self) -> None:
        """Find out how far this process has come, and exchange beats; a store that is gone never answers."""
        own = self.own
        begun, enough = self._begun, self._size + BYTES_OF_PROGRESS
        with suppress(RuntimeError):
            self._begun = collectives_begun()
        self._size = _bytes_moved()
        if self._begun != begun or self._size > enough:
            own.renew()
        if self.store and self._asked.done():
            self._asked = in_background(self._exchange)

    def _own(self) -> Beat:
        """Say where this process is."""
        now, own, rank = monotonic(), self.own, environment.rank()
        return Beat(own.phases, self._begun, now - own.moved, rank, NODE, own.place, now)

    def _exchange(self) -> None:
        """Write a beat, read those of other ranks, and end this process if one has told why the run ends."""
        beat, hurried = self._own(), self.own.hurried < inf
        # rank 0 listens to all, and the others to rank 0 as long as nothing has happened
        others = range(environment.world_size() if hurried or beat.rank == 0 else 1)
        waits = hurried or beat.idle > 2 * BEAT_SECONDS
        try:
            self.store.set(f"{ALIVE}/{beat.rank}", json.dumps(beat[:-1]))
            self.beats = dict(self._read_beats(others if waits else ()))
            _, _, reason = self._read(REASON).partition(" ")
            self.answered, self.broken = monotonic(), False
        except Exception:
            self.broken = True
            return
        if reason:
            record(reason)
            sleep(BEAT_SECONDS)  # until the others have read it too
            self.own.leave(1)

    def _read_beats(self, ranks: Iterable[int]) -> Iterable[tuple[str, Beat]]:
        for rank in ranks:
            # it has met the others, but not begun
            unbegun = json.dumps([-1, 0, 0.0, rank, "its node", "its start"])
            text = self._read(f"{ALIVE}/{rank}", unbegun)
            # what was there before keeps the time at which it was read
            yield text, self.beats.get(text) or Beat(*json.loads(text), monotonic())

    def _read(self, key: str, default: str = "") -> str:
        return self.store.get(key).decode() if self.store.check([key]) else default

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
            second = self.store and environment.rank() == environment.local_rank() and not agent
            alone = environment.local_rank() == (1 if second else 0)
            answers = monotonic() - self.answered < SILENT_SECONDS
            tell(
                self.store if answers else None,
                f"error: {self._sentence()}; {ADVICE}",
                alone=alone,
            )
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
        beats = [*self.beats.values()] or [self._own()]
        silent = [beat for beat in beats if now - beat.read > SILENT_SECONDS]
        victim = min(silent or beats, key=lambda b: (b.phases, b.collectives, b.moved))
        why = "its process is alive, and the others wait for it"
        if silent:
            why = "its process is gone, stopped or cut off, or code holds its interpreter"
        elif not self.store:
            why = "its process is alive, and waits"
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
