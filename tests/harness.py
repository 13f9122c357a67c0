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
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANK_DEVICE = "ULYSSES_TEST_RANK_DEVICE"  # set in a rank's own process

# DeepSpeed keys that make a tiny model work like a large one. Small parameters are never taken apart, and of a tiny
# model all are small: none would be gathered ahead, in flight or given back, and all gradients would be reduced
# together. With these keys every parameter is partitioned, and matrices are reduced by themselves.
AS_LARGE = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500}


def full(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of a parametrised test that run only when everything is asked for; the others have a reason each."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def device() -> torch.device:
    """Return where this rank works; the CPU outside of ranks."""
    return torch.device(os.environ.get(RANK_DEVICE, "cpu"))


def on_gpu() -> bool:
    """Say whether this process is a rank on a GPU."""
    return device().type == "cuda"


def gpus() -> int:
    """Count the GPUs that ranks may use, without starting CUDA in this process (torch asks the driver's library)."""
    wanted = os.environ.get("ULYSSES_TEST_DEVICE", "cuda")
    if wanted not in ("cpu", "cuda"):
        raise ValueError(
            f"ULYSSES_TEST_DEVICE is {wanted!r} but must be cpu, or cuda (where there are enough GPUs)"
        )
    return torch.cuda.device_count() if wanted == "cuda" else 0


def need_gpus(count: int) -> None:
    """Skip the test where ranks cannot have a GPU each."""
    if gpus() < count:
        pytest.skip(f"needs {count} GPUs, one for each rank")


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, cpu: bool = False,
    deterministic: bool = False, warm: bool = False, **kwargs: Any,
) -> list[Any]:  # fmt: skip
    """Call `function(*args, **kwargs)` on `world_size` forked ranks with torch.distributed initialised.

    Returns the ranks' return values in rank order (anything picklable; tensors come back on the CPU). Raises the first
    rank's error with its traceback; a rank that hangs past `timeout` seconds (three times that on GPUs, where kernels
    are compiled first) ends all of them. `cpu=True` keeps the ranks on the CPU; `deterministic=True` is for results
    that are compared bit by bit: as run.deterministic does, it refuses operations whose results may differ on a GPU.
    `warm=True` is for functions that leave nothing behind: without GPUs their ranks stay for the next such function.
    """
    cuda = not cpu and gpus() >= world_size
    served = torch.cuda.device_count() > 0
    warm &= not served
    if "deepspeed" in sys.modules and not served:
        preload()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        task = (function, args, kwargs, folder, deterministic)
        if warm:
            ranks, pipes = WARM.pop(world_size, None) or _warm_ranks(world_size)
            for pipe in pipes:
                pipe.send_bytes(pickle.dumps(task))
        else:
            context = multiprocessing.get_context("forkserver" if served else "fork")
            if served:
                context.set_forkserver_preload(["torch"])
            ranks = [
                context.Process(target=_child, args=(rank, world_size, cuda, [task]))
                for rank in range(world_size)
            ]
            for process in ranks:
                process.start()
        failed = _wait(ranks, folder, timeout * (3 if cuda else 1))
        results: list[Any] = []
        errors: list[str] = []
        for rank in range(world_size):
            path = _result(folder, rank)
            if not path.exists():
                how = "timed out" if failed else f"exit code {ranks[rank].exitcode}"
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
        if warm:
            WARM[world_size] = ranks, pipes
        else:
            for process in ranks:
                process.join()
        return results


# ranks without a task, by their number, and the pipes through which they get one
WARM: dict[int, tuple[list[Any], list[Connection]]] = {}


def _warm_ranks(world_size: int) -> tuple[list[Any], list[Connection]]:
    """Start ranks that work until this process ends."""
    context = multiprocessing.get_context("fork")
    ranks, pipes = [], []
    for rank in range(world_size):
        tasks, pipe = context.Pipe(duplex=False)
        setting = (rank, world_size, False, _tasks_from(tasks))
        ranks.append(context.Process(target=_child, args=setting, daemon=True))
        ranks[-1].start()
        pipes.append(pipe)
    return ranks, pipes


def _tasks_from(pipe: Connection) -> Iterator[Any]:
    parent = os.getppid()
    while os.getppid() == parent:
        if pipe.poll(1):
            yield pickle.loads(pipe.recv_bytes())


def preload(*names: str) -> None:
    """Import deepspeed with what it imports late, and other modules, so that forked ranks need not.

    Without GPUs it also asks once which of its operators this machine can build: it compiles a program to find out,
    which every rank would do again at its start.
    """
    late = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "torch._dynamo",
            "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3",
            "setuptools")  # fmt: skip
    for name in late + names:
        importlib.import_module(name)
    if not torch.cuda.device_count():  # asking them would start CUDA here
        _ = importlib.import_module("deepspeed.ops").__compatible_ops__


def begin_rank() -> None:
    """Work on one thread, and leave what was imported out of every collection of garbage (DeepSpeed asks for some)."""
    gc.freeze()
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


def _child(rank: int, world: int, cuda: bool, tasks: Iterable[Any]) -> None:
    """Do the tasks of one rank, up to the first that fails."""
    set_rank(rank, world)
    begin_rank()
    given, done = dict(os.environ), True
    for number, task in enumerate(tasks):
        if number:
            _end_distributed()
            os.environ.clear()
            os.environ.update(given)
            torch.manual_seed(0)
        if not (done := _done(rank, world, cuda, *task)):
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(not done)  # no interpreter shutdown: it can abort while gloo threads still run


def _end_distributed() -> None:
    """Leave the last task's groups, also those that a deepspeed has which the task has used."""
    comm = importlib.import_module("deepspeed.comm")
    (comm if comm.is_initialized() else dist).destroy_process_group()


def _done(
    rank: int, world: int, cuda: bool, function: Callable[..., Any], args: Any, kwargs: Any, folder: Path,
    deterministic: bool,
) -> bool:  # fmt: skip
    """Do one task, write its result, and return whether it went well."""
    try:
        # a free port could be taken by another test's rank before it is listened on
        meet = f"file://{folder / 'store'}"
        if deterministic:
            from ulysses.run.setting_checks import (
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
    temporary = folder / f"{rank}.tmp"
    try:
        torch.save(outcome, temporary)
    except Exception:
        outcome = (False, traceback.format_exc())
        torch.save(outcome, temporary)
    temporary.rename(_result(folder, rank))
    return outcome[0]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"


def _wait(ranks: list[Any], folder: Path, timeout: float) -> bool:
    """Wait for all results; True if ranks had to be killed. One rank that fails ends the others after a moment."""
    deadline = time.time() + timeout
    while waiting := [r for r in range(len(ranks)) if not _result(folder, r).exists()]:
        codes = [process.exitcode for process in ranks]
        if all(codes[rank] is not None for rank in waiting):
            return False
        if any(codes):
            deadline = min(deadline, time.time() + 3)
        if time.time() > deadline:
            for process in ranks:
                process.kill()
                process.join()
            return True
        time.sleep(0.01)
    return False
