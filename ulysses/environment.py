"""Environment variables: those that launchers and users set, and those that we set for libraries.

No other file uses any, except parallel/kernels, which must work alone and sets one for flash-attn.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf

NODE = os.uname().nodename
GRACE_SECONDS = "30"  # between SIGTERM and SIGKILL, with torchrun, deepspeed and Slurm


def rank() -> int:
    """Return this process's number among all of the run."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return this process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_world_size(default: int = 1) -> int:
    """Return the number of processes of this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def check_launcher() -> None:
    """Raise RuntimeError if what a launcher says of this process is no number, or a rank that the run does not have."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not (text := os.environ.get(name, "0")).isdecimal():
            raise RuntimeError(f"{name} is {text!r} but must be a number, as torchrun sets it")
    if rank() >= world_size():
        raise RuntimeError(
            f"RANK is {rank()} but WORLD_SIZE is {world_size()}, and ranks begin at 0"
        )


def complete() -> None:
    """Set the variables that the launcher has not set: deepspeed's sets only some, and one process may have none.

    Raises RuntimeError for a rank that cannot be, and for one of several processes that does not know its rank.
    """
    check_launcher()
    if world_size() > 1 and "RANK" not in os.environ:
        raise RuntimeError(
            f"WORLD_SIZE is {world_size()} but RANK is not set; start every process with its rank, as torchrun does"
        )
    defaults = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        # torchrun sets it; deepspeed's launcher sets LOCAL_SIZE
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_SIZE", str(world_size())),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    preset(defaults)


def preset(variables: Mapping[str, str]) -> None:
    """Set variables for libraries and child processes; those that the user has set stay as they are."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make torch.compile return functions as they are: its preparation takes seconds even if nothing is compiled."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name, "")
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ[name] = before


def silence_tokenizers() -> None:
    """Keep tokenizers from starting threads, which do not survive a fork, whatever the user has set."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def launchers() -> int:
    """Return how many processes of a launcher are above this one: one of torchrun, or two of deepspeed."""
    if "CROSS_SIZE" in os.environ:
        return 2
    return 1 if "TORCHELASTIC_RUN_ID" in os.environ else 0


def agent_holds_store() -> bool:
    """Return whether torchrun holds the processes' store, as it usually does since torch 2.4, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_address() -> str:
    """Return where the processes' store is, host:port."""
    return ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))


def may_restart() -> bool:
    """Return whether torchrun may start all processes again after a failure."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def error_file() -> str | None:
    """Return the file in which torchrun looks for why this process ended; None without torchrun."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def grace_seconds() -> float:
    """Return the seconds from SIGTERM to SIGKILL; infinite without a launcher that kills the processes."""
    if not launchers() and "SLURM_JOB_ID" not in os.environ:
        return inf
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE_SECONDS))


def api_headers() -> dict[str, str]:
    """Return the header with the user's key for the servers of rewards and samplers, or none if there is no key.

    Raises ValueError, which does not show the key, if a header cannot hold it.
    """
    key = os.environ.get("ULYSSES_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "ULYSSES_API_KEY holds characters that no header may hold; set it again"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def wants_debug(arguments: list[str]) -> bool:
    """Return whether `--debug` or ULYSSES_DEBUG is given; for use before the command line is parsed."""
    return "--debug" in arguments or os.environ.get("ULYSSES_DEBUG", "0") not in ("", "0")
