"""Run a function on several real processes and collect what each returns.

They run on GPUs over NCCL, one GPU each, where the machine has one for every rank, and on CPU over gloo elsewhere;
ULYSSES_TEST_DEVICE=cpu keeps all of them on the CPU. Test bodies put their tensors on `device()` and draw them on the
CPU, so that the numbers are the same. Without GPUs ranks are forked from this process, whose imports they share. With
GPUs they come from a fork server that has imported torch and nothing else: a process whose parent started CUDA, as one
backward pass on the CPU does, can neither use it nor run a backward pass.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANK_DEVICE = "ULYSSES_TEST_RANK_DEVICE"  # set in a rank's own process

# Seconds after which what has not come is taken never to come. How fast a machine is, and what else it does, is no
# test's business: tests wait for events, and this limit only ends a hang. What is to be stuck is so for longer.
PATIENCE = 600
STUCK = 10 * PATIENCE

# DeepSpeed keys that make a tiny model work like a large one. Small parameters are never taken apart, and of a tiny
# model all are small: none would be gathered ahead, in flight or given back, and all gradients would be reduced
# together. With these keys every parameter is partitioned, and matrices are reduced by themselves.
AS_LARGE = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500}


def full(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of a parametrised test that run only when everything is asked for; the others have a reason each."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def free_port() -> int:
    """Return a port that nobody uses, below those that the system gives to connections, of which ranks have many.

    It is drawn at random: nobody holds it until it is listened on, and several tests may run at a time.
    """
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return s.getsockname()[1]


def device() -> torch.device:
    """Return where this rank works; the CPU outside of ranks."""
    return torch.device(os.environ.get(RANK_DEVICE, "cpu"))


def gpus() -> int:
    """Count the GPUs that ranks may use, without starting CUDA in this process (torch asks the driver's library)."""
    wanted = os.environ.get("ULYSSES_TEST_DEVICE", "cuda")
    if wanted not in ("cpu", "cuda"):
        raise ValueError(
            f"ULYSSES_TEST_DEVICE is {wanted!r} but must be cpu, or cuda (where there are enough GPUs)"
        )
    return torch.cuda.device_count() if wanted == "cuda" else 0


def until(condition: Callable[[], bool], timeout: float = PATIENCE) -> bool:
    """Wait until the condition holds, and return whether it ever did."""
    deadline = time.monotonic() + timeout
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def memory_of(kind: str) -> int:
    """Return bytes of this process by Linux's name of them: VmRSS, VmSize, or VmHWM and VmPeak, the most so far."""
    [kib] = re.findall(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kib)


def need_gpus(count: int) -> None:
    """Skip the test where ranks cannot have a GPU each."""
    if gpus() < count:
        pytest.skip(f"needs {count} GPUs, one for each rank")


class Processes:
    """The ranks of one run, which this process starts: each calls `target` with its rank, their number and the rest."""

    def __init__(
        self, target: Callable[..., None], world: int, *setting: Any, method: str = "fork"
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch"])
        self.processes = [
            context.Process(target=target, args=(rank, world, *setting))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    @property
    def codes(self) -> list[int | None]:
        """The exit codes by rank, None of those that still run."""
        return [process.exitcode for process in self.processes]

    def send(self, number: int, *which: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in which or range(len(self.processes)):
            if self.codes[rank] is None:
                os.kill(self.processes[rank].pid, number)

    def until(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait until the condition holds, all processes have ended or the time is over."""
        until(lambda: None not in self.codes or condition(), timeout)

    def end(self, timeout: float = PATIENCE) -> bool:
        """Wait for the end, and return whether a process had to be killed that did not come to it in time."""
        self.until(lambda: False, timeout)
        late = None in self.codes
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()
        return late


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, cpu: bool = False,
    deterministic: bool = False, **kwargs: Any,
) -> list[Any]:  # fmt: skip
    """Call `function(*args, **kwargs)` on `world_size` forked ranks with torch.distributed initialised.

    Returns the ranks' return values in rank order (anything picklable; tensors come back on the CPU). Raises the first
    rank's error with its traceback; a rank that hangs ends all of them. `cpu=True` keeps the ranks on the CPU;
    `deterministic=True` is for results that are compared bit by bit: as run.deterministic does, it refuses operations
    whose results may differ on a GPU.
    """
    cuda = not cpu and gpus() >= world_size
    served = torch.cuda.device_count() > 0
    if "deepspeed" in sys.modules and not served:
        preload()
    method = "forkserver" if served else "fork"
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        setting = function, args, kwargs, folder, cuda, deterministic
        ranks = Processes(_child, world_size, *setting, method=method)
        # one failing rank ends the others after a moment
        ranks.until(lambda: any(ranks.codes))
        failed = ranks.end(3)
        results: list[Any] = []
        errors: list[str] = []
        for rank in range(world_size):
            path = folder / f"{rank}.result"
            if not path.exists():
                how = "timed out" if failed else f"exit code {ranks.codes[rank]}"
                errors.append(f"rank {rank} left no result ({how})")
                continue
            ok, value = torch.load(path, map_location="cpu", weights_only=False)
            if ok:
                results.append(value)
            else:
                errors.insert(
                    0,
                    f"rank {rank} of {world_size} on {'cuda, nccl' if cuda else 'cpu, gloo'}:\n{value}",
                )
        if errors:
            raise AssertionError("\n".join(errors))
        return results


def preload(*names: str) -> None:
    """Import deepspeed with what it imports late, and other modules, so that forked ranks need not.

    Without GPUs it also asks once which of its operators this machine can build: it compiles a program to find out,
    which every rank would do again at its start.
    """
    late = """
    deepspeed.runtime.zero.muon.muon_optimizer deepspeed.ops.op_builder.all_ops torch._dynamo setuptools
    deepspeed.module_inject.auto_ep_layer deepspeed.runtime.superoffload.superoffload_stage3
    """
    for name in (*late.split(), *names):
        importlib.import_module(name)
    if not torch.cuda.device_count():  # asking them would start CUDA here
        _ = importlib.import_module("deepspeed.ops").__compatible_ops__


unfreeze = gc.unfreeze


def begin_rank() -> None:
    """Work on one thread, and leave what was imported out of every collection of garbage (DeepSpeed asks for some).

    It stays so when a run gives back to the collector what it took out of it itself.
    """
    gc.freeze()
    gc.unfreeze = lambda: None
    torch.set_num_threads(1)
    faulthandler.enable(2)


def hide_gpus() -> None:
    """Make this rank one of a machine without GPUs, for torch and for a deepspeed that has been imported already."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    torch.cuda._cached_device_count = 0  # remembered once the parent has started CUDA
    if "deepspeed" in sys.modules:
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())


def set_rank(rank: int, world: int) -> None:
    """Say in the environment, as a launcher does, which rank of one node this process is."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(
        {name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1"
    )


def _child(
    rank: int, world: int, function: Callable[..., Any], args: Any, kwargs: Any, folder: Path, cuda: bool,
    deterministic: bool,
) -> None:  # fmt: skip
    code = 0
    try:
        set_rank(rank, world)
        # a free port could be taken by another test's rank before it is listened on
        meet = f"file://{folder / 'store'}"
        begin_rank()
        if deterministic:
            from ulysses.check.setting_checks import (
                require_determinism,  # heavy, and needed here only
            )

            require_determinism()
        if cuda:
            os.environ[RANK_DEVICE] = f"cuda:{rank}"
            torch.cuda.set_device(rank)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            # the engine's own: no collective on host tensors
            dist.init_process_group("nccl", meet, rank=rank, world_size=world)
        else:
            hide_gpus()
            dist.init_process_group("gloo", meet, rank=rank, world_size=world)
        outcome = (True, function(*args, **kwargs))
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
        code = 1
    temporary = folder / f"{rank}.tmp"
    try:
        torch.save(outcome, temporary)
    except Exception:
        code = 1
        torch.save((False, traceback.format_exc()), temporary)
    temporary.rename(folder / f"{rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: it can abort while gloo threads still run
