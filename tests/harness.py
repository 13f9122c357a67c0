"""Run a function on several real processes and collect what each returns.

On CPU the ranks are forked from this process (imports are paid once) and talk through gloo. `with_zero=True`
also imports deepspeed in the parent, so that the ranks do not import it one by one.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, with_zero: bool = False, **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` forked ranks with torch.distributed (gloo) initialised.

    Returns the ranks' return values in rank order (anything picklable). Raises the first rank's error with its
    traceback; a rank that hangs past `timeout` seconds ends all of them.
    """
    if with_zero:
        _import_deepspeed()
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(function, args, kwargs, rank, world_size, port, folder)
        children.append(pid)
    failed = _wait(children, timeout)
    results: list[Any] = []
    errors: list[str] = []
    for rank in range(world_size):
        path = folder / f"{rank}.pkl"
        if not path.exists():
            errors.append(f"rank {rank} left no result{' (timed out)' if failed else ''}")
            continue
        ok, value = pickle.loads(path.read_bytes())
        if ok:
            results.append(value)
        else:
            errors.insert(0, f"rank {rank}:\n{value}")
    if errors:
        raise AssertionError("\n".join(errors))
    return results


def _import_deepspeed() -> None:
    import deepspeed
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import torch._dynamo  # noqa: F401


def _child(function: Callable[..., Any], args: Any, kwargs: Any, rank: int, world: int, port: int, folder: Path) -> None:
    code = 0
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        outcome = (True, function(*args, **kwargs))
        dist.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
        code = 1
    temporary = folder / f"{rank}.tmp"
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(folder / f"{rank}.pkl")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: it can abort while gloo threads still run


def _wait(children: list[int], timeout: float) -> bool:
    """Reap all children; True if any had to be killed. One failing rank ends the others after a moment."""
    deadline = time.time() + timeout
    left = set(children)
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                if status != 0:
                    deadline = min(deadline, time.time() + 3)
        if left and time.time() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return True
        time.sleep(0.01)
    return False
