"""What a dry run asks besides the plan: an absent model's shape, the machine to plan for, and the longest sequence."""

from bisect import bisect_left
from pathlib import Path

import torch

from models.arch import ModelConfig
from models.published import recognised
from ulysses.config.schema import Config, Options
from ulysses.environment import local_world_size
from ulysses.plan.case import GIB, PEAKS, Case, Machine, device_peaks, free_host_bytes
from ulysses.plan.costs import predict
from ulysses.plan.memory_choice import first_fit

ASSUMED_GIB = 80.0  # of a GPU, where there is none and --gpu-memory is not given


def published_shape(config: Config, absent: str) -> ModelConfig | None:
    """Return the shape that a model's id, such as "meta-llama/Meta-Llama-3-8B-Instruct", names, or None.

    A dry run plans with it if the model is not on this machine.
    """
    shape = recognised(Path(absent).name)
    return shape and ModelConfig.from_hf(shape.to_hf(), **config.model.rope.changes())


def planned_machine(config: Config, options: Options, world: int) -> Machine:
    """Return the machine to plan for: the one that --gpus and the like describe, else this one, else GPUs of 80 GiB."""
    gpu = (options.gpu_memory or ASSUMED_GIB) * GIB
    if torch.cuda.is_available() and not options.gpu_memory:
        gpu = torch.cuda.get_device_properties(0).total_memory
    host = options.host_memory or config.memory.host_memory
    host_bytes = host * GIB or (0.0 if options.gpus else free_host_bytes())
    peaks = device_peaks() or PEAKS["H200"]
    return Machine(world, gpu, host_bytes, local_world_size(8), *peaks)


def longest_sequence(case: Case) -> int:
    """Return the most tokens per document, a multiple of 1024, that some allowed level fits; 0 if not even 1024 do.

    The case says how many equal documents are in the micro-batch and how many ranks share it.
    """

    def fits(blocks: int) -> bool:
        return predict(first_fit(case._replace(tokens=1024 * blocks * case.documents))).fits

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if fits(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not fits(n)))
