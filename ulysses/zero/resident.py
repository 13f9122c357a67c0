"""Weights that stay whole on every rank: gathered once after each update, without any of DeepSpeed's hooks.

    one flat tensor    | matrix a: slice of rank 0, of rank 1, ... | matrix b: slice of rank 0, ... | ... | vectors
    after an update    every rank has written its own slices; an all-gather per unit brings those of the others

ZeRO-3 goes on sharding the master weights, the optimizer's state and the gradients. Its slices of the weights become
parts of the flat tensor, so nothing is held twice, and on one process nothing is ever gathered, copied or freed.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero.deepspeed_internals import own_slice, stay_whole

ALIGNMENT = 64  # elements between the starts of parameters: kernels read aligned matrices faster


class ResidentWeights:
    """All weights of a partitioned module, whole; the ranks make it together, and call `gather` together.

    Args:
        module: built by `build_partitioned`; afterwards its parameters are plain tensors.
        units: modules, in the order of their use, each of which waits for its own weights only; the rest of the
            weights arrives before them all.
    """

    def __init__(self, module: nn.Module, units: Iterable[nn.Module] = ()) -> None:
        self.world = dist.get_world_size()
        # matrices first: those that one product can take together then have no bias between them
        parameters = sorted(module.parameters(), key=lambda p: -len(p.ds_shape))
        sizes = [parameter.partition_numel() * self.world for parameter in parameters]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        first = own_slice(parameters[0])[0]
        self.device = first.device
        flat = torch.empty(sum(room), dtype=first.dtype, device=self.device)
        self._wholes: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # with padding, and this rank's slice
        for parameter, size, part in zip(parameters, sizes, flat.split(room)):
            whole = part[:size]
            own = whole.chunk(self.world)[dist.get_rank()]
            own.copy_(own_slice(parameter)[0])
            stay_whole(parameter, own, whole)
            self._wholes[parameter] = whole, own
        # Gathers on their way; None is for what belongs to no unit, which is used first and last.
        self._coming: dict[nn.Module | None, Any] = {}
        self._units: dict[nn.Module | None, list[nn.Parameter]] = {None: []}
        of_units = {p: unit for unit in units for p in unit.parameters()}
        for parameter in parameters:
            self._units.setdefault(of_units.get(parameter), []).append(parameter)
        self._hooks = [
            unit.register_forward_pre_hook(self._wait_for)
            for unit in self._units
            if unit is not None and self.world > 1
        ]
        self.gather()

    def gather(self) -> None:
        """Begin to bring every rank's slices to all ranks; a unit's forward, or `wait`, waits for them."""
        if self.world == 1:
            return
        self.wait()
        for unit, parameters in self._units.items():
            with dist._coalescing_manager(async_ops=True) as coming:
                for parameter in parameters:
                    dist.all_gather_into_tensor(*self._wholes[parameter])
            self._coming[unit] = coming

    def wait(self, *, units: bool = True) -> None:
        """Wait for what is still on its way: everything, or all but the units, which wait for themselves."""
        for unit in list(self._coming) if units else [None]:
            self._wait_for(unit)

    def _wait_for(self, unit: nn.Module | None, *_: Any) -> None:
        coming = self._coming.pop(unit, None)
        if coming is not None:
            coming.wait()

    def close(self) -> None:
        """Let gathers end, and remove the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
