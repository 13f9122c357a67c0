"""Say why a process ends, to the user and to its launcher; a wrong setting is told before torch is imported."""

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
    """Write why this process ends where torchrun reads it: its report, which fills the screen, then ends with it."""
    if file := environment.error_file():
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": reason, "timestamp": int(time())}))


def report_config_error(error: Exception, *, debug: bool) -> None:
    """Print a configuration error in one sentence, once on each node: another node may lack what the first one has."""
    if debug:
        traceback.print_exception(error)
    if environment.local_rank() == 0:
        rank = environment.rank()
        node = f" (node of rank {rank})" if rank else ""
        say(f"error{node}: {error}")
    elif (
        environment.launchers()
    ):  # it ends this process as soon as the one that prints has left
        sleep(LAUNCHER_SECONDS)
