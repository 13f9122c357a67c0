"""Say what a process could not: `python witness.py LAUNCHER SECONDS SENTENCE`, started by watch.py.

Standard input ends with the process that started this one. Unless that wrote a word before, the sentence is printed as
soon as the launcher has ended, so that it stands below the launcher's report. If a process of the launcher still lives
after so many seconds, that one tells it. Imports nothing heavy: the witness lasts as long as the run.
"""

import os
import select
import sys
from contextlib import suppress


def has_processes(launcher: str) -> bool:
    """Whether a process lives that the launcher started; one that has ended is a zombie until it is noticed."""
    with suppress(OSError), open(f"/proc/{launcher}/task/{launcher}/children") as children:
        for child in children.read().split():
            with suppress(OSError), open(f"/proc/{child}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] != "Z":
                    return True
    return False


if __name__ == "__main__":
    launcher, seconds, sentence = sys.argv[1:]
    with suppress(OSError, AttributeError):  # an old kernel
        ended = os.pidfd_open(int(launcher))
        if not sys.stdin.read(1):
            if not select.select([ended], [], [], float(seconds))[0] and has_processes(
                launcher
            ):
                sys.exit()
            select.select([ended], [], [])
            print(f"\n{sentence}", file=sys.stderr, flush=True)
