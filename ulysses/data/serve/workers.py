"""Run a function over batches in several processes, with the results in the order of the batches.

    batches   0 1 2 3 ...  -- one at a time to each process, in turn -->  process 0: 0, 2, ...
                                                                          process 1: 1, 3, ...
    results   0 1 2 3 ...  <-- taken from the processes in the same turn --

A process holds one batch at a time, which bounds memory, and what it does depends on no other process. Processes are
forked, so the function needs no pickling and a script no guard. That is safe because they use no thread pool that the
parent may have started: neither torch's nor the tokenizer's.
"""

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from ulysses.data import DataError
from ulysses.environment import silence_tokenizers

MOST_WORKERS = 16  # one process deals and writes for all of them
BATCHES_AT_FIRST = 2  # so much work is done here, sooner than processes would have started
Batch, Result = TypeVar("Batch"), TypeVar("Result")


def in_order(
    function: Callable[[Batch], Result], batches: Iterable[Batch], workers: int | str
) -> Iterator[Result]:
    """Yield function(batch) for every batch, computed in forked processes if there are many batches.

    Args:
        workers: the number of processes; "auto" takes one for each core.

    An error of the function is raised here, in its batch's turn. Raises DataError if a process has died.
    """
    batches = iter(batches)
    if workers == "auto":
        workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    with ExitStack() as frozen:
        # Without a freeze every garbage collection walks through all that is loaded, and forked processes copy its
        # pages.
        if not gc.get_freeze_count():  # a caller's own freeze stays
            gc.freeze()
            frozen.callback(gc.unfreeze)
        here = BATCHES_AT_FIRST if workers > 1 else None  # all of them
        yield from map(function, islice(batches, here))
        yield from _in_processes(function, batches, workers)


def _in_processes(
    function: Callable[[Batch], Result], batches: Iterable[Batch], workers: int
) -> Iterator[Result]:
    fork = get_context("fork")
    busy = deque[Connection]()
    with ExitStack() as stopping:
        for batch in batches:
            if len(busy) < workers:
                pipe, theirs = fork.Pipe()
                process = fork.Process(
                    target=_serve, args=(function, theirs, pipe), daemon=True
                )
                process.start()
                stopping.callback(process.join)
                stopping.callback(process.kill)
                theirs.close()
            else:
                pipe = busy.popleft()
                yield _result(pipe)
            # a process that has died is named when its result is taken
            with suppress(OSError):
                pipe.send(batch)
            busy.append(pipe)
        yield from map(_result, busy)


def _serve(function: Callable[[Batch], object], pipe: Connection, others: Connection) -> None:
    """Compute what comes through a pipe until its other end is closed, in a process of its own."""
    others.close()  # the fork has copied the parent's end of the pipe
    # a terminal sends the signal to parent and workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence_tokenizers()
    with suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                result = function(batch)
            except Exception as error:
                result = error
            pipe.send(result)


def _result(pipe: Connection) -> Result:
    try:
        result = pipe.recv()
    except (EOFError, OSError):
        raise DataError(
            "a process that tokenised data was killed, perhaps for want of memory; set data.workers to fewer"
        ) from None
    if isinstance(result, Exception):
        raise result
    return result
