"""Weights that stay whole on every rank: gathered once after each update, without any of DeepSpeed's hooks.

    one flat tensor    | matrix a: slice of rank 0, of rank 1, ... | matrix b: slice of rank 0, ... | ... | vectors
    after an update    every rank has written its own slices; all-gathers bring those of the others while it goes on

ZeRO-3 goes on sharding the master weights, the optimizer's state and the gradients. Its slices of the weights become
parts of the flat tensor, so nothing is held twice, and on one process nothing is ever gathered, copied or freed.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero.deepspeed_internals import own_slice, stay_whole

ALIGNMENT = (
    64  # elements between the starts of parameters: kernels read aligned matrices faster
)


class ResidentWeights:
    """All weights of a partitioned module, whole; the ranks make it together, and call `gather` together.

    Args:
        module: built by `build_partitioned`; afterwards its parameters are plain tensors.
        units: modules each of which waits for its own weights only.
    """

    def __init__(self, module: nn.Module, units: Iterable[nn.Module] = ()) -> None:
        self.world = dist.get_world_size()
        units = list(units)
        # matrices first: those that one product can take together then have no bias between them
        parameters = sorted(module.parameters(), key=lambda p: -len(p.ds_shape))
        sizes = [parameter.partition_numel() * self.world for parameter in parameters]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        first = own_slice(parameters[0])[0]
        self.device = first.device
        flat = torch.empty(sum(room), dtype=first.dtype, device=self.device)
        self._wholes: dict[
            nn.Parameter, tuple[Tensor, Tensor]
        ] = {}  # with padding, and this rank's slice
        for parameter, size, part in zip(parameters, sizes, flat.split(room)):
            whole = part[:size]
            own = whole.chunk(self.world)[dist.get_rank()]
            own.copy_(own_slice(parameter)[0])
            stay_whole(parameter, own, whole)
            self._wholes[parameter] = whole, own
        self._coming: dict[nn.Parameter, Any] = {}  # gathers on their way
        of_units = {p for unit in units for p in unit.parameters()}
        self._others = [p for p in parameters if p not in of_units]  # used first and last
        self._hooks = [
            unit.register_forward_pre_hook(lambda unit, _: self.wait(unit.parameters()))
            for unit in units
            if self.world > 1
        ]
        self.gather(parameters)

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to bring every rank's slices of these to all ranks; whoever reads them waits for them first."""
        if self.world == 1:
            return
        parameters = list(parameters)
        with dist._coalescing_manager(async_ops=True) as coming:
            for parameter in parameters:
                dist.all_gather_into_tensor(*self._wholes[parameter])
        self._coming |= dict.fromkeys(parameters, coming)

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait for parameters that are still on their way: for all, or all of these."""
        chosen = list(self._coming) if parameters is None else parameters
        for coming in {self._coming.pop(p, None) for p in chosen} - {None}:
            coming.wait()

    def wait_for_others(self) -> None:
        """Wait for what belongs to no unit."""
        self.wait(self._others)

    def close(self) -> None:
        """Let gathers end, and remove the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
