"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread     phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    clerk thread    meets the other processes and exchanges beats with them (correspondence.py); ends the process when
                    another one has told the reason
    watch thread    warns after run.stall_warning and ends the process after run.timeout; it never waits for the store,
                    because the store may be what is gone, and hears signals even if the main thread is stuck
    witness         a process of its own (witness.py), which speaks if rank 0 ends without a word

Progress is a phase or a collective that begins, an answer, or bytes of files. A run has stopped when nobody makes any,
which rank 0 sees; the others see to rank 0. The victim is the rank whose beats stop, or else the rank with the fewest
phases and collectives.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import IO

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch.correspondence import (
    SILENT_SECONDS,
    Beat,
    Correspondence,
)
from ulysses.watch.failure import BEAT_SECONDS, breaks_off, record, say, say_below, tell
from ulysses.zero.construct import collectives_begun

# They ask a run to stop.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
POLL_SECONDS = 0.5  # of the watch
DOUBTS = 2  # glances at a run that does not move, before it ends
BYTES_OF_PROGRESS = 1 << 14  # in a beat: more than log lines, and than the watch itself reads


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
        self._step, self._place, self._phases, self._moved = 0, "start", 0, monotonic()
        self._spent = defaultdict(
            float, imports=self.imports
        )  # seconds of each part of the start
        self._part, self._began = "start", self._moved  # the one that goes on, and since when
        self._begun = 0  # collectives
        self._peers: Correspondence | None = None  # with the others, once all have met
        self._hurried = inf  # seconds of silence that count, if fewer than the timeout
        self._interrupted = inf  # when the first SIGINT came
        self._stop, self._store = threading.Event(), Future[dist.Store | None]()
        # the input of a process that speaks unless something is written there
        self._witness: IO[bytes] | None = None

    # ---------------------------------------------------------------- the main thread

    def start(self, meet: Callable[[], dist.Store | None]) -> None:
        """Start the threads; `meet`, which returns the store, waits for the other processes in one of them."""
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        for work in (self._look_after, partial(self._correspond, meet)):
            threading.Thread(target=work, daemon=True, name="failure watch").start()

    def leave_witness(self) -> None:
        """Start a process (witness.py) that tells it if rank 0 ends from here on without a word."""
        if self._rank:
            return
        alone = environment.world_size() == 1 and not environment.launchers()
        launcher = os.getpid() if alone else os.getppid()
        sentence = (
            f"error: rank 0 on {NODE} has ended before the run, and without a word: code that the run calls, such "
            "as a reward function, has ended the process, or it was killed; --run.resume auto continues the run"
        )
        # the other processes need longer to notice it, and tell it themselves
        seconds = str(SILENT_SECONDS - BEAT_SECONDS)
        script = Path(__file__).with_name("witness.py")
        # a launcher ends the sessions of its processes
        self._witness = subprocess.Popen(
            [sys.executable, "-P", script, str(launcher), seconds, sentence],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        ).stdin

    def wait_for_store(self) -> dist.Store | None:
        """Return the store of all processes, once they have met; None for one process."""
        return self._store.result()

    def stop(self) -> None:
        """End the threads; a process calls it before it ends in good order, or tells why it does not."""
        self._stop.set()
        if self._witness:
            with suppress(OSError):
                self._witness.write(b"told")

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that something else begins."""
        self._step = self._step if step is None else step
        self._place = f"step {self._step}, {name}" if self._step else name
        self._phases += 1
        self._account("first step" if self._step else PARTS.get(name, name))

    def _account(self, following: str) -> None:
        self._moved = monotonic()
        self._spent[self._part] += self._moved - self._began
        self._part, self._began = following, self._moved

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

    def report_failure(self, error: BaseException | None) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        if breaks_off(error) and self._peers:
            self._hurried = SILENT_SECONDS
            sleep(3 * SILENT_SECONDS)  # the watch thread may end the process meanwhile

    def ask_to_stop(self, *_: object) -> None:
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
        """Let SIGTERM, SIGINT and SIGHUP ask the run to stop; a second SIGINT ends the process, even a stuck one.

        Their numbers go into a pipe too, which the watch thread reads while the main thread, in which handlers run, is
        stuck in a collective. nohup's SIGHUP stays ignored.
        """
        handler = self.ask_to_stop
        before = {
            number: signal.signal(number, handler)
            for number in STOPPING
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        }
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        masks: list[set[int]] = []

        def give_back() -> None:
            if signal.getsignal(signal.SIGTERM) == handler:
                signal.set_wakeup_fd(descriptor)
                for number, earlier in before.items():
                    signal.signal(number, earlier)

        def hold() -> None:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING))

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        def in_child() -> None:
            give_back()
            release()

        # A reward function's own processes end when told to, from their first moment on, and this one is not told.
        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=in_child)
        try:
            yield
        finally:
            give_back()

    # ---------------------------------------------------------------- the clerk thread

    def _correspond(self, meet: Callable[[], dist.Store | None]) -> None:
        """Write and read what is in the store, for ever; if the store is gone, the other thread acts."""
        try:
            store = meet()
        except Exception as error:
            # meanwhile this process may end for a reason of its own, as the others may have done
            while not self._stop.wait(SILENT_SECONDS):
                if self._moved < inf:
                    if self._local_rank < 2:  # the first one of a node may be who has not come
                        say(f"error: {error}")
                    self._leave(1)
            return
        if store is not None:
            # a connection of its own: the common one may be blocked in a wait
            self._peers = Correspondence(store.clone())
        self._store.set_result(store)
        size = 0
        while self._peers and not self._stop.is_set():
            begun, enough = self._begun, size + BYTES_OF_PROGRESS
            with suppress(RuntimeError):
                self._begun = collectives_begun()
            size = _bytes_moved()
            if self._begun != begun or size > enough:
                self.renew()
            beat = self._beat()
            hurried = self._hurried < inf
            # rank 0 listens to all, and the others to rank 0 as long as nothing has happened
            others = range(environment.world_size() if hurried or self._rank == 0 else 1)
            waits = hurried or beat.idle > 2 * BEAT_SECONDS
            if reason := self._peers.exchange(beat, others if waits else ()):
                record(reason)
                sleep(BEAT_SECONDS)  # until the others have read it too
                self._leave(1)
            self._stop.wait(BEAT_SECONDS)

    def _beat(self) -> Beat:
        """Say where this process is."""
        now = monotonic()
        idle = now - self._moved
        return Beat(self._phases, self._begun, idle, self._rank, NODE, self._place, now)

    # ---------------------------------------------------------------- the watch thread

    def _look_after(self) -> None:
        launchers, doubts, warned = _launchers(), 0, -1
        while not self._stop.is_set():
            if select([self._signals], [], [], POLL_SECONDS)[0]:
                self._heard(os.read(self._signals, 64))
            if launchers != _launchers():
                self.ask_to_stop()
            if peers := self._peers:
                idle, stuck = self._judge(peers)
                # this process may itself have been frozen, and first hears how the others are
                doubts = doubts + 1 if stuck else 0
                if doubts > DOUBTS:
                    # where nobody can be asked the first process of a node speaks; rank 0 may be the one that is gone
                    by_rank_0 = self._rank == self._local_rank
                    second = by_rank_0 and not environment.agent_holds_store()
                    alone = self._local_rank == (1 if second else 0)
                    answers = monotonic() - peers.answered < SILENT_SECONDS
                    store = peers.store if answers else None
                    tell(store, f"error: {self._sentence(peers)}", alone=alone)
                    self._leave(1)
                if idle > self.warning > 0 and warned != self._phases and self._rank == 0:
                    warned = self._phases
                    say_below(f"warning: {self._sentence(peers)}")
        os.close(self._signals)
        os.close(self._wake)

    def _judge(self, peers: Correspondence) -> tuple[float, bool]:
        """Return for how long nobody has moved that this process listens to, and whether the run has to end.

        It ends if rank 0 knows of nobody who moves, or if this process does not move and no longer hears another one.
        """
        now, beats = monotonic(), peers.beats.values()
        idle = now - max([self._moved, *(beat.moved for beat in beats)])
        # without the store nobody's beats come
        silence = now - min([peers.answered, *(beat.read for beat in beats)])
        patience = min(self.timeout, self._hurried)
        if peers.broken and not environment.agent_holds_store():
            patience = SILENT_SECONDS
        all_wait = self._rank == 0 and idle > self.timeout
        return idle, all_wait or min(now - self._moved, silence) > patience

    def _heard(self, numbers: bytes) -> None:
        """Act on signals; a second SIGINT comes later than the same one from a terminal and from a launcher."""
        if not {*STOPPING} & {*numbers}:
            return  # of those that others listen to: SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > POLL_SECONDS:
                self._leave(128 + signal.SIGINT)
            self._interrupted = min(self._interrupted, monotonic())
        self.ask_to_stop()  # the main thread may be stuck
        self._hurried = min(self._hurried, 2 * SILENT_SECONDS)
        if self._rank == 0:
            say_below("asked to stop: the run saves after this step")

    def _sentence(self, peers: Correspondence) -> str:
        """Name the victim, its node, where it was and how long ago."""
        now, unheard = monotonic(), monotonic() - peers.answered
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if environment.agent_holds_store() else "rank 0"
            state = "is gone" if peers.broken else "or its network does not answer"
            told = f"{holder} at {environment.store_address()} {state}, {unheard:.0f} s ago"
            return f"{told}; rank {self._rank} on {NODE} was at {self._place}"
        beats = [*peers.beats.values()] or [self._beat()]
        silent = [beat for beat in beats if now - beat.read > SILENT_SECONDS]
        victim = min(silent or beats, key=lambda b: (b.phases, b.collectives, b.moved))
        why = "its process is alive, and the others wait for it"
        if silent:
            why = "its process is gone, stopped or cut off"
        return (
            f"rank {victim.rank} on {victim.node} has not moved since {victim.place}, {now - victim.moved:.0f} s ago: "
            f"{why}"
        )

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


def _launchers() -> tuple[int, ...]:
    """Return the process that started this one, if it is a launcher; deepspeed's has another one in front of it."""
    with suppress(psutil.Error):  # it ends at this moment
        found = os.getppid(), psutil.Process(os.getppid()).ppid()
        return found[: environment.launchers()]
    return ()
