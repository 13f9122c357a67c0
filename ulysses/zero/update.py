"""What this rank updates: its slices of the weights in float32, their gradients, and the optimizer's state.

    parameter    cut into as many equal flat slices as there are ranks, padded with zeros; rank r owns slice r
    sub-group    parameters whose slices lie one after the other in one flat float32 tensor, the master weights

Each sub-group has a torch optimizer of its own. On a GPU gpu_kernels.py does AdamW's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one update treats alike.

    scope: gradient policies clip the gradients of a scope by their common norm. lr_factor: times the schedule's
    learning rate.
    eight_bit: whether their moments are quantised (eight_bit.py).
    """

    parameters: list[nn.Parameter]
    weight_decay: float = 0.0
    scope: str = "default"
    lr_factor: float = 1.0
    eight_bit: bool = False


def is_pinned(tensor: Tensor) -> bool:
    """Return whether the tensor is in pinned host memory.

    A process that uses no GPU has no such memory. CUDA is not asked then, which would be an error after a fork from a
    process with a GPU.
    """
    return torch.cuda.is_initialized() and tensor.is_pinned()


@dataclass
class SubGroup:
    """Parameters of a group that are updated together.

    weights: this rank's flat slices in the model, padding included. lengths: of the slices without padding. master: the
    slices in float32 [N], one after the other, padding included. optimizer: for `master` alone.
    """

    group: ParameterGroup
    parameters: list[nn.Parameter]
    weights: list[Tensor]
    lengths: list[int]
    master: Tensor
    optimizer: torch.optim.Optimizer

    def gradient_sums(self) -> Tensor:
        """Return the float32 memory [N] in which the gradients of several micro-batches are added; made when needed."""
        if self.master.grad is None:
            pinned = is_pinned(self.master)
            self.master.grad = torch.zeros_like(self.master, pin_memory=pinned)
        return self.master.grad

    def update(self, grads: Sequence[Tensor], lr: float, factor: float) -> None:
        """Take one step with `factor` times the gradients, and give the result to the model.

        Args:
            grads: of the parameters' slices without padding, in their order. If `gradient_sums` has been called, they
                are views of that memory; otherwise one process keeps the gradients of its only micro-batch where they
                are.
        """
        has_no_sums = self.master.grad is None
        if has_no_sums:
            self.master.grad = torch.cat([grad.float() for grad in grads])
        if factor != 1:
            self.gradient_sums().mul_(factor)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        if has_no_sums:
            self.master.grad = None
        self.write()

    def write(self) -> None:
        """Give the master weights to the model as they are."""
        parts = self.master.split([len(weight) for weight in self.weights])
        torch._foreach_copy_(self.weights, parts)

    def state(self, kind: str, offset: int, length: int) -> Tensor:
        """Return elements of the master weights, or of one of AdamW's moments, in float32."""
        whole = self.master if kind == "master" else self.moments[kind]
        return whole.narrow(0, offset, length)

    def restore(self, kind: str, offset: int, values: Tensor) -> None:
        """Take back what `state` returned and the caller wrote to; here it is the state itself, so nothing is done."""

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return int(self.moments["step"])

    @updates.setter
    def updates(self, number: int) -> None:
        self.moments["step"].fill_(number)

    @property
    def moments(self) -> dict[str, Tensor]:
        """AdamW's state; it is created as zeros if no update has happened yet."""
        state = self.optimizer.state[self.master]
        if not state:
            state["step"] = torch.zeros(())  # on the host, where torch's AdamW has it too
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(self.master)
        return state


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """This rank's part of one trained parameter.

    shape: of the whole parameter. The slice has `length` of the parameter's elements, from `start` on; with padding it
    has `size` on every rank. It lies in the master weights of its sub-group from `offset` on.
    """

    name: str
    shape: torch.Size
    start: int
    length: int
    size: int
    offset: int
    parameter: nn.Parameter
    sub_group: SubGroup

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def sum(self) -> Tensor:
        """The memory in which the slice's gradients are added, float32 [length]."""
        return self.sub_group.gradient_sums().narrow(0, self.offset, self.length)

    def state(self, kind: str) -> Tensor:
        """Return the float32 "master" weights, or one of AdamW's moments."""
        return self.sub_group.state(kind, self.offset, self.length)

    def whole_master(self, device: torch.device) -> Tensor:
        """Return all ranks' master weights of the parameter, in host memory; all ranks call it together."""
        local = self.sub_group.master.narrow(0, self.offset, self.size).to(device)
        whole = local.new_empty(self.size * dist.get_world_size())
        dist.all_gather_into_tensor(whole, local)
        return whole[: self.numel].view(self.shape).cpu()
