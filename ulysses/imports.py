"""The start of every command: libraries are imported quietly, and one sentence tells why an import fails.

This file imports nothing heavy, because some libraries print while they are imported.
"""

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ulysses import environment
from ulysses.environment import rank

# Libraries that warn about themselves (deprecations, untested combinations, fallbacks), not about the user's settings.
LOGGERS = (
    "absl", "bitsandbytes", "filelock", "fsspec", "matplotlib", "tensorboard", "tensorflow", "torch", "transformers",
)  # fmt: skip
VARIABLES = {
    "PYTHONWARNINGS": "ignore",  # for processes that this one starts
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers warns when it is used before a fork
    # these set their loggers' levels when they are imported
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@contextmanager
def explained_imports() -> Iterator[None]:
    """End the process with a sentence if a package is absent, or if a foreign one has the name of one of ours.

    Garbage is not collected meanwhile: the collector would look through all modules again and again.
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
    """End the process with one line if Ctrl-C comes before a run handles it, which it does once it trains.

    During an import the process ends at once: libraries swallow a KeyboardInterrupt there, and break later. It ends
    without a word if whatever reads its output, such as `head`, has read enough.
    """
    # a log file has each line at once, and a terminal may lack a letter
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")

    def leave() -> NoReturn:
        if rank() == 0:
            print("\ninterrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)

    def stop(_: int, frame: FrameType | None) -> NoReturn:
        while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if frame:
            leave()
        raise KeyboardInterrupt

    # a process in the background ignores SIGINT, and must go on doing so
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)


def quiet() -> None:
    """Silence whatever libraries print below the level of an error; call it before they are imported.

    What the user has set through PYTHONWARNINGS, `python -W` or one of the VARIABLES stays as it is.
    """
    environment.preset(VARIABLES)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its logger's level when it is imported, but leaves filters.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
