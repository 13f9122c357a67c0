"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread         phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    heartbeat thread    meets the other processes; says once a second how far this one has come (heartbeat.py), warns
                        after run.stall_warning, ends the process after run.timeout, and hears signals even if the main
                        thread is stuck
    watchdog            a process of its own beside rank 0 (watchdog.py), for what no thread can tell: code that holds
                        the interpreter, and an end without a word

Progress is a phase, a collective or a model's pass that begins, an answer, or bytes of files.
"""

import faulthandler
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
from math import inf
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import IO

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch.failure import BEAT_SECONDS, SILENT_SECONDS, breaks_off, say, say_below
from ulysses.watch.heartbeat import Heartbeats

# They ask a run to stop.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
ONE_SIGNAL = 0.5  # seconds within which a terminal and a launcher send the same one


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
        hurried: seconds of silence that count, if they are fewer than the timeout.
        stopped: is set when nobody need watch any more.
    """

    warning: float = 60.0
    timeout: float = 600.0
    imports: float = 0.0

    def __post_init__(self) -> None:
        self.stop_wanted, self.hurried, self.stopped = False, inf, threading.Event()
        self._step, self.place, self.phases, self.moved = 0, "start", 0, monotonic()
        self._spent = defaultdict(
            float, imports=self.imports
        )  # seconds of each part of the start
        self._part, self._began = "start", self.moved  # the one that goes on, and since when
        self._interrupted = inf  # when the first SIGINT came
        self._store = Future[dist.Store | None]()
        self._watchdog: IO[bytes] | None = None  # its input, once all processes have met

    # ---------------------------------------------------------------- the main thread

    def start(self, meet: Callable[[], dist.Store | None]) -> None:
        """Start the heartbeat; `meet`, which returns the store, waits in its thread for the other processes."""
        faulthandler.enable(2, all_threads=False)  # code that crashes shows its line
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        threading.Thread(target=self._live, args=(meet,), daemon=True, name="heartbeat").start()

    def wait_for_store(self) -> dist.Store | None:
        """Return the store of all processes, once they have met; None for one process."""
        return self._store.result()

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
        self.moved = inf
        self._tell_watchdog("")

    def renew(self) -> None:
        """Note progress within a phase."""
        self.moved = max(self.moved, monotonic())

    def report_failure(self, error: BaseException) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        if breaks_off(error) and environment.world_size() > 1:
            self.hurried = SILENT_SECONDS
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
                        say(f"error: {error}")
                    self.leave(1)
            return
        heartbeats = Heartbeats(self, store and store.clone())
        if environment.rank() == 0:
            self._start_watchdog()
        self._store.set_result(store)
        launchers = _launchers()
        while not self.stopped.is_set():
            heartbeats.beat()
            heartbeats.judge()
            self._tell_watchdog(self.place if self.moved < inf else "")
            if launchers != _launchers():
                self.ask_to_stop()
            if select([self._signals], [], [], BEAT_SECONDS)[0]:
                self._heard(os.read(self._signals, 64))
        os.close(self._signals)
        os.close(self._wake)

    def _start_watchdog(self) -> None:
        """Start a process (watchdog.py) that tells what rank 0 cannot."""
        world, alone = environment.world_size(), not environment.launchers()
        launcher = os.getpid() if alone and world == 1 else os.getppid()
        # the other processes, unless they are held too, tell it first
        patience = max(self.timeout, SILENT_SECONDS) + (2 * SILENT_SECONDS if world > 1 else 0)
        given = map(str, (launcher, patience, world, f"rank 0 on {NODE}"))
        # a launcher ends the sessions of its processes
        watchdog = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("watchdog.py"), *given],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.set_blocking(watchdog.stdin.fileno(), False)  # nobody waits for it
        self._watchdog = watchdog.stdin

    def _tell_watchdog(self, line: str) -> None:
        if self._watchdog:
            with suppress(OSError):
                self._watchdog.write(f"{line}\n".encode())

    def _heard(self, numbers: bytes) -> None:
        """Act on signals; a second SIGINT comes later than the same one from a terminal and from a launcher."""
        if not {*STOPPING} & {*numbers}:
            return  # of those that others listen to: SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > ONE_SIGNAL:
                self.leave(128 + signal.SIGINT)
            self._interrupted = min(self._interrupted, monotonic())
        self.ask_to_stop()  # the main thread may be stuck
        self.hurried = min(self.hurried, 2 * SILENT_SECONDS)
        if environment.rank() == 0:
            say_below("asked to stop: the run saves after this step")

    def leave(self, code: int) -> None:
        """End this process at once; the reason has been told."""
        self.stop()
        os._exit(code)


def _launchers() -> tuple[int, ...]:
    """Return the process that started this one, if it is a launcher; deepspeed's has another one in front of it."""
    with suppress(psutil.Error):  # it ends at this moment
        found = os.getppid(), psutil.Process(os.getppid()).ppid()
        return found[: environment.launchers()]
    return ()
