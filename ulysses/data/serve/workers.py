"""Run a function over batches in several processes, with the results in the order of the batches.

    batches   0 1 2 3 ...  -- one at a time to each process, in turn -->  process 0: 0, 2, ...
                                                                          process 1: 1, 3, ...
    results   0 1 2 3 ...  <-- asked for in the same turn --

A process holds one batch at a time, which bounds memory, and what it does depends on no other process. torch's
DataLoader starts and watches the processes. They are forked, so the function needs no pickling and a script no guard.
That is safe because they use no thread pool that the parent may have started: neither torch's nor the tokenizer's.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from ulysses.data import DataError
from ulysses.environment import silence_tokenizers

MOST_WORKERS = 16  # one process deals and writes for all of them
BATCHES_AT_FIRST = 2  # so little work is done before processes would be up


@dataclass
class Results:
    """What the function makes of a batch: its result, or its error."""

    function: Callable[[Any], Any]

    def __getitem__(self, batch: Any) -> Any:
        try:
            return self.function(batch)
        except Exception as error:
            return error


def in_order(
    function: Callable[[Any], Any], batches: Iterable[Any], workers: int | str
) -> Iterator[Any]:
    """Yield function(batch) for every batch, computed in forked processes if there are many; "auto" is one per core.

    An error of the function is raised here, in its batch's turn. DataError: a process has died.
    """
    batches = iter(batches)
    if workers == "auto":
        workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    with ExitStack() as frozen:
        # Otherwise every garbage collection walks through all that is loaded, and forked processes copy its pages.
        if not gc.get_freeze_count():  # a caller's own freeze stays
            gc.freeze()
            frozen.callback(gc.unfreeze)
        yield from map(function, islice(batches, BATCHES_AT_FIRST if workers > 1 else None))
        for batch in batches:  # there are more: processes take them all
            for result in _in_processes(function, chain([batch], batches), workers):
                if isinstance(result, Exception):
                    raise result
                yield result


def _in_processes(
    function: Callable[[Any], Any], batches: Iterable[Any], workers: int | str
) -> Iterator[Any]:
    loader = DataLoader(
        Results(function),
        sampler=batches,
        batch_size=None,
        collate_fn=lambda result: result,
        num_workers=workers,
        prefetch_factor=1,
        multiprocessing_context="fork",
        worker_init_fn=_begin,
        generator=Generator(),  # the program's own is not drawn from
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a process that tokenised data was killed, perhaps for want of memory; set data.workers to fewer"
        ) from None


def _begin(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all of them
    silence_tokenizers()
