"""Describe this rank's shard of every parameter, and form sub-groups of the shards that are trained."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero import gpu_kernels
from ulysses.zero.update import ParameterGroup, ParameterSlice, SubGroup


class Shard(NamedTuple):
    """What this rank has of a parameter, whose attribute `shard` it is from the model's construction on.

    local: its flat slice, padding included; writing to it changes the weights. shape: of the whole parameter. whole:
    the flat whole with its padding, of which `local` is a part, if the whole stays on every rank; else None.
    """

    local: Tensor
    shape: torch.Size
    whole: Tensor | None = None

    @property
    def start(self) -> int:
        """Where the slice begins in the flattened parameter."""
        return min(dist.get_rank() * len(self.local), self.shape.numel())

    @property
    def length(self) -> int:
        """The slice's elements without padding."""
        return min(len(self.local), self.shape.numel() - self.start)


def sub_groups(
    groups: Sequence[ParameterGroup], size: int, device: torch.device
) -> Iterator[SubGroup]:
    """Yield sub-groups of about `size` elements on this rank, in the order of the groups.

    Args:
        device: of master weights, sums of gradients and state; pinned memory if it is the host of a GPU.
    """
    for group in groups:
        parameters: list[nn.Parameter] = []
        weights: list[Tensor] = []
        for p in group.parameters:
            parameters.append(p)
            weights.append(p.shard.local)
            if sum(map(len, weights)) < size and p is not group.parameters[-1]:
                continue
            master = torch.cat(weights).to(device, torch.float32)
            pinned = device.type == "cpu" and torch.cuda.is_available()
            if pinned:
                master = master.pin_memory()
            sub_group_class = SubGroup
            if group.eight_bit:
                from ulysses.zero.eight_bit import EightBitSubGroup

                sub_group_class = EightBitSubGroup
            elif gpu_kernels.AVAILABLE and master.is_cuda and weights[0].is_cuda:
                sub_group_class = gpu_kernels.OnePassSubGroup
            lengths = [p.shard.length for p in parameters]
            yield sub_group_class(group, parameters, weights, lengths, master)
            parameters, weights = [], []


def parameter_slices(model: nn.Module, sub_group: SubGroup) -> Iterator[ParameterSlice]:
    """Yield this rank's parts of a sub-group's parameters."""
    names = {p: name for name, p in model.named_parameters()}
    offset = 0
    for p in sub_group.parameters:
        shard = p.shard
        yield ParameterSlice(
            name=names[p],
            shape=shard.shape,
            start=shard.start,
            length=shard.length,
            size=len(shard.local),
            offset=offset,
            parameter=p,
            sub_group=sub_group,
        )
        offset += len(shard.local)
