"""This rank's shard of every parameter; the trained ones form sub-groups, each of this rank's slices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero import gpu_kernels
from ulysses.zero.update import ParameterGroup, ParameterSlice, SubGroup

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Shard(NamedTuple):
    """What this rank has of a parameter.

    own: its flat slice, padding included; writing to it changes the weights. shape: of the whole parameter. whole: the
    flat whole with its padding, of which `own` is a part, if it stays on every rank; else None.
    """

    own: Tensor
    shape: torch.Size
    whole: Tensor | None = None

    @property
    def start(self) -> int:
        """Where the slice begins in the flattened parameter."""
        return min(dist.get_rank() * len(self.own), self.shape.numel())

    @property
    def length(self) -> int:
        """The slice's elements without padding."""
        return min(len(self.own), self.shape.numel() - self.start)


def shard_of(parameter: Any) -> Shard:
    """Return this rank's shard of a parameter, as the construction has left it there."""
    return parameter.shard


def sub_groups(
    groups: Sequence[ParameterGroup],
    optimizer: MakeOptimizer,
    *,
    size: int,
    device: torch.device,
) -> Iterator[SubGroup]:
    """Yield sub-groups of about `size` elements on this rank, in the order of the groups.

    Args:
        optimizer: makes an optimizer of tables of parameters, as torch's take them.
        device: of master weights, sums of gradients and state; pinned memory if it is the host of a GPU.
    """
    for group in groups:
        few: list[nn.Parameter] = []
        weights: list[Tensor] = []
        for p in group.parameters:
            few.append(p)
            weights.append(shard_of(p).local)
            if sum(map(len, weights)) < size and p is not group.parameters[-1]:
                continue
            master = torch.cat(weights).to(device, torch.float32)
            pinned = device.type == "cpu" and torch.cuda.is_available()
            if pinned:
                master = master.pin_memory()
            made = optimizer([{"params": [master], "weight_decay": group.weight_decay}])
            kind = SubGroup
            if group.eight_bit:
                from ulysses.zero.eight_bit import EightBitSubGroup

                kind = EightBitSubGroup
            elif master.is_cuda and weights[0].is_cuda:
                if gpu_kernels.one_pass_does(made):
                    kind = gpu_kernels.OnePassSubGroup
            lengths = [shard_of(p).length for p in few]
            yield kind(group, few, weights, lengths, master, made)
            few, weights = [], []


def parameter_slices(model: nn.Module, sub_group: SubGroup) -> Iterator[ParameterSlice]:
    """Yield this rank's parts of a sub-group's parameters."""
    names = {p: name for name, p in model.named_parameters()}
    offset = 0
    for p in sub_group.parameters:
        shard = shard_of(p)
        size = len(shard.local)
        yield ParameterSlice(
            name=names[p],
            shape=shard.shape,
            start=shard.start,
            length=shard.length,
            size=size,
            offset=offset,
            parameter=p,
            sub_group=sub_group,
        )
        offset += size
