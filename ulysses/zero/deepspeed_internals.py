"""Everything the engine uses of DeepSpeed beyond its documented interface, each use with its reason.

    parameter    cut into as many equal flat slices as there are ranks, padded with zeros; rank r owns slice r
    sub-group    parameters whose slices lie one after the other in one flat float32 tensor, its master weights

Nothing else in this repository touches these attributes. They may change with any release, so pyproject.toml
pins the version they were tested with, and a run with another one is refused.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ulysses.gradients.gradients import GradientSlice
from ulysses.zero.update import ParameterGroup, Update, update_of

TESTED = "0.19.8"
AHEAD = 2  # layers that the host may run ahead of the GPU


def wrong_version() -> str:
    """Return a sentence if the installed DeepSpeed is not the release that the tests know, or an empty text."""
    found = deepspeed.__version__
    other = f"deepspeed {found} is installed, whose gradients and updates this engine was not tested with; install "
    return "" if found == TESTED else f"{other}deepspeed {TESTED}"


@dataclass(frozen=True, kw_only=True)
class ParameterSlice(GradientSlice):
    """This rank's part of one trained parameter; `grad` is what the optimizer reads."""

    parameter: nn.Parameter
    size: int  # elements of every rank's slice, padding included
    master: Tensor  # the sub-group's master weights
    offset: int  # of the slice in the sub-group's flat tensors


def skip_compiled_collective() -> None:
    """Keep DeepSpeed from compiling a collective for CPUs with the host's compiler; gloo does the same work.

    The build takes half a minute, and a killed one leaves a lock that every later run waits for.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def gathered_in_place(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for `zero.Init` whose parameters are each gathered straight into their own memory.

    DeepSpeed's coalesced gather copies every layer once more between the gather and its first use. Only the
    parameters may read this setting: an engine that reads it stops gathering ahead.
    """
    zero = {**config["zero_optimization"], "stage3_allgather_sequential": True}
    return {**config, "zero_optimization": zero}


def own_slice(parameter: Any) -> tuple[Tensor, int, int]:
    """Return this rank's flat slice, its start in the flattened parameter and its length without padding."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(dist.get_rank() * size, numel)
    return parameter.ds_tensor.view(-1), start, min(size, numel - start)


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter: between its uses a partitioned one is empty itself."""
    return getattr(parameter, "ds_shape", parameter.shape)


def stay_whole(parameter: Any, own: Tensor, whole: Tensor) -> None:
    """Let a parameter be whole from now on; this rank's slice becomes a part of the whole."""
    parameter.ds_tensor.data = own
    parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def take_over_weights(engine: Any) -> None:
    """Let a new engine's weights lie elsewhere, always whole: DeepSpeed forgets its flat copies, and the modules are plain.

    They then have no hooks, and no dicts that watch every access to a parameter. A model that is being built has no
    hooks of its own.
    """
    engine.optimizer.lp_param_buffer = engine.optimizer.fp16_partitioned_groups_flat = None
    for module in engine.module.modules():
        module._parameters = module._original_parameters
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()


class SubGroup(NamedTuple):
    """Parameters whose master weights are updated together."""

    scope: str
    parameters: list[nn.Parameter]
    update: Update


class ShardedWeights:
    """Weights that are released after each use: DeepSpeed gathers a unit's when it begins, and those of the next ahead.

    Args:
        engine: what `deepspeed.initialize` returned for the model.
        units: modules that DeepSpeed gathers as a whole.
    """

    def __init__(self, engine: Any, units: Sequence[nn.Module]) -> None:
        # a frozen model's engine has this alone
        self._offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        # DeepSpeed learns in which order the modules run, to gather ahead and to know what may stay gathered.
        # Passes without a backward half have an order of their own: if one coordinator saw both kinds, it
        # would never learn either order.
        self._forward_only = copy.copy(self._offload.param_coordinator)
        self._forward_only._clear_trace_structures()
        self._begun: deque[torch.cuda.Event] = deque()
        if torch.cuda.is_available():
            for unit in units:
                unit.register_forward_pre_hook(self._stay_near, prepend=True)

    def _stay_near(self, *_: Any) -> None:
        """Keep the host from issuing gathers far ahead: gathered layers would fill the memory."""
        self._begun.append(torch.cuda.current_stream().record_event())
        if len(self._begun) > AHEAD:
            self._begun.popleft().synchronize()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Gather in the order learnt from such passes: with a backward half, or without one where gradients are off."""
        training = self._offload.param_coordinator
        if not torch.is_grad_enabled():
            self._offload.param_coordinator = self._forward_only
        try:
            yield
        finally:
            self._offload.param_coordinator = training

    def backward_done(self) -> None:
        """Release what a backward pass has left whole, such as a unit whose input needs no gradient."""
        self._offload.release_backward_leftovers()

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Return the context in which these parameters are whole; all ranks enter and leave it together."""
        return deepspeed.zero.GatheredParameters(parameters)

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Let every rank change its slices inside: nothing is whole then, and small parameters are so again after."""
        self._offload.partition_all_parameters()
        yield
        if small := self._offload.persistent_parameters:
            small[0].all_gather(small)

    def written(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that the slices of these hold new values; they are gathered when they are used."""

    def close(self) -> None:
        """DeepSpeed removes its hooks itself."""


class Partition:
    """One rank's float32 master weights, gradients and optimizer state, as DeepSpeed's ZeRO-3 optimizer lays them out.

    Args:
        engine: what `deepspeed.initialize` returned for a trained model, whose weights lie where they stay.
        groups: the parameter groups, in the optimizer's order.
    """

    def __init__(self, engine: Any, groups: Sequence[ParameterGroup]) -> None:
        zero = engine.optimizer
        # DeepSpeed would take the gradients, which the engine reduces itself
        for hook in (*zero._grad_acc_hooks, *zero._leaf_module_hooks):
            hook.remove()
        self.masters: list[Tensor] = zero.fp32_partitioned_groups_flat
        # Master weights on the host have gradients from the start. On the GPU DeepSpeed would assign
        # them anew in each step, and take them away again.
        if not zero.offload_optimizer:
            sizes = [master.numel() for master in self.masters]
            for master, gradient in zip(
                self.masters, zero.grad_partitions_flat_buffer.split(sizes)
            ):
                master.grad = gradient  # a view: no copy is needed
        names = {p: name for name, p in engine.module.named_parameters()}
        self.slices: list[ParameterSlice] = []
        self.sub_groups: list[SubGroup] = []
        for index, (master, parameters) in enumerate(zip(self.masters, zero.fp16_groups)):
            number, offset = zero.sub_group_to_group_id[index], 0
            scope = groups[number].scope
            for p in parameters:
                _, start, length = own_slice(p)
                self.slices.append(
                    ParameterSlice(
                        names[p],
                        whole_shape(p),
                        p.ds_numel,
                        master.grad[offset : offset + length],
                        start,
                        scope,
                        parameter=p,
                        size=p.partition_numel(),
                        master=master,
                        offset=offset,
                    )
                )
                offset += p.partition_numel()
            settings = zero.optimizer.param_groups[number]
            own = [p.ds_tensor.view(-1) for p in parameters]
            update = update_of(zero.optimizer, settings, master, own)
            self.sub_groups.append(SubGroup(scope, parameters, update))


def empty(engine: Any, *more: Any) -> None:
    """Remove DeepSpeed's hooks and free the memory of the model and of `more`; nothing may be used afterwards.

    DeepSpeed's own tables refer to the model as long as the process lives, so its tensors are emptied.
    """
    engine.destroy()
    parameters = list(engine.module.parameters())
    held = [p.ds_tensor for p in parameters], vars(engine.optimizer)
    for tensor in tree_leaves([parameters, *held, *more]):
        if isinstance(tensor, Tensor):
            for memory in (tensor, tensor.grad):
                if memory is not None and memory.untyped_storage().resizable():
                    memory.untyped_storage().resize_(0)
