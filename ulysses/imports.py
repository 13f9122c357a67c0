"""Explain in one sentence why a command cannot even be imported."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ulysses.environment import rank


def announce_imports() -> None:
    """Say at once that a command has begun: PyTorch and DeepSpeed may take long to load."""
    if rank() == 0:
        print("loading the libraries ...", file=sys.stderr, flush=True)


@contextmanager
def explained_imports() -> Iterator[None]:
    """End the process if a package is not installed, or if a foreign one has the name of one of the engine's own.

    The collector of garbage waits: it would look through all modules again and again while they are made.
    """
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"error: the package {error.name} is not installed; pip install ulysses-engine brings all that is needed"
        ) from None
    except ImportError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        gc.enable()


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process in one line if Ctrl-C comes before a run takes care of it, as it does once it trains."""
    try:
        yield
    except KeyboardInterrupt:
        if rank() == 0:
            print("\ninterrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
