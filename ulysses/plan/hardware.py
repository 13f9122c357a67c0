"""The machine that a step is planned for: its GPUs, their memory, their peaks and the links between them."""

import math
import timeit
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ulysses.config.schema import Config, Options
from ulysses.environment import local_world_size
from ulysses.parallel.mesh import gather

GIB = 1 << 30
PEAKS = {  # dense bfloat16 FLOP/s, and bytes/s of memory, by part of the device name, from the vendors' data sheets
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H800": (989e12, 3.35e12),
    "B200": (2250e12, 8e12),
    "A100": (312e12, 2e12),
    "A800": (312e12, 2e12),
    "L40S": (362e12, 0.86e12),
    "4090": (165e12, 1e12),
}
ASSUMED_GIB = 80.0  # of a GPU, where there is none and --gpu-memory is not given
HOST_FILL = 0.9  # share of a node's free memory that training may take
# bytes/s that transfers which share a link reach, 36% of its peak: between two GPUs of one node, and of two nodes
LINK, NODE_LINK = 162e9, 18e9


class Machine(NamedTuple):
    """GPUs, their nodes and what each of them can do; where processes run on CPUs, these stand for the GPUs."""

    gpus: int
    gpu_bytes: float  # of memory, infinite for a CPU
    host_bytes: float = 0.0  # per node, free for training; 0 if unknown
    gpus_per_node: int = 8
    peak_flops: float = PEAKS["H200"][0]
    memory_rate: float = PEAKS["H200"][1]  # bytes/s

    @property
    def is_gpu(self) -> bool:
        return self.gpu_bytes < math.inf

    @property
    def local_processes(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def host_budget(self) -> float:
        """The host memory that one process may take."""
        return HOST_FILL * self.host_bytes / self.local_processes

    def link(self, ranks: int) -> float:
        """Return the bytes/s of the slowest link between this many neighbouring ranks."""
        return LINK if ranks <= self.gpus_per_node else NODE_LINK


def this_machine(device: torch.device, host_gib: float = 0.0) -> Machine:
    """Return the machine of all ranks: the least memory and speed of any, and the largest node; all decide by it.

    All ranks call it together, before they allocate.

    Args:
        host_gib: memory of a node (memory.host_memory); 0 takes what its kernel reports.
    """
    memory = math.inf
    host = host_gib * GIB or free_host_bytes()
    if device.type == "cuda":
        # the program may have set a smaller share than all of it
        memory = int(
            torch.cuda.get_device_properties(device).total_memory
            * torch.cuda.get_per_process_memory_fraction(device)
        )
    machines = gather(Machine(1, memory, host, local_world_size(), *(device_peaks() or ())))
    return Machine(
        gpus=len(machines),
        gpu_bytes=min(m.gpu_bytes for m in machines),
        host_bytes=min(m.host_bytes for m in machines),
        gpus_per_node=max(m.gpus_per_node for m in machines),
        peak_flops=min(m.peak_flops for m in machines),
        memory_rate=min(m.memory_rate for m in machines),
    )


def planned_machine(config: Config, options: Options, world: int) -> Machine:
    """Return the machine to plan for: the one that --gpus and the like describe, else this one, else GPUs of 80 GiB."""
    gpu = (options.gpu_memory or ASSUMED_GIB) * GIB
    if torch.cuda.is_available() and not options.gpu_memory:
        gpu = torch.cuda.get_device_properties(0).total_memory
    host = options.host_memory or config.memory.host_memory
    host_bytes = host * GIB or (0.0 if options.gpus else free_host_bytes())
    return Machine(world, gpu, host_bytes, local_world_size(8), *(device_peaks() or ()))


def device_peaks() -> tuple[float, float] | None:
    """Return this GPU's dense bfloat16 FLOP/s and the bytes/s of its memory, or None where they are not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peaks for part, peaks in PEAKS.items() if part in name), None)


def cpu_flops(dtype: str) -> float:
    """Measure this process's FLOP/s in products of matrices, 512 wide; the fastest of three counts."""
    matrix = torch.rand(512, 512).to(getattr(torch, dtype))
    return 2 * 512**3 / min(timeit.repeat(lambda: matrix @ matrix, repeat=3, number=1))


def slow_products(dtype: str) -> str:
    """Return a sentence if this CPU multiplies matrices of the dtype much more slowly than those of float32, or ""."""
    if dtype == "float32" or (factor := cpu_flops("float32") / cpu_flops(dtype)) < 2:
        return ""
    return (
        f"products of {dtype} matrices are {factor:.0f} times slower than those of float32 on this CPU; "
        'set model.dtype = "float32"'
    )


def free_host_bytes() -> int:
    """Return the memory of this node that processes may still take, within the limits of a container.

    A machine that gets memory on demand reports less than it can have: memory.host_memory says the right number.
    """
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
