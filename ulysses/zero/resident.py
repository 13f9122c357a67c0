"""Weights that stay whole on every rank: gathered once after each update, without any of DeepSpeed's hooks.

    a module's tensor    | matrix a: slice of rank 0, of rank 1, ... | matrix b: slice of rank 0, ... | ... | vectors
    after an update      every rank has written its own slices; all-gathers bring those of the others while it goes on

ZeRO-3 goes on sharding the master weights, the optimizer's state and the gradients. Its slices of the weights become
parts of these tensors, so nothing is held twice, and on one process nothing is ever gathered, copied or freed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.zero.deepspeed_internals import own_slice, stay_whole, whole_shape

ALIGNMENT = 64  # elements between the starts of parameters: kernels read aligned ones faster


class ResidentWeights:
    """Weights that are kept after each use; the ranks make it together, and call `written` together.

    Args:
        model: built by `build_partitioned`; afterwards its parameters are plain tensors.
        units: modules each of which waits for its own weights only.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self.world = dist.get_world_size()
        # of every parameter: the whole with its padding, and this rank's slice
        self._wholes: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        siblings: dict[Any, list[Any]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            parent = name.rpartition(".")[0].rpartition(".")[0]
            siblings[parent, parameter.dtype].append(parameter)
        for parameters in siblings.values():
            self._move(parameters)
        self.device = parameters[0].device
        self._coming: dict[nn.Parameter, Any] = {}  # gathers on their way
        waiting = {unit: list(unit.parameters()) for unit in units}
        of_units = {p for of_unit in waiting.values() for p in of_unit}
        # what belongs to no unit is waited for before a pass begins
        waiting[model] = [p for p in self._wholes if p not in of_units]
        self._hooks = [
            waits.register_forward_pre_hook(lambda *_, own=own: self.wait(own))
            for waits, own in waiting.items()
            if self.world > 1
        ]
        self.written(self._wholes)

    def forward_pass(self) -> AbstractContextManager[None]:
        """Each unit waits for its weights by itself."""
        return nullcontext()

    def backward_done(self) -> None:
        """Keep everything."""

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Wait for these parameters, and return a context in which they are whole."""
        self.wait(parameters)
        return nullcontext()

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Let every rank change its slices inside, and say of each with `written` when it is done."""
        self.wait(self._wholes)
        yield

    def _move(self, parameters: list[Any]) -> None:
        """Lay the wholes of some parameters one after the other, this rank's slices in their places."""
        # matrices first: those that one product can take together then have no bias between them
        parameters = sorted(parameters, key=lambda p: -len(whole_shape(p)))
        owns = [own_slice(p)[0] for p in parameters]
        sizes = [len(own) * self.world for own in owns]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        flat = owns[0].new_empty(sum(room))
        for parameter, own, size, part in zip(parameters, owns, sizes, flat.split(room)):
            whole = part[:size]
            place = whole.chunk(self.world)[dist.get_rank()]
            stay_whole(parameter, place.copy_(own), whole)
            self._wholes[parameter] = whole, place

    def written(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to bring every rank's new slices of these to all ranks; whoever reads them waits for them first."""
        parameters = list(parameters)
        if self.world == 1:
            return
        if self.device.type == "cpu":
            for dtype in dict.fromkeys(p.dtype for p in parameters):
                self._gather_on_host([p for p in parameters if p.dtype == dtype])
            return
        with dist._coalescing_manager(async_ops=True) as coming:
            for parameter in parameters:
                dist.all_gather_into_tensor(*self._wholes[parameter])
        self._coming |= dict.fromkeys(parameters, coming)

    def _gather_on_host(self, parameters: list[nn.Parameter]) -> None:
        """Gather slices side by side: gloo would take the first tensor's memory for each of those gathered together."""
        wholes, owns = zip(*(self._wholes[p] for p in parameters))
        own = torch.cat(owns)
        everyone = own.new_empty(self.world, len(own))
        dist.all_gather_into_tensor(everyone.view(-1), own)
        for whole, part in zip(wholes, everyone.split([len(x) for x in owns], 1)):
            whole.view(self.world, -1).copy_(part)

    def wait(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for those of these parameters that are still on their way."""
        for coming in {self._coming.pop(p, None) for p in parameters} - {None}:
            coming.wait()

    def close(self) -> None:
        """Let gathers end, and remove the hooks."""
        self.wait(self._wholes)
        for hook in self._hooks:
            hook.remove()
