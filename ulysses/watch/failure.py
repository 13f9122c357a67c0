"""One error anywhere ends every process, and is printed once.

    a configuration error    every process finds the same one; the first process of each node prints it: exit code 2
                             once now and again below the report of its launcher, which fills the screen
    any other error          the first process to fail claims it in the processes' common store, prints it and says so
                             there; the watch of every other process (watch.py) sees that and ends its process, also
                             out of a collective that would never end: exit code 1

A launcher ends all its processes as soon as one has left. So nobody leaves before the error is printed.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ulysses import environment
from ulysses.config.section import UserCodeError
from ulysses.disk import DiskError
from ulysses.zero.construct import common_store

CLAIMS, PRINTED = "ulysses/errors claimed", "ulysses/error printed"
POLL_SECONDS = 0.5  # of the watch
PATIENCE = 10.0  # seconds, with the process that prints
LAUNCHER_SECONDS = 60.0  # by which one process may start later than another


def report_failure(error: Exception, *, debug: bool) -> None:
    """Print an error with its rank and its notes on stderr, unless another process of the run was the first to fail.

    A stack trace comes with it on request, and for every error but non-finite numbers and failures of a disk or of
    the user's code and servers, which are no programming errors of ours.
    """
    store = common_store()
    place = 1 if store is None else within(PATIENCE, store.add, CLAIMS, 1)
    # without an answer nobody may have told anything, but who cannot reach another process is not the first to fail
    first = place == 1 or (place is None and not breaks_off(error))
    if first or debug:
        text = str(error) or "no reason is given; has this process no memory left?"
        foreseen = isinstance(error, FloatingPointError | DiskError | UserCodeError)
        if debug or not foreseen:
            traceback.print_exception(error)
        if not foreseen:
            text = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, text])
        say_below(f"error: rank {environment.rank()}, {text}")
    if store is None:
        return
    # it fails if the process that holds the store is gone, or the first one could not print
    if first:
        within(PATIENCE, store.set, PRINTED, "")
        # the others leave before their connections to this process break noisily
        time.sleep(5 * POLL_SECONDS)
    else:
        within(PATIENCE, store.get, PRINTED)


def breaks_off(error: BaseException | None) -> bool:
    """Whether an error only says that another process does not answer."""
    said = str(error)
    return isinstance(error, dist.DistError) or "gloo" in said or "pair closure" in said


def say_below(sentence: str) -> None:
    """Print a sentence on stderr, on a line of its own: a progress bar may stand on the last one, of any rank."""
    print(f"\n{sentence}", file=sys.stderr, flush=True)


def report_config_error(error: Exception, *, debug: bool) -> None:
    """Print a configuration error in one sentence, once on each node: another node may lack what the first one has."""
    if debug:
        traceback.print_exception(error)
    launched = environment.launched()
    if environment.local_rank():
        if launched:  # it ends this process as soon as the one that prints has left
            time.sleep(LAUNCHER_SECONDS)
        return
    rank = environment.rank()
    node = f" (node of rank {rank})" if rank else ""
    sentence = f"error{node}: {error}"
    say_below(sentence)
    if launched:
        start_witness(sentence, os.getppid(), LAUNCHER_SECONDS)


def start_witness(sentence: str, launcher: int, seconds: float) -> Any:
    """Start a process (witness.py) that outlives this one, and return its input.

    Once this process has ended, it waits up to so many seconds for the launcher to end too, and prints the sentence
    then. Whatever is written to its input before keeps it silent.
    """
    script = Path(__file__).with_name("witness.py")
    line = [sys.executable, "-IS", script, str(launcher), str(seconds), sentence]
    # a launcher ends the sessions of its processes
    return subprocess.Popen(
        line, bufsize=0, stdin=subprocess.PIPE, start_new_session=True
    ).stdin


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


def within(seconds: float, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a question to the store gives, or None after an error or so many seconds without an answer."""
    with suppress(Exception):
        return ThreadPoolExecutor(1).submit(ask, *arguments).result(seconds)
