"""Every process shows that it is alive and how far it has come; one that stops is named, and the run ends.

    main thread     phase("forward"), renew(): plain attributes, so that the loop pays for nothing
    clerk thread    meets the other processes and exchanges beats with them (correspondence.py); ends the process when
                    another one has told the reason
    watch thread    warns after run.stall_warning and ends the process after run.timeout; it never waits for the store,
                    because the store may be what is gone, and hears signals even if the main thread is stuck
    witness         a process of its own (witness.py), which speaks if rank 0 ends without a word

Progress is a phase or a collective that begins, an answer, or bytes of files. A process that is alone has nobody to
wait for, and hears signals only.
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
from typing import IO, TYPE_CHECKING

import psutil
import torch.distributed as dist

from ulysses import environment
from ulysses.environment import NODE
from ulysses.watch.failure import BEAT_SECONDS, SILENT_SECONDS, breaks_off, say, say_below

if TYPE_CHECKING:
    from ulysses.watch.correspondence import Correspondence

# They ask a run to stop.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
PARTS = {"tokenising": "data", "building the model": "weights"}  # in the account of the start
POLL_SECONDS = 0.5  # of the watch


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
        self._peers: Correspondence | None = None  # with the others, once all have met
        self._interrupted = inf  # when the first SIGINT came
        self._store = Future[dist.Store | None]()
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
        if environment.rank():
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
        self.stopped.set()
        if self._witness:
            with suppress(OSError):
                self._witness.write(b"told")

    def phase(self, name: str, step: int | None = None) -> None:
        """Note that something else begins."""
        self._step = self._step if step is None else step
        self.place = f"step {self._step}, {name}" if self._step else name
        self.phases += 1
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

    def renew(self) -> None:
        """Note progress within a phase."""
        self.moved = max(self.moved, monotonic())

    def report_failure(self, error: BaseException) -> None:
        """End the process in the name of the rank that is gone, if that explains an error of communication."""
        if breaks_off(error) and self._peers:
            self.hurried = SILENT_SECONDS
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
            while not self.stopped.wait(SILENT_SECONDS):
                if self.moved < inf:
                    # the first one of a node may be who has not come
                    if environment.local_rank() < 2:
                        say(f"error: {error}")
                    self.leave(1)
            return
        if store is not None:
            from ulysses.watch.correspondence import Correspondence

            # a connection of its own: the common one may be blocked in a wait
            self._peers = Correspondence(self, store.clone())
        self._store.set_result(store)
        if self._peers:
            self._peers.keep_up()

    # ---------------------------------------------------------------- the watch thread

    def _look_after(self) -> None:
        launchers = _launchers()
        while not self.stopped.is_set():
            if select([self._signals], [], [], POLL_SECONDS)[0]:
                self._heard(os.read(self._signals, 64))
            if launchers != _launchers():
                self.ask_to_stop()
            if self._peers:
                self._peers.judge()
        os.close(self._signals)
        os.close(self._wake)

    def _heard(self, numbers: bytes) -> None:
        """Act on signals; a second SIGINT comes later than the same one from a terminal and from a launcher."""
        if not {*STOPPING} & {*numbers}:
            return  # of those that others listen to: SIGCHLD, once torch's DataLoader has had workers
        if signal.SIGINT in numbers:
            if monotonic() - self._interrupted > POLL_SECONDS:
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
