"""Weights that stay whole on every rank: gathered once after each update, without any of DeepSpeed's hooks.

    a module's tensor    | matrix a: slice of rank 0, of rank 1, ... | matrix b: slice of rank 0, ... | ... | vectors
    after an update      every rank has written its own slices; all-gathers bring those of the others while it goes on

The master weights, the optimizer's state and the gradients are sharded as ZeRO-3 does it. This rank's slices of the
weights are parts of these tensors, so nothing is held twice, and on one process nothing is ever gathered, copied or
freed. DeepSpeed has no part in it and is not even imported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ulysses.parallel.mesh import HOST_WAITS
from ulysses.zero.partition import Shard, shard_of

ALIGNMENT = 64  # elements between the starts of parameters: kernels read aligned ones faster


def build_whole(create: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Create a model whose parameters are whole and uninitialised; all but bytes and `Exact` ones are of `dtype`."""
    with torch.device("meta"):  # which has no memory
        model = create()
    siblings: dict[Any, list[Any]] = defaultdict(list)
    for name, p in model.named_parameters():
        module, _, last = name.rpartition(".")
        parent = module.rpartition(".")[0]
        own = torch.float32 if hasattr(p, "in_float32") else dtype
        siblings[parent, last, own if p.is_floating_point() else p.dtype].append(p)
    device, world = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    for (*_, own), parameters in siblings.items():
        # matrices first: those that one product can take together then have nothing between them
        parameters.sort(key=lambda p: -p.dim())
        sizes = [-(-p.numel() // world) * world for p in parameters]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        flat = torch.empty(sum(room), dtype=own, device=device)
        for p, size, rest in zip(parameters, sizes, flat.split(room)):
            whole = rest[:size]
            # `data` counts its own changes: an update of one parameter is none of its neighbours
            made: Any = type(p)(whole[: p.numel()].view(p.shape).data, p.requires_grad)
            made.shard = Shard(whole.chunk(world)[dist.get_rank()], p.shape, whole)
            torch.utils.swap_tensors(
                p, made
            )  # whoever refers to the parameter goes on doing so
    return model


class ResidentWeights:
    """Weights that are kept after each use; the ranks make it together, and call `written` together.

    Args:
        model: from `build_whole`.
        units: modules each of which waits for its own weights only.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self.world = dist.get_world_size()
        self._parameters = list(model.parameters())
        self.device = self._parameters[0].device
        self._coming: dict[nn.Parameter, Any] = {}  # gathers on their way
        waiting = {unit: list(unit.parameters()) for unit in units}
        of_units = {p for of_unit in waiting.values() for p in of_unit}
        # what belongs to no unit is waited for before a pass begins
        waiting[model] = [p for p in self._parameters if p not in of_units]
        self._hooks = [
            waits.register_forward_pre_hook(lambda *_, own=own: self.wait(own))
            for waits, own in waiting.items()
            if self.world > 1
        ]
        self.written(self._parameters)

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
        self.wait(self._parameters)
        yield

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
                shard: Any = shard_of(parameter)
                dist.all_gather_into_tensor(shard.whole, shard.own)
        self._coming |= dict.fromkeys(parameters, coming)

    def _gather_on_host(self, parameters: list[nn.Parameter]) -> None:
        """Gather slices side by side: gloo would take the first tensor's memory for each of those gathered together."""
        owns, _, wholes = zip(*map(shard_of, parameters))
        own = torch.cat(owns)
        everyone = own.new_empty(self.world, len(own))
        with HOST_WAITS:
            dist.all_gather_into_tensor(everyone.view(-1), own)
        for whole, part in zip(wholes, everyone.split([len(x) for x in owns], 1)):
            whole.view(self.world, -1).copy_(part)

    def wait(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for those of these parameters that are still on their way."""
        for coming in {self._coming.pop(p, None) for p in parameters} - {None}:
            coming.wait()

    def close(self) -> None:
        """Let gathers end, and remove the hooks."""
        self.wait(self._parameters)
        for hook in self._hooks:
            hook.remove()
