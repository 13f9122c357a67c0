"""Stop a chat template that does not end: a bound on what it writes and on the time that it takes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ulysses.data import BadRowError

RENDER_SECONDS = 60.0  # the sandbox of jinja2 bounds one loop, but not loops in loops
RENDER_CHARACTERS = 1 << 30


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raise BadRowError in the block whenever RENDER_SECONDS have passed; render one row, or a few thousand, in it.

    It works in the main thread of any process, worker processes included, and does nothing in other threads.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS, RENDER_SECONDS)
    try:
        yield
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def join_bounded(parts: Iterator[str]) -> str:
    """Return the parts as one text; BadRowError if it is longer than RENDER_CHARACTERS."""
    texts, size = [], 0
    for part in parts:
        texts.append(part)
        size += len(part)
        if size > RENDER_CHARACTERS:
            _stop()
    return "".join(texts)


def _stop(*_: Any) -> None:
    raise BadRowError(
        f"runs the chat template without end: it was stopped after {RENDER_SECONDS:g} s or {RENDER_CHARACTERS:,} "
        "characters; mend its loops"
    )
