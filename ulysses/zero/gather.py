"""Whole weights out of their slices: one module at a time for an export, all at once for a sampler."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero.construct import streaming_memory
from ulysses.zero.engine import ZeroEngine

RESERVE = 0.05  # of the free memory, for what sampling itself allocates


def full_parameters(
    engine: ZeroEngine, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the whole value of every wanted parameter in the model's order.

    Values are in host memory and on rank 0 only; the others get None. All ranks must iterate together. No rank ever
    holds more than one module's parameters.
    """
    main = dist.get_rank() == 0
    chosen = ((name, p) for name, p in engine.module.named_parameters() if wanted(name))
    with streaming_memory():
        for _, of_module in groupby(chosen, lambda item: item[0].rpartition(".")[0]):
            names, parameters = zip(*of_module)
            with gathered(engine, parameters), torch.no_grad():
                values = [p.detach().to("cpu", copy=True) if main else None for p in parameters]
            yield from zip(names, values)


@contextmanager
def gathered_weights(engine: ZeroEngine) -> Iterator[dict[str, Tensor]]:
    """Gather all parameters by their names; read only.

    A sampler reads them without hooks and without collectives: all ranks enter and leave together, and need
    no lockstep in between. The memory for them was planned before the run began.
    """
    chosen = dict(engine.module.named_parameters())
    with gathered(engine, chosen.values()):
        yield {name: p.data for name, p in chosen.items()}


def gathered(
    engine: ZeroEngine, parameters: Iterable[nn.Parameter]
) -> AbstractContextManager[Any]:
    """Return the context in which these parameters are whole; all ranks enter and leave it together."""
    if engine.weights is None:
        return deepspeed.zero.GatheredParameters(parameters)
    engine.weights.wait()
    return nullcontext()


def free_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process can still allocate for a sampler's cache."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * (1 - RESERVE))
