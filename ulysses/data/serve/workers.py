"""Run a function over batches in several processes, with the results in the order of the batches.

Processes are forked, so the function needs no pickling and a script no guard. That is safe because they use no thread
pool that the parent may have started: neither torch's nor the tokenizer's. A process has one batch at a time, which
bounds memory, and what it does depends on no other process.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from ulysses.data import DataError
from ulysses.environment import silence_tokenizers

MOST_WORKERS = 16  # one process deals and writes for all of them
BATCHES_AT_FIRST = 2  # so little work is done before processes would be up


@dataclass
class Results:
    """What a function makes of batches, which index this dataset; an error is a result too."""

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
    batches, results = iter(batches), Results(function)
    if workers == "auto":
        workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    with ExitStack() as frozen:
        # Otherwise every garbage collection walks through all that is loaded, and forked processes copy its pages.
        if not gc.get_freeze_count():  # a caller's own freeze stays
            gc.freeze()
            frozen.callback(gc.unfreeze)
        few = islice(batches, BATCHES_AT_FIRST if workers > 1 else None)
        for result in chain(map(results.__getitem__, few), _others(results, batches, workers)):
            if isinstance(result, Exception):
                raise result
            yield result


def _others(results: Results, batches: Iterator[Any], workers: int) -> Iterator[Any]:
    """Yield the results of the batches that are left, from as many processes if there are any."""
    for batch in batches:
        loader = DataLoader(
            results,
            batch_size=None,
            sampler=chain([batch], batches),
            num_workers=workers,
            prefetch_factor=1,
            collate_fn=lambda result: result,
            worker_init_fn=lambda _: silence_tokenizers(),
            multiprocessing_context="fork",
        )
        try:
            yield from loader
        except RuntimeError:
            raise DataError(
                "a process that tokenised data was killed, perhaps for want of memory; set data.workers to fewer"
            ) from None
