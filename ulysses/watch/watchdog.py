"""Tell what the first process cannot: `python watchdog.py LAUNCHER SECONDS PROCESSES NAME`, started by watch.py.

Standard input has a line a second: where that process is, nothing while it belongs to no run, or "told" at its end.

    no line for SECONDS     its interpreter is held; it is aborted, so that its own handler shows the line of Python
    it ends without "told"  unless another process of the launcher lives, which tells it, the sentence stands below the
                            launcher's report

Imports nothing heavy: it lasts as long as the run.
"""

import os
import signal
import sys
from contextlib import suppress
from select import select

import psutil

GRACE = 5.0  # seconds; the other processes need longer to notice an end


def lives(pid: int) -> bool:
    """Whether it works; a process that has ended is a zombie until its parent notices."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def is_stopped(pid: int) -> bool:
    """Whether Ctrl-Z or a debugger holds it."""
    stopped = psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP
    return psutil.Process(pid).status() in stopped


def main(launcher: int, seconds: float, processes: int, name: str) -> None:
    pid, place = os.getppid(), ""
    process, parent = os.pidfd_open(pid), os.pidfd_open(launcher)
    while True:
        ready = select([0, process], [], [], seconds)[0]
        if 0 in ready and (text := os.read(0, 1 << 16).decode()):
            *_, place = lines = text.splitlines()
            if "told" in lines:
                return
        elif ready or not is_stopped(pid):
            break
    if not place:
        return
    advice = "--run.resume auto continues the run"
    if not ready:
        signal.pidfd_send_signal(process, signal.SIGABRT)
        select([process], [], [], GRACE)
        why = f"has not moved since {place}, {seconds:.0f} s ago: code that the run calls holds its interpreter"
    else:
        why = (
            f"has ended at {place}, without a word: code that the run calls, such as a reward function, has ended or "
            "crashed the process, or it was killed"
        )
        over = select([parent], [], [], GRACE)[0]
        if not over and processes > 1:
            if any(lives(child.pid) for child in psutil.Process(launcher).children()):
                return
            select([parent], [], [])
    print(f"\nerror: {name} {why}; {advice}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with suppress(
        OSError, AttributeError, psutil.Error
    ):  # an old kernel; a process that ends at this moment
        main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
