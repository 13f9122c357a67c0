"""Say what a process could not: `python witness.py LAUNCHER SECONDS SENTENCE`, started by watch.py.

Standard input ends with the process that started this one. Unless that wrote a word before, the sentence is printed as
soon as the launcher has ended, so that it stands below the launcher's report. Imports nothing heavy: the witness lasts
as long as the run.
"""

import os
import select
import sys
from contextlib import suppress

if __name__ == "__main__":
    launcher, seconds, sentence = sys.argv[1:]
    with suppress(OSError, AttributeError):  # an old kernel
        ended = os.pidfd_open(int(launcher))
        if not sys.stdin.read(1) and select.select([ended], [], [], float(seconds))[0]:
            print(f"\n{sentence}", file=sys.stderr, flush=True)
