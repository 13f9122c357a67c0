"""How an error is printed once, and handed to the launcher. It is imported before torch.

    a configuration error    every process finds the same one, as a rule; the first process of each node prints it,
                             before torch is imported if it can: exit code 2
    any other error          `report_failure` of watch.py: exit code 1

A launcher ends all its processes as soon as one of them has left. So no process leaves before the error is printed.
"""

import json
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from time import sleep, time

from ulysses import environment

LAUNCHER_SECONDS = 60.0  # by which one process may start later than another


def say(reason: str) -> None:
    """Print why this process ends on stderr, and hand it to the launcher."""
    say_below(reason)
    record(reason)


def say_below(sentence: str) -> None:
    """Print a sentence on stderr, on a line of its own: a progress bar may stand on the last one, of any rank."""
    print(f"\n{sentence}", file=sys.stderr, flush=True)


def record(reason: str) -> None:
    """Write why this process ends into torchrun's error file: its report, which fills the screen, ends with that."""
    if file := environment.error_file():
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": reason, "timestamp": int(time())}))


def report_config_error(error: Exception, *, debug: bool) -> None:
    """Print a configuration error in one sentence, once on each node: another node may lack what the first one has."""
    if debug:
        traceback.print_exception(error)
    if environment.local_rank():
        if not environment.launchers():
            return
        # the launcher ends this process as soon as the one that prints the error has left; if none has, only this
        # process found the error
        sleep(LAUNCHER_SECONDS)
    rank = environment.rank()
    node = f" (node of rank {rank})" if rank else ""
    say(f"error{node}: {error}")
