"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread         phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    heartbeat thread    meets the other processes; once a second it exchanges beats with them, warns after
                        run.stall_warning, ends the process after run.timeout, and hears signals even if the main thread
                        is stuck
    watchdog            a process of its own beside rank 0 (watchdog.py), for what no thread can tell: code that holds
                        the interpreter, and an end without a word

The beats lie in the store through which the processes have met; one process has none.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/reason        the first process that finds a reason for the run to end writes it here, with its rank, and
                          prints it; whoever reads it ends

Progress is a phase, a collective or a model's pass that begins, an answer, or bytes of files. A run has stopped when
nobody makes progress, which rank 0 sees; the others see to rank 0. The victim is the rank whose beats stop, or else the
rank with the fewest phases and collectives.
"""

import faulthandler
import json
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
from typing import IO, NamedTuple

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch import failure
from ulysses.watch.failure import ADVICE, BEAT_SECONDS, SILENT_SECONDS, in_background
from ulysses.zero.construct import collectives_begun

# They ask a run to stop.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
ONE_SIGNAL = 0.5  # seconds within which a terminal and a launcher send the same one
BYTES_OF_PROGRESS = 1 << 14  # in a beat: more than log lines, and than the watch itself reads
GONE = "its process is gone, stopped or cut off, or code holds its interpreter"


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
        place, phases, moved: what it does, how many phases have begun, and when it last made progress.
        stopped: is set when nobody need watch any more.
    """

    warning: float = 60.0
    timeout: float = 600.0
    imports: float = 0.0

    def __post_init__(self) -> None:
        self.stop_wanted, self.stopped = False, threading.Event()
        self.place, self.phases, self.moved = "start", 0, monotonic()
        self._step, self._part, self._began = 0, "start", self.moved
        self._spent = defaultdict(float, imports=self.imports)  # in each part of the start
        self._hurried = inf  # seconds of silence that count, if they are fewer than the timeout
        self._interrupted = inf  # when the first SIGINT came
        self._met, self._store = Future[dist.Store | None](), None
        self._watchdog: IO[bytes] | None = None  # its input, once all processes have met
        # of other processes, by their text; when the store last answered; whether the connection is broken
        self._beats, self._answered, self._broken = dict[str, Beat](), inf, False
        self._begun = self._size = 0  # collectives; bytes
        self._warned, self._beaten = -1, self.moved  # the phase; when

    # ---------------------------------------------------------------- the main thread

    def start(self, meet: Callable[[], dist.Store | None]) -> None:
        """Start the heartbeat; `meet`, which returns the store, waits in its thread for the other processes."""
        faulthandler.enable(2, all_threads=False)  # code that crashes shows its line
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        threading.Thread(target=self._live, args=(meet,), daemon=True, name="heartbeat").start()

    def wait_for_store(self) -> dist.Store | None:
        """Return the store of all processes, once they have met; None for one process."""
        return self._met.result()

    def stop(self) -> None:
        """End the heartbeat; a process calls it before it ends in good order, or tells why it does not."""
        self.stopped.set()
        self._tell_watchdog("told")

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that something else begins."""
        self._step = self._step if step is None else step
        self.place = f"step {self._step}, {name}" if self._step else name
        self.phases += 1
        self._tell_watchdog(self.place)  # at once: code that crashes gives no time
        self._account("first step" if self._step else PARTS.get(name, name))

    def _account(self, following: str) -> None:
        self.moved = monotonic()
        self._spent[self._part] += self.moved - self._began
        self._part, self._began = following, self.moved

    def start_line(self) -> str:
        """Return a line of what the start took, from the command to the end of the first step."""
        self._account("")
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())
        return f"start: {sum(self._spent.values()):.1f} s to the end of the first step: {parts}"

    def pause(self) -> None:
        """Watch nothing until the next phase: what this process does now belongs to no run."""
        self.place, self.moved = "", inf
        self._tell_watchdog("")

    def renew(self) -> None:
        """Note progress within a phase."""
        self.moved = max(self.moved, monotonic())

    def report_failure(self, error: BaseException) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        if failure.breaks_off(error) and self._store:
            self._hurried = SILENT_SECONDS
            sleep(3 * SILENT_SECONDS)  # the heartbeat may end the process meanwhile

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

        Their numbers go into a pipe too, which the heartbeat reads while the main thread, in which handlers run, is
        stuck in a collective. nohup's SIGHUP stays ignored.
        """
        handler, masks = self.ask_to_stop, list[set[int]]()
        before = {
            number: signal.signal(number, handler)
            for number in STOPPING
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        }
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

        def give_back() -> None:
            if signal.getsignal(signal.SIGTERM) == handler:
                signal.set_wakeup_fd(descriptor)
                for number, earlier in before.items():
                    signal.signal(number, earlier)

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        # A reward function's own processes end when told to, from their first moment on, and this one is not told.
        os.register_at_fork(
            before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)),
            after_in_parent=release,
            after_in_child=lambda: (give_back(), release()),
        )
        try:
            yield
        finally:
            give_back()

    # ---------------------------------------------------------------- the heartbeat thread

    def _live(self, meet: Callable[[], dist.Store | None]) -> None:
        """Beat, judge and hear signals until the watch is stopped."""
        try:
            store = meet()
        except Exception as error:
            # meanwhile this process may end for a reason of its own, as the others may have done
            while not self.stopped.wait(SILENT_SECONDS):
                if self.moved < inf:
                    # the first one of a node may be who has not come
                    if environment.local_rank() < 2:
                        failure.say(f"error: {error}")
                    self._leave(1)
            return
        if store:
            # a connection of its own: the common one may be blocked in a wait
            self._store, self._answered = store.clone(), monotonic()
        self._met.set_result(store)
        if environment.rank() == 0:
            self._start_watchdog()
        launchers, asked = _launchers(), None
        while not self.stopped.is_set():
            beat = self._beat()
            # a store that is gone never answers
            if store and (asked is None or asked.done()):
                asked = in_background(partial(self._exchange, beat))
            self._judge(beat)
            self._tell_watchdog(self.place)
            if launchers != _launchers():
                self.ask_to_stop()
            if select([self._signals], [], [], BEAT_SECONDS)[0]:
                self._hear(os.read(self._signals, 64))
        os.close(self._signals)
        os.close(self._wake)

    def _beat(self) -> Beat:
        """Find out how far this process has come."""
        begun, enough, beaten = self._begun, self._size + BYTES_OF_PROGRESS, self._beaten
        self._beaten = now = monotonic()
        with suppress(RuntimeError):
            self._begun = collectives_begun()
        with suppress(psutil.Error, OSError):  # also through memory maps
            io = psutil.Process().io_counters()
            self._size = io.read_chars + io.write_chars + io.read_bytes
        # one that was itself frozen first hears how the others are
        frozen = now - beaten > SILENT_SECONDS
        if frozen or self._begun != begun or self._size > enough:
            self.renew()
        idle, rank = now - self.moved, environment.rank()
        return Beat(self.phases, self._begun, idle, rank, NODE, self.place, now)

    def _exchange(self, own: Beat) -> None:
        """Write a beat, read those of other ranks, and end this process if one has told why the run ends."""
        hurried, store = self._hurried < inf, self._store
        # rank 0 listens to all, and the others to rank 0 as long as nothing has happened
        others = range(environment.world_size() if hurried or own.rank == 0 else 1)

        def read(key: str, default: str = "") -> str:
            return store.get(key).decode() if store.check([key]) else default

        try:
            store.set(f"ulysses/alive/{own.rank}", json.dumps(own[:-1]))
            # one that has met the others may not have begun
            texts = [
                read(f"ulysses/alive/{r}", json.dumps([-1, 0, 0.0, r, "its node", "its start"]))
                for r in (others if hurried or own.idle > 2 * BEAT_SECONDS else ())
            ]
            # what was there before keeps the time at which it was read
            known, now = self._beats, monotonic()
            self._beats = {x: known.get(x) or Beat(*json.loads(x), now) for x in texts}
            _, _, reason = read(failure.REASON).partition(" ")
            self._answered, self._broken = monotonic(), False
        except Exception:
            self._broken = True
            return
        if reason:
            failure.record(reason)
            sleep(BEAT_SECONDS)  # until the others have read it too
            self._leave(1)

    def _judge(self, own: Beat) -> None:
        """Warn of a run that does not move, and end it.

        It ends if rank 0 knows of nobody who moves, or if this process does not move and no longer hears another one.
        """
        now, beats, agent = monotonic(), self._beats.values(), environment.agent_holds_store()
        idle = now - max([self.moved, *(beat.moved for beat in beats)])
        # without the store nobody's beats come
        silence = now - min([self._answered, *(beat.read for beat in beats)])
        patience = min(self.timeout, self._hurried)
        if self._broken and not agent:
            patience = SILENT_SECONDS
        all_wait = own.rank == 0 and idle > self.timeout
        if all_wait or min(now - self.moved, silence) > patience:
            store = self._store if now - self._answered < SILENT_SECONDS else None
            # where nobody can be asked the first process of a node speaks; rank 0 may be the one that is gone
            beside = self._answered < inf and own.rank == environment.local_rank() and not agent
            alone = environment.local_rank() == int(beside)
            failure.tell(store, f"error: {self._sentence(own)}; {ADVICE}", alone=alone)
            self._leave(1)
        if idle > self.warning > 0 and self._warned != self.phases and own.rank == 0:
            self._warned = self.phases
            failure.say_below(f"warning: {self._sentence(own)}")

    def _sentence(self, own: Beat) -> str:
        """Name the victim, its node, where it was and how long ago."""
        now, unheard = monotonic(), monotonic() - self._answered
        # a beat may be a second older than the end of its process
        beside = f"; rank {own.rank} on {NODE} was at {self.place}"
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if environment.agent_holds_store() else "rank 0"
            state = "is gone" if self._broken else "or its network does not answer"
            return f"{holder} at {environment.store_address()} {state}, {unheard:.0f} s ago{beside}"
        beats = [*self._beats.values()] or [own]
        silent = [beat for beat in beats if now - beat.read > SILENT_SECONDS]
        victim = min(silent or beats, key=lambda b: (b.phases, b.collectives, b.moved))
        alive = "its process is alive, and " + (
            "the others wait for it" if self._beats else "waits"
        )
        return (
            f"rank {victim.rank} on {victim.node} has not moved since {victim.place}, {now - victim.moved:.0f} s ago: "
            f"{GONE if silent else alive}{beside * (victim.rank != own.rank)}"
        )

    def _start_watchdog(self) -> None:
        """Start a process (watchdog.py) that tells what rank 0 cannot."""
        world, patience = environment.world_size(), max(self.timeout, SILENT_SECONDS)
        launcher = os.getppid() if world > 1 or environment.launchers() else os.getpid()
        # the other processes, unless they are held too, tell it first
        patience += 2 * SILENT_SECONDS * (world > 1)
        watchdog = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("watchdog.py"),
             *map(str, (launcher, patience, world, f"rank 0 on {NODE}"))],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,  # a launcher ends the sessions of its processes
        )  # fmt: skip
        os.set_blocking(watchdog.stdin.fileno(), False)  # nobody waits for it
        self._watchdog = watchdog.stdin

    def _tell_watchdog(self, line: str) -> None:
        if self._watchdog:
            with suppress(OSError):
                self._watchdog.write(f"{line}\n".encode())

    def _hear(self, numbers: bytes) -> None:
        """Act on signals; a second SIGINT comes later than the same one from a terminal and from a launcher."""
        if not {*STOPPING} & {*numbers}:
            return  # of those that others listen to: SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > ONE_SIGNAL:
                self._leave(128 + signal.SIGINT)
            self._interrupted = min(self._interrupted, monotonic())
        self.ask_to_stop()  # the main thread may be stuck
        self._hurried = min(self._hurried, 2 * SILENT_SECONDS)
        if environment.rank() == 0:
            failure.say_below("asked to stop: the run saves after this step")

    def _leave(self, code: int) -> None:
        """End this process at once; the reason has been told."""
        self.stop()
        os._exit(code)


def _launchers() -> tuple[int, ...]:
    """Return the process that started this one, if it is a launcher; deepspeed's has another one in front of it."""
    with suppress(psutil.Error):  # it ends at this moment
        found = os.getppid(), psutil.Process(os.getppid()).ppid()
        return found[: environment.launchers()]
    return ()
