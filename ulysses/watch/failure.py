"""One error anywhere ends every process, and is printed once.

    a configuration error    every process finds the same one; the first process of each node prints it (complaint.py):
                             exit code 2
    any other error          the process that is the first to fail prints it and tells the others (correspondence.py);
                             the watch (watch.py) ends them, also out of a collective that would never end: exit code 1

A launcher ends all its processes as soon as one has left. So nobody leaves before the error is printed.
"""

import traceback

import torch.distributed as dist

from ulysses import environment
from ulysses.config.section import CREDENTIALS, UserCodeError
from ulysses.disk import DiskError
from ulysses.watch.complaint import say
from ulysses.watch.correspondence import Correspondence
from ulysses.zero.construct import common_store


def report_failure(error: Exception, *, debug: bool) -> None:
    """Print an error with its rank and its notes on stderr, unless another process of the run was the first to fail.

    A stack trace comes with it for every error but non-finite numbers and failures of a disk or of the user's code
    and servers, which are no programming errors of ours; on request every process prints its own.
    """
    reason, trace = str(error) or "no reason is given; has this process no memory left?", ""
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, FloatingPointError | DiskError | UserCodeError):
        reason = ": ".join([*getattr(error, "__notes__", ()), type(error).__name__, reason])
        trace = "" if debug else "".join([*traceback.format_exception(error), "\n"])
    reason = CREDENTIALS.sub("***", f"{trace}error: rank {environment.rank()}, {reason}")
    store = common_store()
    if store is None:
        say(reason)
    else:
        # without an answer nobody may have told anything, but who cannot reach another process is not the first to fail
        Correspondence(store).tell(reason, alone=not breaks_off(error))


def breaks_off(error: BaseException | None) -> bool:
    """Whether an error only says that another process does not answer."""
    said = str(error)
    return isinstance(error, dist.DistError) or "gloo" in said or "pair closure" in said


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
