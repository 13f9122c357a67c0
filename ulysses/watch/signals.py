"""Signals that ask a run to stop: SIGTERM, SIGINT and SIGHUP, which its child processes do not take for their own."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@contextmanager
def stop_signals(handler: Callable[..., None], wake: int) -> Iterator[None]:
    """Call the handler for signals that ask to stop, and write their numbers into a pipe; nohup's SIGHUP stays ignored.

    The numbers arrive even while the main thread, in which handlers run, is stuck in a collective.
    """
    before = {
        number: signal.signal(number, handler)
        for number in STOPPING
        if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
    }
    descriptor = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
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
