"""What this rank updates: its slices of the weights in float32, their gradients, and the optimizer's state.

    parameter    cut into as many equal flat slices as there are ranks, padded with zeros; rank r owns slice r
    sub-group    parameters whose slices lie one after the other in one flat float32 tensor, the master weights

The update is AdamW's (Loshchilov & Hutter 2019): torch's, or that of gpu_kernels.py on a GPU, or eight_bit.py's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw


@dataclass(eq=False)
class Shard:
    """What this rank has of a parameter; it is the parameter's attribute `shard` from the model's construction on.

    local: its flat slice, padding included; writing to it changes the weights. shape: of the whole parameter. whole:
    the flat whole with its padding, of which `local` is a part, if the whole stays on every rank; else None.

    numel: elements of the whole parameter. The slice has `length` of them, from `start` on, and with padding it has
    `size` on every rank.
    """

    local: Tensor
    shape: torch.Size
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.numel, self.size = self.shape.numel(), len(self.local)
        self.start = min(dist.get_rank() * self.size, self.numel)
        self.length = min(self.size, self.numel - self.start)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one update treats alike.

    scope: gradient policies clip the gradients of a scope by their common norm. lr_factor: times the schedule's
    learning rate. betas, eps: AdamW's. eight_bit: whether the moments are quantised (eight_bit.py).
    """

    parameters: list[nn.Parameter]
    weight_decay: float = 0.0
    scope: str = "default"
    lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
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
    slices in float32 [N], one after the other, padding included. moments: AdamW's state, by its names in torch.
    """

    group: ParameterGroup
    parameters: list[nn.Parameter]
    weights: list[Tensor]
    lengths: list[int]
    master: Tensor

    def __post_init__(self) -> None:
        self.moments: dict[Any, Any] = {"step": torch.zeros(())}  # on the host
        for name in ("exp_avg", "exp_avg_sq"):
            self.moments[name] = torch.zeros_like(self.master)

    def slices(self, names: Mapping[nn.Parameter, str]) -> Iterator["ParameterSlice"]:
        """Yield this rank's parts of the parameters, which have these names, in their order."""
        offsets = accumulate(map(len, self.weights), initial=0)
        for p, offset in zip(self.parameters, offsets):
            yield ParameterSlice(names[p], p, p.shard, self, offset)

    def gradient_sums(self) -> Tensor:
        """Return the float32 memory [N] in which the gradients of several micro-batches are added; zeros at first."""
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
        whole = self.master.grad
        if whole is None:
            whole = torch.cat([grad.float() for grad in grads])
        if factor != 1:
            whole.mul_(factor)
        state, group = self.moments, self.group
        beta1, beta2 = group.betas
        adamw(
            params=[self.master],
            grads=[whole],
            exp_avgs=[state["exp_avg"]],
            exp_avg_sqs=[state["exp_avg_sq"]],
            max_exp_avg_sqs=[],
            state_steps=[state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=group.weight_decay,
            eps=group.eps,
            maximize=False,
        )
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
        """Store what the caller has written into the tensor of `state`; here that tensor is the state itself."""

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return int(self.moments["step"])

    @updates.setter
    def updates(self, number: int) -> None:
        self.moments["step"].fill_(number)


@dataclass(frozen=True)
class ParameterSlice:
    """This rank's part of one trained parameter: its shard lies in its sub-group's master weights from `offset` on."""

    name: str
    parameter: nn.Parameter
    shard: Shard
    sub_group: SubGroup
    offset: int

    @property
    def sum(self) -> Tensor:
        """The slice's part of the sub-group's gradient sums, float32 [length], once they are made."""
        return self.sub_group.master.grad.narrow(0, self.offset, self.shard.length)

    def state(self, kind: str) -> Tensor:
        """Return the float32 "master" weights, or one of AdamW's moments."""
        return self.sub_group.state(kind, self.offset, self.shard.length)

    def whole_master(self, device: torch.device) -> Tensor:
        """Return all ranks' master weights of the parameter, in host memory; all ranks call it together."""
        shard = self.shard
        local = self.sub_group.master.narrow(0, self.offset, shard.size).to(device)
        whole = local.new_empty(shard.size * dist.get_world_size())
        dist.all_gather_into_tensor(whole, local)
        return whole[: shard.numel].view(shard.shape).cpu()
