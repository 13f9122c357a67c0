"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread     phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    clerk thread    meets the other processes, and then writes `alive/RANK` every second: phases, collectives, seconds
                    without progress, place; where this process makes no progress, the first ranks of a node read
                    everybody's; ends the process when another one has told the reason
    watch thread    warns after run.stall_warning and ends the process after run.timeout; it never waits for the store,
                    because the store may be what is gone, and hears signals even if the main thread is stuck
    witness         a process of its own (witness.py), which speaks if rank 0 ends without a word

Progress is a phase or a collective that begins, an answer, or bytes of files. A run has stopped when nobody makes any.
The victim is the rank whose `alive` stops, or else the rank with the fewest phases and collectives. The first rank of
each node that finds out tells it.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from select import select
from time import monotonic, sleep
from typing import Any, NamedTuple

import psutil

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch.failure import (
    POLL_SECONDS,
    PRINTED,
    breaks_off,
    say_below,
    start_witness,
    within,
)
from ulysses.zero.construct import collectives_begun

ALIVE, TOLD = "ulysses/alive", "ulysses/told on the node of"
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
BEAT_SECONDS = 1.0
# So long without a beat, while others wait for a process, means that it is gone or stopped.
SILENT_SECONDS = 6.0
DOUBTS = 2  # glances at a run that does not move, before it ends
READERS = 2  # of each node, in case the first one is the victim
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


@dataclass(eq=False)
class Watch:
    """Watch this process and its peers; an instance that was never started only takes notes.

    Args:
        warning: seconds without progress after which a line names the victim; 0 says nothing.
        timeout: seconds without progress after which the process ends.
        imports: seconds from the start of the process, for the account of the run's.

    Attributes:
        stop_wanted: this process was asked to stop, by a signal or because its launcher is gone.
    """

    warning: float = 60.0
    timeout: float = 600.0
    imports: float = 0.0

    def __post_init__(self) -> None:
        self._rank, self._local_rank = environment.rank(), environment.local_rank()
        self.stop_wanted = False
        self.store: Any = None  # reaches all processes of the run; None for one process
        self._step, self._place, self._phases, self._moved = 0, "start", 0, monotonic()
        self._spent = {"imports": self.imports}  # seconds of each part of the start
        self._part = ("start", self._moved)  # the one that goes on, and when it began
        self._event: Any = None  # of the GPU, at the end of the last step
        self._begun = 0  # collectives
        self._peers: dict[bytes, Beat] = {}  # by what was written
        self._answered = monotonic()  # when the store last did
        self._broken = False  # the connection to the store is
        self._hurried = 0.0  # seconds of silence that count at once
        self._interrupted = inf  # when the first SIGINT came
        self._stop, self._met = threading.Event(), threading.Event()
        self._witness: Any = None  # takes a word that the reason has been told

    # ---------------------------------------------------------------- the main thread

    def start(self, meet: Callable[[], Any]) -> None:
        """Start the threads; `meet`, which returns the store, waits for the other processes in one of them."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        for work in (self._look_after, partial(self._correspond, meet)):
            threading.Thread(target=work, daemon=True, name="failure watch").start()

    def leave_witness(self) -> None:
        """Start a process that tells it if rank 0 ends from here on without a word, which `stop` gives."""
        if self._rank == 0:
            alone = environment.world_size() == 1 and not environment.launched()
            # the other processes need longer to notice it, and tell it themselves
            self._witness = start_witness(
                f"error: rank 0 on {NODE} has ended before the run, and without a word: code that the run calls, such "
                "as a reward function, has ended the process, or it was killed; --run.resume auto continues the run",
                os.getpid() if alone else os.getppid(),
                SILENT_SECONDS - BEAT_SECONDS,
            )

    def wait_for_store(self) -> Any:
        """Return the store, once the processes have met."""
        self._met.wait()
        return self.store

    def stop(self) -> None:
        """End the threads; a process calls it before it ends in good order, or tells why it does not."""
        self._stop.set()
        if self._witness is not None:
            with suppress(OSError):
                self._witness.write(b"told")

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that something else begins."""
        self._step = self._step if step is None else step
        self._place = f"step {self._step}, {name}" if self._step else name
        self._moved = monotonic()
        self._phases += 1
        self._account("first step" if self._step else PARTS.get(name, name))

    def _account(self, following: str) -> None:
        part, began = self._part
        self._spent[part] = self._spent.get(part, 0.0) + monotonic() - began
        self._part = following, monotonic()

    def start_line(self) -> str:
        """Return a line of what the start took, from the command to the end of the first step."""
        self._account("")
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())
        return f"start: {sum(self._spent.values()):.1f} s to the end of the first step: {parts}"

    def pause(self) -> None:
        """Watch nothing until the next phase: what this process does now belongs to no run."""
        self._moved = inf

    def renew(self) -> None:
        """Note progress within a phase."""
        self._moved = max(self._moved, monotonic())

    def step_done(self, event: Any = None) -> None:
        """Note an event that a GPU reaches when it has done the step that the host has done."""
        self._event = event

    def report_failure(self, error: BaseException | None) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        if breaks_off(error) and self.store is not None:
            self._hurried = SILENT_SECONDS
            sleep(3 * SILENT_SECONDS)  # the watch thread may end the process meanwhile

    def ask_to_stop(self, *_: Any) -> None:
        """Have all ranks finish the running step, save and stop; a handler of the signals that ask for it."""
        self.stop_wanted = True
        for number in (1, 2):
            try:
                os.write(number, b"")
            except OSError:
                # the terminal is gone, and the next line would end the run before it has saved
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM, SIGINT and SIGHUP ask the run to stop; nohup's SIGHUP stays ignored.

        A second SIGINT ends the process, even in a stuck collective.
        """
        before = {
            number: signal.signal(number, self.ask_to_stop)
            for number in STOPPING
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        }
        # their numbers reach the watch thread even while the main thread is stuck in a collective
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

        def give_back() -> None:
            if signal.getsignal(signal.SIGTERM) == self.ask_to_stop:
                signal.set_wakeup_fd(descriptor)
                for number, handler in before.items():
                    signal.signal(number, handler)

        def hold() -> None:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING))

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        def in_child() -> None:
            give_back()
            release()

        # A reward function's own processes end when told to, from their first moment on, and this one is not told.
        masks: list[set[int]] = []
        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=in_child)
        try:
            yield
        finally:
            give_back()

    # ---------------------------------------------------------------- the clerk thread

    def _correspond(self, meet: Callable[[], Any]) -> None:
        """Write and read what is in the store, for ever; if the store is gone, the other thread acts."""
        try:
            self.store = meet()
        except Exception as error:
            ended = self._stop.wait(SILENT_SECONDS)
            while self._moved == inf and not ended:
                ended = self._stop.wait(BEAT_SECONDS)
            if ended:
                return  # this process ends for a reason of its own, as the others may have done
            if self._local_rank < READERS:
                say_below(f"error: {error}")
            self._leave(1)
        self._met.set()
        if self.store is None:
            return
        # a connection of its own: the common one may be blocked in a wait
        self._own, size = self.store.clone(), 0
        while not self._stop.is_set():
            begun, enough = self._begun, size + BYTES_OF_PROGRESS
            with suppress(RuntimeError):
                self._begun = collectives_begun()
            size = _bytes_moved()
            if self._begun != begun or size > enough:
                self.renew()
            beat = self._beat()
            try:
                self._own.set(f"{ALIVE}/{self._rank}", json.dumps(beat[:-1]))
                if self._own.check([PRINTED]):
                    self._end(self._own.get(PRINTED).decode())
                waits = beat.idle > 2 * BEAT_SECONDS
                reads = self._hurried or (waits and self._local_rank < READERS)
                self._peers = self._read() if reads else {}
                self._answered, self._broken = monotonic(), False
            except Exception:
                self._broken = True
            self._stop.wait(BEAT_SECONDS)

    def _read(self) -> dict[bytes, Beat]:
        """Return what all processes last wrote; what was there before keeps the time at which it was read."""
        found = {}
        for rank in range(environment.world_size()):
            key = f"{ALIVE}/{rank}"
            text = json.dumps([-1, 0, 0.0, rank, "its node", "its start"]).encode()
            if self._own.check([key]):  # if not, it has met the others, but not begun
                text = self._own.get(key)
            found[text] = self._peers.get(text) or Beat(*json.loads(text), monotonic())
        return found

    def _beat(self) -> Beat:
        """Say where this process is; with a GPU, whether that one has come as far."""
        now, place = monotonic(), self._place
        with suppress(RuntimeError):  # of a GPU that has failed
            if self._event is not None and not self._event.query():
                place += " (its GPU has not finished the step before)"
        idle = now - self._moved
        return Beat(self._phases, self._begun, idle, self._rank, NODE, place, now)

    # ---------------------------------------------------------------- the watch thread

    def _look_after(self) -> None:
        warned, doubts, launchers = -1, 0, _launchers()
        while not self._stop.is_set():
            if select([self._signals], [], [], POLL_SECONDS)[0]:
                self._heard(os.read(self._signals, 64))
            if launchers != _launchers():
                self.ask_to_stop()
            if self.store is None:
                continue
            now, peers = monotonic(), self._peers.values()
            own = now - self._moved
            idle = min([own, *(now - beat.moved for beat in peers)])
            # without the store nobody's beats come
            silence = max([now - self._answered, *(now - beat.read for beat in peers)])
            patience = self._hurried or self.timeout
            if self._broken and not environment.agent_holds_store():
                patience = SILENT_SECONDS
            stopped = idle > self.timeout and self._local_rank < READERS
            cut_off = own > patience and silence > patience
            # this process may itself have been frozen, and first hears how the others are
            doubts = doubts + 1 if stopped or cut_off else 0
            if doubts > DOUBTS:
                self._end(self._sentence())
            if idle > self.warning > 0 and warned != self._phases and self._local_rank == 0:
                warned = self._phases
                say_below(f"warning: {self._sentence()}")
        os.close(self._signals)
        os.close(self._wake)

    def _heard(self, numbers: bytes) -> None:
        """Act on signals; a second SIGINT comes later than the same one from a terminal and from a launcher."""
        if not {*STOPPING} & {*numbers}:
            return  # of those that others listen to: SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > POLL_SECONDS:
                self._leave(128 + signal.SIGINT)
            self._interrupted = min(self._interrupted, monotonic())
        self.ask_to_stop()  # the main thread may be stuck
        self._hurried = self._hurried or 2 * SILENT_SECONDS
        if self._rank == 0:
            say_below("asked to stop: the run saves after this step")

    def _sentence(self) -> str:
        """Name the victim, its node, where it was and how long ago."""
        now, unheard = monotonic(), monotonic() - self._answered
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if environment.agent_holds_store() else "rank 0"
            state = "is gone" if self._broken else "or its network does not answer"
            told = f"{holder} at {environment.store_address()} {state}, {unheard:.0f} s ago"
            return f"{told}; rank {self._rank} on {NODE} was at {self._beat().place}"
        peers = list(self._peers.values()) or [self._beat()]
        silent = [beat for beat in peers if now - beat.read > SILENT_SECONDS]
        victim = min(silent or peers, key=lambda b: (b.phases, b.collectives, b.moved))
        why = "its process is alive, and the others wait for it"
        if silent:
            why = "its process is gone, stopped or cut off"
        return (
            f"rank {victim.rank} on {victim.node} has not moved since {victim.place}, {now - victim.moved:.0f} s ago: "
            f"{why}"
        )

    def _end(self, sentence: str) -> None:
        """Tell the sentence once on this node, hand it to the others, and end the process; "" has been told."""
        if sentence:
            turn = None
            if monotonic() - self._answered < SILENT_SECONDS:
                key = f"{TOLD} {self._rank - self._local_rank}"
                turn = within(3 * BEAT_SECONDS, self._own.add, key, 1)
                within(3 * BEAT_SECONDS, self._own.set, PRINTED, sentence)
            if turn is None:
                # there is no store; on its own node rank 0, which held it, is gone too
                without = self._rank == self._local_rank and not environment.agent_holds_store()
                turn = 1 + self._local_rank - without
            if turn == 1:
                say_below(f"error: {sentence}")
            # a launcher ends all its processes as soon as one has left
            sleep(2 * BEAT_SECONDS)
        self._leave(1)

    def _leave(self, code: int) -> None:
        """End this process at once; the reason has been told."""
        self.stop()
        os._exit(code)


def _bytes_moved() -> int:
    """Count the bytes of files that this process has read, also through memory maps, and written; 0 if nobody does."""
    with suppress(psutil.Error, OSError):
        io = psutil.Process().io_counters()
        return io.read_chars + io.write_chars + io.read_bytes
    return 0


def _launchers() -> list[int]:
    """Return the process that started this one, if it is a launcher; deepspeed's has another one in front of it."""
    with suppress(psutil.Error):  # it ends at this moment
        parent = psutil.Process(os.getppid())
        found = [parent.pid, parent.ppid()]
        return found[: environment.launched() + environment.launched_by_deepspeed()]
    return []
