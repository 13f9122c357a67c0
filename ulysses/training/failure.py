"""One error anywhere ends every process, and is told once.

    rank 2   an exception -> claims the one key in the processes' store -> tells it, and that it has -> exit code 1
    others   a thread sees the key, or the store gone, within a second; once it is told -> exit code 1 in silence,
             also out of a collective that would never end

Nobody leaves before it is told: a launcher ends all processes as soon as one has left, the one that tells too.
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

KEY, TOLD = "ulysses/failed", "ulysses/told"
PATIENCE = timedelta(seconds=10)
POLL_SECONDS = 0.5
TELLER_SECONDS = 60.0  # by which one process may start later than another


class FailureWatch:
    """End this process when another one has failed; every process of a run keeps one open while it trains."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = (
                _store().clone()
            )  # a connection of its own: the other one may be blocked in a wait
            threading.Thread(
                name="failure watch", target=self._poll, args=(store,), daemon=True
            ).start()

    def _poll(self, store: Any) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                failed = store.check([KEY]) and store.get(KEY) != _me()
                if failed:
                    store.wait([TOLD], PATIENCE)
            except (
                Exception
            ):  # the process that held the store is gone, or the one that failed could not tell
                failed = not self._closed.is_set()
            if failed:
                os._exit(1)

    def close(self) -> None:
        """Stop watching; called before the processes part in good order."""
        self._closed.set()


def tell(error: BaseException, *, debug: bool) -> None:
    """Print an error with rank and step on stderr, unless another process of the run has told one already.

    A stack trace comes with it if it is asked for or if the error is none that the engine raises on purpose.
    """
    first = _claim()
    if first or debug:
        _print(error, debug=debug)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if first:
        _store().set(TOLD, "")
        time.sleep(
            3 * POLL_SECONDS
        )  # the others see the key and leave, before their connections break noisily
        return
    with suppress(
        Exception
    ):  # the process that held the store is gone, or the first one could not tell
        _store().wait([TOLD], PATIENCE)


def let_others_tell() -> None:
    """Wait to be ended by the launcher: had this process left first, the one that tells might be ended before it does."""
    sys.stderr.flush()
    time.sleep(TELLER_SECONDS)


def _print(error: BaseException, *, debug: bool) -> None:
    cause = error.__cause__ if isinstance(error, StepError) and error.__cause__ else error
    if debug or not isinstance(cause, FloatingPointError):
        traceback.print_exception(cause)
    text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
    print(f"error: rank {os.environ.get('RANK', '0')}, {text}", file=sys.stderr, flush=True)


class StepError(RuntimeError):
    """An error inside the loop, with the step (counted from 1) at which it happened."""

    def __init__(self, step: int, error: Exception) -> None:
        named = str(error).startswith(f"step {step}: ")
        super().__init__(str(error) if named else f"step {step}: {type(error).__name__}: {error}")
        self.step = step


def _claim() -> bool:
    """Say whether this process is the first to fail; without a common store everybody is."""
    if not dist.is_initialized():
        return True
    try:
        return _store().compare_set(KEY, "", _me().decode()) == _me()
    except Exception:  # the process that held the store is gone, so it has failed before
        return False


def _me() -> bytes:
    return f"rank {dist.get_rank()}".encode()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
