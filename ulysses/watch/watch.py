"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread         phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    heartbeat thread    meets the other processes; once a second it exchanges beats with them, warns after
                        run.stall_warning, ends the process after run.timeout, and hears signals even if the main thread
                        is stuck
    watchdog            a process beside rank 0 (watchdog.py) for the two faults that no thread can report: code that
                        holds the interpreter, and a process that ends without a word

Processes exchange their beats through the store in which they have met; a single process has no store.

    ulysses/alive/RANK    each process writes once a second what it does and how far it has come
    ulysses/reason        the first process that finds a reason for the run to end prints it, and writes it here with
                          its rank; every process that reads a reason here ends

Progress is a phase, a collective or a model's pass that begins, an answer, or bytes of files. Rank 0 ends a run in
which no process makes progress; the other ranks watch rank 0. The victim, which is named, is the rank whose beats have
stopped or, if all ranks still beat, the one with the fewest phases and collectives.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
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
from typing import IO, Any, NamedTuple

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.config.section import SECRETS, UserCodeError
from ulysses.disk import DiskError
from ulysses.environment import NODE
from ulysses.watch import failure
from ulysses.zero.construct import collectives_begun, common_store

REASON = "ulysses/reason"  # the key in the store under which stands why the run ends
BEAT_SECONDS = 1.0  # between two beats
# A process that gives no beat for so long, while others wait for it, is gone or stopped.
SILENT_SECONDS = 6.0
STORE_SECONDS = 10.0  # for an answer of the store
ADVICE = "--run.resume auto continues the run"
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP  # the signals that ask a run to stop
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
# seconds within which a terminal and a launcher pass on one and the same Ctrl-C
ONE_INTERRUPT = 0.5
# Bytes between two beats that count as progress: more than log lines, and than the watch itself reads.
BYTES_OF_PROGRESS = 1 << 14
GONE = "its process is gone, stopped or cut off, or code holds its interpreter"


class Beat(NamedTuple):
    """What a process last wrote about itself, and when (`read`) this process first read it."""

    phases: int
    collectives: int
    idle: float
    rank: int
    node: str
    place: str
    read: float

    @property
    def moved(self) -> float:
        """When that process last made progress, by this process's clock."""
        return self.read - self.idle


@dataclass(eq=False)
class Watch:
    """Watch this process and the others of the run; a watch that was never started only takes notes.

    Args:
        warning: seconds without progress after which a line names the victim; 0 says nothing.
        timeout: seconds without progress after which the process ends.
        imports: seconds that the process has spent so far, mostly on imports, for `start_line`.

    Attributes:
        stop_wanted: this process was asked to stop, by a signal or because its launcher is gone.
        place, phases, moved: what this process does, how many phases have begun, and when it last made progress.
        stopped: is set when the heartbeat is to end.
        meeting: will have the store of all processes, once they have met; None for one process.
    """

    warning: float = 60.0
    timeout: float = 600.0
    imports: float = 0.0

    def __post_init__(self) -> None:
        self.stop_wanted = False
        self.stopped = threading.Event()
        self.place, self.phases, self.moved = "start", 0, monotonic()
        self._step, self._part, self._began = 0, "start", self.moved
        # seconds in each part of the start
        self._spent = defaultdict(float, imports=self.imports)
        # seconds of silence after which the run ends, once an error or a signal calls for less patience
        self._hurried = inf
        self._interrupted_at = inf  # when the first SIGINT came
        self.meeting = Future[dist.Store | None]()
        self._store = None
        # the watchdog's standard input, once all processes have met
        self._watchdog: IO[bytes] | None = None
        self._beats = dict[str, Beat]()  # of other processes, by the text that they wrote
        # when the store last answered, and whether its connection is broken now
        self._answered, self._broken = inf, False
        self._collectives = self._bytes = 0  # begun, and read or written, up to the last beat
        self._warned_phase = -1
        self._beat_at = self.moved

    # ---------------------------------------------------------------- the main thread

    def start(self, meet: Callable[[], dist.Store | None]) -> None:
        """Start the heartbeat; in its thread `meet` waits for the other processes, and returns the store."""
        faulthandler.enable(2, all_threads=False)  # a crash shows its line of Python
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        threading.Thread(target=self._live, args=(meet,), daemon=True, name="heartbeat").start()

    def stop(self) -> None:
        """End the heartbeat; called before the process ends in good order, or once it has told why it fails."""
        self.stopped.set()
        self._tell_watchdog("told")

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that something else begins."""
        if step is not None:
            self._step = step
        self.place = f"step {self._step}, {name}" if self._step else name
        self.phases += 1
        self._tell_watchdog(self.place)  # at once: a crash leaves no time for it
        self.moved = monotonic()
        self._spent[self._part] += self.moved - self._began
        self._part = "first step" if self._step else PARTS.get(name, name)
        self._began = self.moved

    def start_line(self) -> str:
        """Return a line with the seconds of each part of the start, from the command to the end of the first step."""
        self._spent[self._part] += monotonic() - self._began
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())
        return f"start: {sum(self._spent.values()):.1f} s to the end of the first step: {parts}"

    def pause(self) -> None:
        """Watch nothing until the next phase: what this process does now is no part of the run."""
        self.place, self.moved = "", inf
        self._tell_watchdog("")

    def renew(self) -> None:
        """Note progress within a phase."""
        self.moved = max(self.moved, monotonic())  # infinite while the watch is paused

    def name_lost_rank(self, error: BaseException) -> None:
        """Let the heartbeat name the rank that is gone and end the process, if that explains a failed collective."""
        if breaks_off(error) and self._store:
            self._hurried = SILENT_SECONDS
            # if a rank is gone, the heartbeat ends this process meanwhile
            sleep(3 * SILENT_SECONDS)

    def ask_to_stop(self, *_: object) -> None:
        """Have all ranks finish the running step, save and stop; this is also the handler of the STOPPING signals."""
        self.stop_wanted = True
        for number in (1, 2):
            try:
                os.write(number, b"")
            except OSError:
                # the terminal is gone: the next line printed there would end the run before it has saved
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM, SIGINT and SIGHUP ask the run to stop; a second SIGINT ends the process, even a stuck one.

        Handlers run in the main thread, which may be stuck in a collective. So the signals' numbers also go into a pipe
        that the heartbeat reads. Under nohup SIGHUP stays ignored.
        """
        handler = self.ask_to_stop
        masks = list[set[int]]()
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

        # A child process, such as a reward function's, has the usual handlers from its first moment on, and its signals
        # do not reach our pipe: until the handlers are given back, its signals are blocked.
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
            # this process may meanwhile tell a reason of its own, for which the others may have ended too
            while not self.stopped.wait(SILENT_SECONDS):
                if self.moved < inf:
                    # two processes of a node say it, because the first may be the one that has not come
                    if environment.local_rank() < 2:
                        failure.say(f"error: {error}")
                    self._leave(1)
            return
        if store:
            # the heartbeat has its own connection: the common one may be blocked in a wait
            self._store, self._answered = store.clone(), monotonic()
        self.meeting.set_result(store)
        if environment.rank() == 0:
            self._start_watchdog()
        launchers = _launchers()
        exchange = None
        while not self.stopped.is_set():
            beat = self._beat()
            # in the background, because a store that is gone never answers
            if store and (exchange is None or exchange.done()):
                exchange = in_background(partial(self._exchange, beat))
            self._judge(beat)
            self._tell_watchdog(self.place)
            if launchers != _launchers():
                self.ask_to_stop()
            if select([self._signals], [], [], BEAT_SECONDS)[0]:
                self._hear(os.read(self._signals, 64))
        os.close(self._signals)
        os.close(self._wake)
        if self._watchdog:
            self._tell_watchdog("told")  # by `stop` too, unless this watchdog has just started
            self._watchdog.close()
        # `signals` has made the process keep this watch to its end, which would keep the store's connections open
        self._store = self.meeting = None

    def _beat(self) -> Beat:
        """Find out how far this process has come."""
        before = (self._collectives, self._bytes)
        last = self._beat_at
        self._beat_at = now = monotonic()
        with suppress(RuntimeError):
            self._collectives = collectives_begun()
        with suppress(psutil.Error, OSError):
            io = psutil.Process().io_counters()
            # read_bytes counts what is read through memory maps
            self._bytes = io.read_chars + io.write_chars + io.read_bytes
        # a process that was frozen itself must first hear from the others again before it judges them
        frozen = now - last > SILENT_SECONDS
        moved = self._collectives != before[0] or self._bytes > before[1] + BYTES_OF_PROGRESS
        if frozen or moved:
            self.renew()
        idle = now - self.moved
        rank = environment.rank()
        return Beat(self.phases, self._collectives, idle, rank, NODE, self.place, now)

    def _exchange(self, own_beat: Beat) -> None:
        """Write a beat, read those of other ranks, and end this process if one has told why the run ends."""
        hurried = self._hurried < inf
        store = self._store
        # rank 0 listens to all ranks, the others to rank 0 alone until an error or a signal hurries them
        others = range(environment.world_size() if hurried or own_beat.rank == 0 else 1)

        def read(key: str, default: str = "") -> str:
            return store.get(key).decode() if store.check([key]) else default

        try:
            store.set(f"ulysses/alive/{own_beat.rank}", json.dumps(own_beat[:-1]))
            # a rank may have met the others and not have beaten yet
            texts = [
                read(f"ulysses/alive/{r}", json.dumps([-1, 0, 0.0, r, "its node", "its start"]))
                for r in (others if hurried or own_beat.idle > 2 * BEAT_SECONDS else ())
            ]
            # a beat that was there before keeps the time at which it was first read
            before = self._beats
            now = monotonic()
            self._beats = {
                text: before.get(text) or Beat(*json.loads(text), now) for text in texts
            }
            _, _, reason = read(REASON).partition(" ")
            self._answered, self._broken = monotonic(), False
        except Exception:
            self._broken = True
            return
        if reason:
            failure.record(reason)
            sleep(BEAT_SECONDS)  # until the other processes have read the reason too
            self._leave(1)

    def _judge(self, own_beat: Beat) -> None:
        """Warn of a run that does not move, and end it.

        Rank 0 ends it if it knows of no process that moves. Any process ends it if it does not move itself and no
        longer hears another one.
        """
        now = monotonic()
        beats = self._beats.values()
        agent = environment.agent_holds_store()
        idle = now - max([self.moved, *(beat.moved for beat in beats)])
        # without the store no beats come
        silence = now - min([self._answered, *(beat.read for beat in beats)])
        patience = min(self.timeout, self._hurried)
        if self._broken and not agent:
            patience = SILENT_SECONDS
        all_wait = own_beat.rank == 0 and idle > self.timeout
        if all_wait or min(now - self.moved, silence) > patience:
            store = self._store if now - self._answered < SILENT_SECONDS else None
            # Without the store one process of each node speaks: the first or, on the node where rank 0 holds the store
            # and is the one that is gone, the second.
            beside_store = self._answered < inf and own_beat.rank == environment.local_rank()
            speaker = 1 if beside_store and not agent else 0
            alone = environment.local_rank() == speaker
            tell(store, f"error: {self._sentence(own_beat)}; {ADVICE}", alone=alone)
            self._leave(1)
        if idle > self.warning > 0 and self._warned_phase != self.phases and own_beat.rank == 0:
            self._warned_phase = self.phases
            failure.say_below(f"warning: {self._sentence(own_beat)}")

    def _sentence(self, own_beat: Beat) -> str:
        """Name the victim, its node, where it was and how long ago, and where this process is."""
        now = monotonic()
        unheard = monotonic() - self._answered
        # told too because the victim's last beat may be a second older than its end
        beside = f"; rank {own_beat.rank} on {NODE} was at {self.place}"
        if unheard > SILENT_SECONDS:
            holder = "torchrun" if environment.agent_holds_store() else "rank 0"
            state = "is gone" if self._broken else "or its network does not answer"
            return f"{holder} at {environment.store_address()} {state}, {unheard:.0f} s ago{beside}"
        beats = [*self._beats.values()] or [own_beat]
        silent = [beat for beat in beats if now - beat.read > SILENT_SECONDS]
        victim = min(silent or beats, key=lambda b: (b.phases, b.collectives, b.moved))
        if silent:
            state = GONE
        elif self._beats:
            state = "its process is alive, and the others wait for it"
        else:
            state = "its process is alive, and waits"
        return (
            f"rank {victim.rank} on {victim.node} has not moved since {victim.place}, {now - victim.moved:.0f} s ago: "
            f"{state}{'' if victim.rank == own_beat.rank else beside}"
        )

    def _start_watchdog(self) -> None:
        """Start the process (watchdog.py) that tells what rank 0 cannot."""
        world = environment.world_size()
        patience = max(self.timeout, SILENT_SECONDS)
        launcher = os.getppid() if world > 1 or environment.launchers() else os.getpid()
        # where there are other processes, they tell it first, unless their interpreters are held too
        if world > 1:
            patience += 2 * SILENT_SECONDS
        watchdog = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("watchdog.py"),
             *map(str, (launcher, patience, world, f"rank 0 on {NODE}"))],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,  # a launcher ends the sessions of its processes
        )  # fmt: skip
        os.set_blocking(watchdog.stdin.fileno(), False)  # the run never waits for its watchdog
        self._watchdog = watchdog.stdin

    def _tell_watchdog(self, line: str) -> None:
        if self._watchdog:
            with suppress(OSError, ValueError):  # the heartbeat may have closed it
                self._watchdog.write(f"{line}\n".encode())

    def _hear(self, numbers: bytes) -> None:
        """Act on the signals with these numbers: stop after the step, or leave at the second SIGINT."""
        if not {*STOPPING} & {*numbers}:
            return  # others come too, such as SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted_at > ONE_INTERRUPT:
                self._leave(128 + signal.SIGINT)
            self._interrupted_at = min(self._interrupted_at, monotonic())
        self.ask_to_stop()  # the main thread may be stuck
        self._hurried = min(self._hurried, 2 * SILENT_SECONDS)
        if environment.rank() == 0:
            failure.say_below("asked to stop: the run saves after this step")

    def _leave(self, code: int) -> None:
        """End this process at once; the reason has been told."""
        self.stop()
        os._exit(code)


def _launchers() -> tuple[int, ...]:
    """Return the launcher's processes above this one: none, torchrun's one, or deepspeed's two."""
    with suppress(psutil.Error):  # the launcher ends at this moment
        above = os.getppid(), psutil.Process(os.getppid()).ppid()
        return above[: environment.launchers()]
    return ()


def grace_note(seconds: float) -> str:
    """Return how to give a run more time to save, if a step takes so long that its launcher may kill it; else ""."""
    grace = environment.grace_seconds()
    if seconds < grace / 2:
        return ""
    return (
        f"a step takes {seconds:.0f} s, but launchers kill a run {grace:.0f} s after they ask it to stop, which may be "
        f"before it has saved; set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={4 * seconds:.0f} for torchrun and KillWait for "
        "Slurm (deepspeed has no such setting), or rely on run.save_minutes"
    )


# ---------------------------------------------------------------- errors


def report_failure(error: BaseException, *, debug: bool) -> None:
    """Print an error with its rank and its notes on stderr, unless another process of the run was the first to fail.

    A stack trace comes with errors that may be our own: not with non-finite numbers, a disk's failures, or those of the
    user's code and servers. With `debug` every process prints its own trace.
    """
    reason = str(error) or "no reason is given"
    trace = ""
    if not str(error) and isinstance(error, MemoryError):
        reason += "; has this process no memory left?"
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, FloatingPointError | DiskError | UserCodeError):
        reason = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, reason])
        # an exception such as KeyboardInterrupt comes from outside, and need not come again
        if not isinstance(error, Exception):
            reason += f"; {ADVICE}"
        trace = "" if debug else "".join([*traceback.format_exception(error), "\n"])
    reason = SECRETS.sub("***", f"{trace}error: rank {environment.rank()}, {reason}")
    store = common_store()
    if store is None:
        failure.say(reason)
    else:
        # If the store does not answer, perhaps no process has told why the run ends. One that only cannot reach another
        # process keeps silent all the same: it is not the first to fail.
        tell(store, reason, alone=not breaks_off(error))


def tell(store: dist.Store | None, reason: str, *, alone: bool) -> None:
    """Print why the run ends, unless another process has printed its reason, and let all processes end.

    Args:
        store: of all processes; None if it does not answer.
        alone: this process prints the reason where the store does not answer.
    """
    ours = f"{environment.rank()} {reason}"
    first = ""
    with suppress(Exception):
        answer = in_background(lambda: store.compare_set(REASON, "", ours))
        first = answer.result(STORE_SECONDS).decode()
    if first not in ("", ours):
        failure.record(first.partition(" ")[2])
    elif first or alone:
        failure.say(reason)
        # so that the others leave before their connections to this process break noisily
        sleep(2.5 * BEAT_SECONDS)


def breaks_off(error: BaseException) -> bool:
    """Whether an error only says that another process does not answer."""
    said = str(error)
    return isinstance(error, dist.DistError) or "gloo" in said or "pair closure" in said


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Begin work that may never end, such as a question to a store that is gone, in a thread that holds up no exit."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
