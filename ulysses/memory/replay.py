"""Random numbers of a first run, drawn again when the run is repeated: dropout inside adapters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RandomState:
    """Hold the state of the CPU generator and of the current GPU's."""

    def __init__(self) -> None:
        self.cpu: Tensor = torch.get_rng_state()
        self.cuda: Tensor | None = (
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        )


def has_dropout(module: nn.Module) -> bool:
    """Say whether active dropout lies inside `module`, so that a repeated run must draw the same numbers."""
    return any(
        isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 and m.training
        for m in module.modules()
    )


@contextmanager
def replay(state: RandomState | None) -> Iterator[None]:
    """Run the block with the generators as they were; afterwards they continue as if it had not run."""
    if state is None:
        yield
        return
    now = RandomState()
    _set(state)
    try:
        yield
    finally:
        _set(now)


def _set(state: RandomState) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda)
