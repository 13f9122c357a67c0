"""One error anywhere ends every process, and is printed once.

    a configuration error    every process finds the same one; the first process of each node prints it, before torch is
                             imported if it can: exit code 2
    any other error          the process that is the first to fail prints it and tells the others (watch.py);
                             the watch (watch.py) ends them, also out of a collective that would never end: exit code 1

A launcher ends all its processes as soon as one has left. So nobody leaves before the error is printed.
"""

import json
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep, time
from typing import TYPE_CHECKING, Any

from ulysses import environment

if TYPE_CHECKING:
    from torch.distributed import Store

REASON = "ulysses/reason"  # in the store (watch.py)
BEAT_SECONDS = 1.0  # between two looks at the store
# So long without a beat, while others wait for a process, means that it is gone or stopped.
SILENT_SECONDS = 6.0
PATIENCE = 10.0  # seconds, with a question to it
LAUNCHER_SECONDS = 60.0  # by which one process may start later than another
ADVICE = "--run.resume auto continues the run"


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Begin work that may never end, such as a question to a store that is gone; it keeps no process from its end."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except Exception as error:
            found.set_exception(error)

    Thread(target=run, daemon=True).start()
    return found


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


def tell(store: "Store | None", reason: str, *, alone: bool) -> None:
    """Print why the run ends unless another process does, and let all processes end.

    Args:
        store: of all processes; None if it does not answer.
        alone: this process prints it where the store does not answer.
    """
    own, told = f"{environment.rank()} {reason}", ""
    with suppress(Exception):
        asked = in_background(lambda: store.compare_set(REASON, "", own))
        told = asked.result(PATIENCE).decode()
    if told not in ("", own):
        record(told.partition(" ")[2])
    elif told or alone:
        say(reason)
        # the others leave before their connections to this process break noisily
        sleep(2.5 * BEAT_SECONDS)


def report_config_error(error: Exception, *, debug: bool) -> None:
    """Print a configuration error in one sentence, once on each node: another node may lack what the first one has."""
    if debug:
        traceback.print_exception(error)
    if environment.local_rank() == 0:
        rank = environment.rank()
        node = f" (node of rank {rank})" if rank else ""
        say(f"error{node}: {error}")
    elif environment.launchers():
        # which ends this process as soon as the one that prints has left
        sleep(LAUNCHER_SECONDS)


def report_failure(error: BaseException, *, debug: bool) -> None:
    """Print an error with its rank and its notes on stderr, unless another process of the run was the first to fail.

    A stack trace comes with it for every error but non-finite numbers and failures of a disk or of the user's code
    and servers, which are no programming errors of ours; on request every process prints its own.
    """
    from ulysses.config.section import SECRETS, UserCodeError
    from ulysses.disk import DiskError
    from ulysses.zero.construct import common_store

    memory = "; has this process no memory left?" * isinstance(error, MemoryError)
    reason, trace = str(error) or f"no reason is given{memory}", ""
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, FloatingPointError | DiskError | UserCodeError):
        reason = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, reason])
        # what no code expects may come from outside, and not again
        reason += f"; {ADVICE}" * (not isinstance(error, Exception))
        trace = "" if debug else "".join([*traceback.format_exception(error), "\n"])
    reason = SECRETS.sub("***", f"{trace}error: rank {environment.rank()}, {reason}")
    store = common_store()
    if store is None:
        say(reason)
    else:
        # without an answer nobody may have told anything, but who cannot reach another process is not the first to fail
        tell(store, reason, alone=not breaks_off(error))


def breaks_off(error: BaseException) -> bool:
    """Whether an error only says that another process does not answer."""
    from torch.distributed import DistError

    said = str(error)
    return isinstance(error, DistError) or "gloo" in said or "pair closure" in said


def grace_note(seconds: float) -> str:
    """Return how to raise the launcher's patience if a step of so many seconds may outlast it, or an empty text."""
    grace = environment.grace_seconds()
    if seconds < grace / 2:
        return ""
    return (
        f"a step takes {seconds:.0f} s, but launchers kill a run {grace:.0f} s after they ask it to stop, which may be "
        f"before it has saved; set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={4 * seconds:.0f} for torchrun and KillWait for "
        "Slurm (deepspeed has no such setting), or rely on run.save_minutes"
    )
