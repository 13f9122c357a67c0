"""Tell what the first process cannot: `python watchdog.py LAUNCHER SECONDS PROCESSES NAME`, started by watch.py.

Every second that process writes a line to our standard input: where it is, an empty line while it belongs to no run, or
"told" at its end.

    no line for SECONDS     its interpreter is held. It is aborted, so that its own handler shows the line of Python,
                            and we tell it, unless other processes have told it and ended
    it ends without "told"  unless another process of the launcher is left, which tells it, we do, below the launcher's
                            report

The watchdog imports nothing heavy, because it lasts as long as the run.
"""

import os
import signal
import sys
from contextlib import suppress
from select import select

import psutil

GRACE = 5.0  # seconds for a launcher or a process to end; other processes need longer to notice an end


def status(pid: int) -> str:
    """Return the system's word for a process's state; one that has ended is a zombie, or gone."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status()
    return psutil.STATUS_ZOMBIE


def others_live(launcher: int, process: int) -> bool:
    """Return whether the launcher has other processes; those that have told why the run ends are gone."""
    others = {child.pid for child in psutil.Process(launcher).children()} - {process}
    return not {*map(status, others)} <= {psutil.STATUS_ZOMBIE}


def main(launcher: int, seconds: float, processes: int, name: str) -> None:
    process = os.getppid()
    place = ""
    ended, over = os.pidfd_open(process), os.pidfd_open(launcher)
    while True:
        ready = select([0, ended], [], [], seconds)[0]
        if 0 in ready and (lines := os.read(0, 1 << 16).decode().splitlines()):
            place = lines[-1]
            if "told" in lines:
                return
        # a process that Ctrl-Z has stopped has no fault
        elif ready or status(process) != psutil.STATUS_STOPPED:
            break
    if not place:
        return
    if ready:
        why = (
            f"has ended at {place}, without a word: code that the run calls, such as a reward function, has ended or "
            "crashed the process, or it was killed"
        )
        if processes > 1:
            why += ", perhaps by the launcher because another process had ended"
        if not select([over], [], [], GRACE)[0] and processes > 1:
            if others_live(launcher, process):
                return
            select([over], [], [])
    else:
        why = f"has not moved since {place}, {seconds:.0f} s ago: code that the run calls holds its interpreter"
        told = processes > 1 and not others_live(launcher, process)
        signal.pidfd_send_signal(ended, signal.SIGABRT)
        select([ended], [], [], GRACE)
        if told:
            return
    advice = "--run.resume auto continues the run"
    print(f"\nerror: {name} {why}; {advice}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    launcher, seconds, processes, name = sys.argv[1:]
    # an old kernel has no pidfd, and the launcher may end at this moment
    with suppress(OSError, AttributeError, psutil.Error):
        main(int(launcher), float(seconds), int(processes), name)
