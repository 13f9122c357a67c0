"""Say what a process could not: `python witness.py LAUNCHER SECONDS SENTENCE`, started by watch.py.

Standard input ends with the process that started this one. Unless that wrote a word before, the sentence is printed as
soon as the launcher has ended, so that it stands below the launcher's report. If a process of the launcher still lives
after so many seconds, that one tells it. Imports nothing heavy: the witness lasts as long as the run.
"""

import os
import sys
from contextlib import suppress
from select import select


def has_processes(launcher: int) -> bool:
    """Whether a process lives that the launcher started; one that has ended is a zombie until it is noticed."""
    import psutil

    with suppress(psutil.Error):
        children = psutil.Process(launcher).children()
        return any(child.status() != psutil.STATUS_ZOMBIE for child in children)
    return False


if __name__ == "__main__":
    launcher, seconds, sentence = sys.argv[1:]
    with suppress(OSError, AttributeError):  # an old kernel
        ended = [os.pidfd_open(int(launcher))]
        told = sys.stdin.read(1)
        if not told and not select(ended, [], [], float(seconds))[0]:
            told = has_processes(int(launcher))
        if not told:
            select(ended, [], [])
            print(f"\n{sentence}", file=sys.stderr, flush=True)
