"""Stop a chat template that does not end: a bound on what it writes, on its memory and on the time that it takes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from ulysses.data import BadRowError

RENDER_SECONDS = 60.0  # the sandbox of jinja2 bounds one loop, but not loops in loops
RENDER_CHARACTERS = 1 << 30
TRIAL_SECONDS, TRIAL_BYTES = 20.0, 1 << 30  # for a few rows, and of memory


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raise BadRowError in the block whenever RENDER_SECONDS have passed; render one row, or a few thousand, in it.

    It works in the main thread of any process, worker processes included, and does nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, too_much)
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ends(job: Callable[[], Any]) -> bool:
    """Call `job` in a forked process, and tell whether that ended without too much time, text and memory.

    No signal's handler and no other thread can stop one long operation. Other errors of the job are left to the
    caller, who calls it next.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)
            process = psutil.Process()
            most = process.memory_info().vms + TRIAL_BYTES
            process.rlimit(psutil.RLIMIT_AS, (most, most))
            job()
        except (MemoryError, BadRowError):
            os._exit(1)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def join_bounded(parts: Iterator[str]) -> str:
    """Return the parts as one text; BadRowError if it is longer than RENDER_CHARACTERS."""
    texts, size = [], 0
    for part in parts:
        texts.append(part)
        size += len(part)
        if size > RENDER_CHARACTERS:
            too_much()
    return "".join(texts)


def too_much(*_: Any) -> None:
    """Raise BadRowError: the template did not end."""
    raise BadRowError(
        "runs the chat template without end: it was stopped after too much time, text or memory; mend its loops"
    )
