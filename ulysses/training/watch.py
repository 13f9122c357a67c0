"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread     phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    clerk thread    every second writes `alive/RANK`: beat, phases, collectives, seconds without progress, place; where
                    this process makes no progress, the first ranks of a node read everybody's
    watch thread    warns after run.stall_warning and ends the process after run.timeout; it never waits for the store,
                    because the store may be what is gone

A run has stopped when nobody makes progress. The victim is the rank whose `alive` stops, or else the rank with the
fewest phases and collectives. The first rank of each node that finds out tells it.
"""

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from ulysses.training.failure import LAUNCHERS, POLL_SECONDS, PRINTED, within
from ulysses.zero.construct import START_SECONDS, collectives_begun, limit_groups

ALIVE, TOLD = "ulysses/alive", "ulysses/told on the node of"
BEAT_SECONDS = 1.0
# So long without a beat, while others wait for a process, means that it is gone or stopped.
SILENT_SECONDS = 6.0
DAY_SECONDS = 86400.0
# Process groups wait so much longer than the watch, so that its sentence comes first.
MARGIN_SECONDS = 10.0
READERS = 2  # of each node, in case the first one is the victim
BYTES_OF_PROGRESS = 1 << 16  # more than log lines


class Beat(NamedTuple):
    """What a process last wrote about itself."""

    number: int
    phases: int
    collectives: int
    idle: float
    place: str
    node: str


@dataclass(eq=False)
class Watch:
    """Watch this process and its peers; an instance that was never started only takes notes.

    Args:
        warning: seconds without progress after which a line names the victim; 0 says nothing.
        timeout: seconds without progress after which the process ends.
        store: reaches all processes of the run, which all watch; None for one process.

    Attributes:
        stop_wanted: this process was asked to stop, by a signal or because its launcher is gone.
    """

    warning: float = 60.0
    timeout: float = 600.0
    store: Any = None

    def __post_init__(self) -> None:
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
        self._rank, self._local_rank, self._world = (int(os.environ.get(n, 0)) for n in names)
        self.stop_wanted = False
        self._step, self._phase, self._phases, self._moved = 0, "start", 0, monotonic()
        self._stepped = False  # once a step is done, nothing is slow for being the first
        self._long = False
        self._patience = 0.0  # of the process groups
        self._event: Any = None  # of the GPU, at the end of the last step
        # what all processes wrote, and when it last changed
        self._peers: dict[int, tuple[Beat, float]] = {}
        self._beat = Beat(0, 0, 0, 0.0, "start", os.uname().nodename)
        self._answered = monotonic()  # when the store last did
        self._broken = False  # the connection to the store is
        self._printed: str | None = None  # by the rank that told the reason of the end
        self._hurried = 0.0  # seconds of silence that count at once
        self._interrupted = inf  # when the first SIGINT came
        self._stop = threading.Event()

    # ---------------------------------------------------------------- the main thread

    def start(self) -> None:
        """Start the threads."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._launchers = _launchers()
        threads = [self._look_after]
        if self.store is not None:
            # a connection of its own: the common one may be blocked in a wait
            self._own = self.store.clone()
            threads.append(self._correspond)
        for target in threads:
            threading.Thread(target=target, daemon=True, name="failure watch").start()

    def stop(self) -> None:
        """End the threads; the processes call it before they part in good order."""
        self._stop.set()

    def phase(self, name: str, step: int | None = None, *, long: bool = False) -> None:
        """Note that something else begins. In what is `long`, reading and writing files counts as progress too."""
        self._step = self._step if step is None else step
        self._phase, self._long, self._moved = name, long, monotonic()
        self._phases += 1
        patience = DAY_SECONDS if long else self._limit + MARGIN_SECONDS
        if self.store is not None and (patience != self._patience or not self._stepped):
            self._patience = patience
            limit_groups(patience)

    def renew(self) -> None:
        """Note progress within a phase."""
        self._moved = monotonic()

    def step_done(self, event: Any = None) -> None:
        """Note that a step is done on the host, and an event that a GPU reaches when it has done it too."""
        self._stepped, self._event = True, event

    def blame(self, error: BaseException | None) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        told = any(word in str(error) for word in ("gloo", "pair closure"))
        if (told or isinstance(error, dist.DistError)) and self.store is not None:
            self._hurried = SILENT_SECONDS
            sleep(3 * SILENT_SECONDS)  # the watch thread may end the process meanwhile

    def ask_to_stop(self, *_: Any) -> None:
        """Have all ranks finish the running step, save and stop; a handler of SIGTERM and SIGINT."""
        self.stop_wanted = True

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT ask the run to stop; a second SIGINT ends the process, even in a stuck collective."""
        before = {
            n: signal.signal(n, self.ask_to_stop) for n in (signal.SIGTERM, signal.SIGINT)
        }
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---------------------------------------------------------------- the clerk thread

    def _correspond(self) -> None:
        """Write and read what is in the store, for ever; if the store is gone, the other thread acts."""
        begun = moved_bytes = 0
        while not self._stop.is_set():
            before = begun
            with suppress(RuntimeError):
                begun = collectives_begun()
            writes = self._long and _bytes_moved() > moved_bytes + BYTES_OF_PROGRESS
            if begun != before or writes:
                moved_bytes = _bytes_moved()
                self.renew()
            number, *_, node = self._beat
            idle, place = monotonic() - self._moved, self._place()
            self._beat = Beat(number + 1, self._phases, begun, idle, place, node)
            try:
                self._own.set(f"{ALIVE}/{self._rank}", json.dumps(self._beat))
                if self._own.check([PRINTED]):
                    self._printed = self._own.get(PRINTED).decode()
                waits = idle > 2 * BEAT_SECONDS
                reads = self._hurried or (waits and self._local_rank < READERS)
                self._peers = self._read() if reads else {}
                self._answered, self._broken = monotonic(), False
            except Exception:
                self._broken = True
            self._stop.wait(BEAT_SECONDS)

    def _read(self) -> dict[int, tuple[Beat, float]]:
        keys = [f"{ALIVE}/{rank}" for rank in range(self._world)]
        if not self._own.check(keys):  # somebody has not begun yet
            return {}
        found = {}
        for rank, text in enumerate(self._own.multi_get(keys)):
            beat, (old, at) = Beat(*json.loads(text)), self._peers.get(rank, (None, 0.0))
            found[rank] = beat, at if beat == old else monotonic()
        return found

    def _place(self) -> str:
        """Say where this process is; with a GPU, whether that one has come as far."""
        place = f"step {self._step}, {self._phase}" if self._step else self._phase
        with suppress(RuntimeError):  # of a GPU that has failed
            if self._event is not None and not self._event.query():
                return f"{place} (its GPU has not finished the step before)"
        return place

    # ---------------------------------------------------------------- the watch thread

    @property
    def _limit(self) -> float:
        return self.timeout if self._stepped else max(self.timeout, START_SECONDS)

    def _look_after(self) -> None:
        warned = -1
        while True:
            self._listen()
            if self._stop.is_set():
                break
            if not self.stop_wanted and self._launchers != _launchers():
                self.ask_to_stop()
            if self.store is None:
                continue
            if self._printed is not None:
                self._end(self._printed)
            now, peers = monotonic(), self._peers.values()
            own, unheard = now - self._moved, now - self._answered
            idle = min([own, *(beat.idle + now - at for beat, at in peers)])
            silence = max([0.0, *(now - at for _, at in peers)])
            if unheard > SILENT_SECONDS:  # then nobody's beats come
                silence = unheard
            patience = self._hurried or self.timeout
            if self._broken and not _agent_holds_store():
                patience = SILENT_SECONDS
            stopped = idle > self._limit and self._local_rank < READERS
            if stopped or own > patience < silence:
                self._end(self._sentence())
            # the first step may take long without a fault, a silent process is one at any time
            slow = (idle if self._stepped else min(own, silence)) > self.warning > 0
            if slow and warned != self._phases:
                warned = self._phases
                if self._local_rank == 0:
                    print(f"warning: {self._sentence()}", file=sys.stderr, flush=True)
        os.close(self._signals)
        os.close(self._wake)

    def _listen(self) -> None:
        """Wait a moment for signals, which come here even while the main thread is stuck in a collective."""
        if not select.select([self._signals], [], [], POLL_SECONDS)[0]:
            return
        numbers = os.read(self._signals, 64)
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > POLL_SECONDS:
                os._exit(128 + signal.SIGINT)
            self._interrupted = min(self._interrupted, monotonic())
        self._hurried = self._hurried or 2 * SILENT_SECONDS
        if self._rank == 0:
            print("asked to stop: the run saves after this step", file=sys.stderr, flush=True)

    def _sentence(self) -> str:
        """Name the victim, its node, where it was and how long ago."""
        now, unheard = monotonic(), monotonic() - self._answered
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if _agent_holds_store() else "rank 0"
            address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            state = "is gone" if self._broken else "or its network does not answer"
            return (
                f"{holder} at {address} {state}, {unheard:.0f} s ago; rank {self._rank} on {self._beat.node} was at "
                f"{self._place()}"
            )
        peers = self._peers or {self._rank: (self._beat, now)}
        silent = {rank for rank, (_, at) in peers.items() if now - at > SILENT_SECONDS}

        def progress(rank: int) -> tuple[int, int, float]:
            beat, changed = peers[rank]
            return beat.phases, beat.collectives, changed - beat.idle

        victim = min(silent or peers, key=progress)
        beat, changed = peers[victim]
        why = "its process is alive, and the others wait for it"
        if silent:
            more = f", and so are {len(silent) - 1} more ranks" if len(silent) > 1 else ""
            why = f"its process is gone, stopped or cut off{more}"
        age = beat.idle + now - changed
        return f"rank {victim} on {beat.node} has not moved since {beat.place}, {age:.0f} s ago: {why}"

    def _end(self, sentence: str) -> None:
        """Tell the sentence once on this node, hand it to the others, and end the process; "" has been told."""
        if sentence:
            first = None
            if monotonic() - self._answered < SILENT_SECONDS:
                first = within(3 * BEAT_SECONDS, lambda: self._claim(sentence))
            if first is None:
                # there is no store; on its own node rank 0, which held it, is gone too
                without = self._rank == self._local_rank and not _agent_holds_store()
                first = self._local_rank == int(without)
            if first:
                print(f"error: {sentence}", file=sys.stderr, flush=True)
            # a launcher ends all its processes as soon as one has left
            sleep(2 * BEAT_SECONDS)
        os._exit(1)

    def _claim(self, sentence: str) -> bool:
        first = self._own.add(f"{TOLD} {self._rank - self._local_rank}", 1) == 1
        self._own.set(PRINTED, sentence)
        return first


def _agent_holds_store() -> bool:
    """Say whether torchrun holds the store, as it does since torch 2.4 unless it is told otherwise, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _bytes_moved() -> int:
    """Count the bytes that this process has read, also through memory maps, and written; 0 if nobody counts them."""
    with suppress(psutil.Error, AttributeError):
        counted = psutil.Process().io_counters()
        return counted.read_chars + counted.write_chars + counted.read_bytes
    return 0


def _launchers() -> list[int]:
    """Return the process that started this one, if it is a launcher; deepspeed's has another one in front of it."""
    if not LAUNCHERS & os.environ.keys():
        return []
    found = [os.getppid()]
    if "CROSS_SIZE" in os.environ:
        with suppress(psutil.Error):
            found.append(psutil.Process(found[0]).ppid())
    return found
