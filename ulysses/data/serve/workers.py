"""Run a function over batches in several processes, with the results in the order of the batches.

    batches   0 1 2 3 ...  -- one at a time to each process, in turn -->  process 0: 0, 2, ...
                                                                          process 1: 1, 3, ...
    results   0 1 2 3 ...  <-- asked for in the same turn --

A process holds one batch at a time, which bounds memory, and what it does depends on no other process. Processes are
forked, so the function needs no pickling and a script no guard. That is safe because they use no thread pool that the
parent may have started: neither torch's nor the tokenizer's. Pipes tell both sides when the other one has died.
"""

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from ulysses.data import DataError
from ulysses.environment import silence_tokenizers

MOST_WORKERS = 16  # one process deals and writes for all of them
BATCHES_AT_FIRST = 2  # so little work is done before processes would be up


def in_order(
    function: Callable[[Any], Any], batches: Iterable[Any], workers: int | str
) -> Iterator[Any]:
    """Yield function(batch) for every batch, computed in forked processes if there are many; "auto" is one per core.

    An error of the function is raised here, in its batch's turn. DataError: a process has died.
    """
    batches = iter(batches)
    if workers == "auto":
        workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    busy: deque[Connection] = deque()
    with ExitStack() as processes:
        # Otherwise every garbage collection walks through all that is loaded, and forked processes copy its pages.
        if not gc.get_freeze_count():  # a caller's own freeze stays
            gc.freeze()
            processes.callback(gc.unfreeze)
        yield from map(function, islice(batches, BATCHES_AT_FIRST if workers > 1 else None))
        try:
            for batch in batches:
                results = []
                if len(busy) < workers:
                    link = _start(function, processes)
                else:
                    link = busy.popleft()
                    results.append(_result(link))
                link.send(batch)
                busy.append(link)
                yield from results
            yield from map(_result, busy)
        except (EOFError, ConnectionError):
            raise DataError(
                "a process that tokenised data was killed, perhaps for want of memory; set data.workers to fewer"
            ) from None


def _start(function: Callable[[Any], Any], processes: ExitStack) -> Connection:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(function, theirs, ours), daemon=True)
    process.start()
    theirs.close()  # so that its end is the only one
    processes.callback(process.join)
    processes.callback(process.kill)
    return ours


def _work(function: Callable[[Any], Any], link: Connection, parents_end: Connection) -> None:
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all of them
    silence_tokenizers()
    torch.set_num_threads(1)
    while True:
        try:
            link.send(function(link.recv()))
        except (EOFError, ConnectionError):  # the parent has died
            return
        except Exception as error:
            link.send(error)


def _result(link: Connection) -> Any:
    result = link.recv()
    if isinstance(result, Exception):
        raise result
    return result
