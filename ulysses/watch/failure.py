"""One error anywhere ends every process, and is printed once.

    a configuration error    every process finds the same one; the first process of each node prints it, before torch is
                             imported if it can: exit code 2
    any other error          the first process that fails prints it and writes it into the store; the watch (watch.py)
                             ends the others, also out of a collective that would never end: exit code 1

A launcher ends all its processes as soon as one of them has left. So no process leaves before the error is printed.
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
from ulysses.config.section import SECRETS, UserCodeError

if TYPE_CHECKING:
    from torch.distributed import Store

REASON = "ulysses/reason"  # the key in the store under which stands why the run ends
BEAT_SECONDS = 1.0  # between two beats
# A process that gives no beat for so long, while others wait for it, is gone or stopped.
SILENT_SECONDS = 6.0
STORE_SECONDS = 10.0  # for an answer of the store
LAUNCHER_SECONDS = 60.0  # by which one process may start later than another
ADVICE = "--run.resume auto continues the run"


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Begin work that may never end, such as a question to a store that is gone, in a thread that holds up no exit."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    return result


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


def tell(store: "Store | None", reason: str, *, alone: bool) -> None:
    """Print why the run ends, unless another process has printed its reason, and let all processes end.

    Args:
        store: of all processes; None if it does not answer.
        alone: this process prints the reason where the store does not answer.
    """
    ours, first = f"{environment.rank()} {reason}", ""
    with suppress(Exception):
        answer = in_background(lambda: store.compare_set(REASON, "", ours))
        first = answer.result(STORE_SECONDS).decode()
    if first not in ("", ours):
        record(first.partition(" ")[2])
    elif first or alone:
        say(reason)
        # so that the others leave before their connections to this process break noisily
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
        # the launcher ends this process as soon as the one that prints the error has left
        sleep(LAUNCHER_SECONDS)


def report_failure(error: BaseException, *, debug: bool) -> None:
    """Print an error with its rank and its notes on stderr, unless another process of the run was the first to fail.

    A stack trace comes with errors that may be our own: not with non-finite numbers, a disk's failures, or those of the
    user's code and servers. With `debug` every process prints its own trace.
    """
    from ulysses.disk import DiskError
    from ulysses.zero.construct import common_store

    memory = "; has this process no memory left?" * isinstance(error, MemoryError)
    reason, trace = str(error) or f"no reason is given{memory}", ""
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, FloatingPointError | DiskError | UserCodeError):
        reason = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, reason])
        # an exception such as KeyboardInterrupt comes from outside, and need not come again
        reason += f"; {ADVICE}" * (not isinstance(error, Exception))
        trace = "" if debug else "".join([*traceback.format_exception(error), "\n"])
    reason = SECRETS.sub("***", f"{trace}error: rank {environment.rank()}, {reason}")
    store = common_store()
    if store is None:
        say(reason)
    else:
        # If the store does not answer, perhaps no process has told why the run ends. One that only cannot reach another
        # process keeps silent all the same: it is not the first to fail.
        tell(store, reason, alone=not breaks_off(error))


def breaks_off(error: BaseException) -> bool:
    """Whether an error only says that another process does not answer."""
    from torch.distributed import DistError

    said = str(error)
    return isinstance(error, DistError) or "gloo" in said or "pair closure" in said
