"""The update of one rank's master weights by torch's optimizer, and the parameter groups that it treats alike.

On a GPU gpu_kernels.py does AdamW's part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one update treats alike.

    scope: gradient policies clip those of a scope by their own norm. lr_factor: times the schedule's learning rate.
    """

    parameters: list[nn.Parameter]
    weight_decay: float = 0.0
    scope: str = "default"
    lr_factor: float = 1.0


def moments(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """Return AdamW's state of some master weights; it is created as zeros if no update has happened yet."""
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros(())  # on the host, where torch's AdamW has it too
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(master) for _ in range(2))
    return state


class Update:
    """Update a sub-group: its flat float32 `master` weights [N], and the model's flat `weights` in the same order.

    Args:
        settings: the optimizer's own table of the group; torch finds the master weights there during an update only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        master: Tensor,
        weights: list[Tensor],
    ) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.master, self.weights = master, weights

    def __call__(self, factor: float) -> None:
        """Take one step with `factor` times the gradient that the master weights have, and give them to the model."""
        if factor != 1:
            self.master.grad.mul_(factor)
        self.settings["params"] = [self.master]
        self.optimizer.step()
        self.settings["params"] = []
        self.write()

    def write(self) -> None:
        """Give the master weights to the model as they are."""
        parts = self.master.split([len(own) for own in self.weights])
        torch._foreach_copy_(self.weights, parts)


def update_of(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    master: Tensor,
    weights: list[Tensor],
) -> Update:
    """Return the update of a sub-group: in one pass where a GPU holds everything, by torch's optimizer elsewhere."""
    if master.is_cuda and weights[0].is_cuda:
        from ulysses.zero.gpu_kernels import OnePassUpdate

        if OnePassUpdate.usable(optimizer):
            return OnePassUpdate(optimizer, settings, master, weights)
    return Update(optimizer, settings, master, weights)
