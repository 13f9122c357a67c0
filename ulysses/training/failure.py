"""One error anywhere ends every process, and is printed once.

    a configuration error    every process finds the same one; the first process of each node prints it: exit code 2
    any other error          the first process to fail claims it in the processes' common store, prints it and says so
                             there; a thread in every other process sees that, or the store gone, and ends its
                             process, also out of a collective that would never end: exit code 1

A launcher ends all its processes as soon as one has left. So nobody leaves before the error is printed.
"""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CLAIMS, PRINTED = "ulysses/errors claimed", "ulysses/error printed"
POLL_SECONDS = 0.5
PATIENCE = timedelta(seconds=10)  # with the process that prints
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")  # set by torchrun and by deepspeed's launcher
LAUNCHER_SECONDS = 60.0  # by which one process may start later than another


class FailureWatch:
    """End this process when another one has failed; every process of a run keeps one open while it trains."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        store = _store()
        if (
            store is not None
        ):  # the thread's own connection: the common one may be blocked in a wait
            poll = threading.Thread(target=self._poll, args=(store.clone(),), daemon=True)
            poll.name = "failure watch"
            poll.start()

    def _poll(self, store: Any) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                failed = store.check([PRINTED])
            except Exception:  # the process that holds the store is gone
                failed = not self._closed.is_set()
            if failed:
                os._exit(1)

    def close(self) -> None:
        """Stop watching; call it before the processes part in good order."""
        self._closed.set()


class StepError(RuntimeError):
    """An error inside the loop, with the step (counted from 1) at which it happened."""

    def __init__(self, step: int, error: Exception) -> None:
        named = str(error).startswith(f"step {step}: ")
        super().__init__(str(error) if named else f"step {step}: {type(error).__name__}: {error}")


def tell(error: Exception, *, debug: bool) -> None:
    """Print an error with rank and step on stderr, unless another process of the run was the first to fail.

    A stack trace comes with it on request, and for every error but non-finite numbers, which are no programming error.
    """
    store = _store()
    first = _claim(store)
    if first or debug:
        cause = error.__cause__ if isinstance(error, StepError) and error.__cause__ else error
        if debug or not isinstance(cause, FloatingPointError):
            traceback.print_exception(cause)
        text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        print(f"error: rank {os.environ.get('RANK', '0')}, {text}", file=sys.stderr, flush=True)
    if store is None:
        return
    with suppress(
        Exception
    ):  # the process that holds the store is gone, or the first one could not print
        store.set(PRINTED, "") if first else store.wait([PRINTED], PATIENCE)
    if first:  # the others leave before their connections to this process break noisily
        time.sleep(3 * POLL_SECONDS)


def complain(error: Exception, *, debug: bool) -> None:
    """Print a configuration error in one sentence, once on each node: another node may lack what the first one has."""
    rank, first = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        node = "" if rank == "0" else f" (node of rank {rank})"
        print(f"error{node}: {error}", file=sys.stderr, flush=True)
    if debug:
        traceback.print_exception(error)
    if not first and any(name in os.environ for name in LAUNCHERS):
        # The launcher ends this process as soon as the one that prints has left.
        time.sleep(LAUNCHER_SECONDS)


def _claim(store: Any) -> bool:
    """Return whether this process is the first to fail; without a common store every process is."""
    try:
        return store is None or store.add(CLAIMS, 1) == 1
    except Exception:  # the process that held the store is gone, so it has failed before
        return False


def _store() -> Any:
    several = dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_store() if several else None
