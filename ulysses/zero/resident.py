"""Weights that stay whole on every rank: gathered once after each update, without any of DeepSpeed's hooks.

    a module's tensor    | matrix a: slice of rank 0, of rank 1, ... | matrix b: slice of rank 0, ... | ... | vectors
    after an update      every rank has written its slices; all-gathers bring those of the others while the rank goes on

The master weights, the optimizer's state and the gradients are sharded as in ZeRO-3. This rank's slices of the weights
are parts of the modules' tensors, so that nothing is held twice, and on one process nothing is ever gathered, copied or
freed. DeepSpeed is not even imported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import mode
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ulysses.environment import NODE
from ulysses.parallel.mesh import gather
from ulysses.zero.update import Shard

ALIGNMENT = 64  # parameters start at multiples of so many elements: kernels read them faster
HASHED = 1 << 18  # numbers of eight bytes that bits_hash takes at a time
FACTOR = 0x5DEECE66D  # odd


def build_whole(create: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Create a model whose parameters are whole and uninitialised.

    All have `dtype` but for bytes and Float32Parameters of models/modules.py. Parameters of one dtype and one last name
    in the modules of one parent, such as the weights of an attention's projections, lie one after the other.
    """
    with torch.device("meta"):  # which has no memory
        model = create()
    neighbours: dict[Any, list[Any]] = defaultdict(list)
    for name, p in model.named_parameters():
        module, _, last = name.rpartition(".")
        parent = module.rpartition(".")[0]
        own_dtype = dtype if p.is_floating_point() else p.dtype
        if hasattr(p, "in_float32"):
            own_dtype = torch.float32
        neighbours[parent, last, own_dtype].append(p)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = dist.get_world_size()
    for (_, _, own_dtype), parameters in neighbours.items():
        # matrices first, so that nothing lies between those that one product can take together
        parameters.sort(key=lambda p: -p.dim())
        # elements of all ranks' equal slices, and up to where the next parameter may start
        sizes = [-(-p.numel() // world) * world for p in parameters]
        rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        memory = torch.empty(sum(rooms), dtype=own_dtype, device=device)
        for p, size, room in zip(parameters, sizes, memory.split(rooms)):
            whole = room[:size]
            # `data` has a version counter of its own, so that autograd sees no change of a parameter in its neighbours'
            allocated: Any = type(p)(whole[: p.numel()].view(p.shape).data, p.requires_grad)
            allocated.shard = Shard(whole.chunk(world)[dist.get_rank()], p.shape, whole)
            # every reference to the parameter stays valid
            torch.utils.swap_tensors(p, allocated)
    return model


class ResidentWeights:
    """Weights that are kept after each use; all ranks construct it together, and call `rewritten` together.

    Args:
        model: from `build_whole`.
        units: modules; each waits for its own weights alone.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self.world = dist.get_world_size()
        self._names, self._parameters = zip(*model.named_parameters())
        self.device = self._parameters[0].device
        self._coming: dict[nn.Parameter, Any] = {}  # handles of gathers on their way
        parameters_of = {unit: list(unit.parameters()) for unit in units}
        of_units = {p for of_unit in parameters_of.values() for p in of_unit}
        # the model's forward waits for the parameters that belong to no unit
        parameters_of[model] = [p for p in self._parameters if p not in of_units]
        self._parameters_of = parameters_of if self.world > 1 else {}
        self._hooks = [m.register_forward_pre_hook(self._begins) for m in self._parameters_of]
        self.rewritten(self._parameters)

    def _begins(self, module: nn.Module, _: Any) -> None:
        """Wait for the parameters of a module whose forward pass begins."""
        self.wait(self._parameters_of[module])

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
    def rewriting(self) -> Iterator[None]:
        """Let every rank change its slices in the block, and say with `rewritten` which of them are done."""
        self.wait(self._parameters)
        yield

    def rewritten(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to bring every rank's new slices of the parameters to all ranks; `wait` before any of them is read."""
        if self.world == 1:
            return
        parameters = list(parameters)
        gathers: Any = nullcontext()  # gloo takes one gather after the other
        if self.device.type != "cpu":
            gathers = dist._coalescing_manager(async_ops=True)
        with gathers as handle:
            for parameter in parameters:
                dist.all_gather_into_tensor(parameter.shard.whole, parameter.shard.local)
        self._coming |= dict.fromkeys(parameters, handle)

    def wait(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for the gathers of these parameters that have not ended yet."""
        # parameters that are gathered together have one handle, for which one wait is enough
        handles = {self._coming.pop(p, None) for p in parameters}
        handles.discard(None)
        for handle in handles:
            handle.wait()

    @torch.no_grad()
    def check_copies(self) -> None:
        """Compare the ranks' copies of every parameter; all ranks call it together.

        A bit that flips in the memory of one rank would be trained on, and saved.
        Raises FloatingPointError naming a rank and the parameter of which it holds another copy than most.
        """
        if self.world == 1:
            return
        self.wait(self._parameters)
        hashes = torch.stack([bits_hash(p.data) for p in self._parameters])
        nodes, hashes_by_rank = zip(*gather((NODE, hashes.tolist())))
        for name, of_ranks in zip(self._names, zip(*hashes_by_rank)):
            usual = mode(of_ranks)
            for rank, copy in enumerate(of_ranks):
                if copy != usual:
                    other = of_ranks.index(usual)
                    raise FloatingPointError(
                        f"{name} of rank {rank} on {nodes[rank]} is not that of rank {other} on {nodes[other]}, though "
                        "each holds a copy: the memory or the processor of one of them has made an error, and nothing "
                        "is saved of this step; leave that machine out and continue with --run.resume auto"
                    )

    def close(self) -> None:
        """Let gathers end, and remove the hooks."""
        self.wait(self._parameters)
        for hook in self._hooks:
            hook.remove()


def bits_hash(tensor: Tensor) -> Tensor:
    """Return an int64 hash of the tensor's bytes and their places, which any single change of a number changes."""
    data = tensor.reshape(-1).view(torch.uint8)
    rest = len(data) % 8
    # odd factors, all different, lose no bit
    factors = torch.arange(1, 2 * HASHED, 2, device=tensor.device)
    total = (data[len(data) - rest :] * factors[:rest]).sum()
    for part in data[: len(data) - rest].view(torch.int64).split(HASHED):
        total = total * FACTOR + (part * factors[: len(part)]).sum()
    return total
