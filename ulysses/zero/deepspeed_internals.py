"""Everything the engine uses of DeepSpeed beyond its documented interface, each use with its reason.

    parameter    cut into as many equal flat slices as there are ranks, padded with zeros; rank r owns slice r
    sub-group    parameters whose slices lie one after the other in one flat float32 tensor, its master weights

Nothing else in this repository touches these attributes. They may change with any release, so pyproject.toml
pins the version they were tested with, and a run with another one is refused.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ulysses.gradients.gradients import GradientSlice
from ulysses.zero.update import OnePassUpdate

TESTED = "0.19.8"


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
    """Return the shape of the whole parameter; between its uses a partitioned parameter is empty itself."""
    return parameter.ds_shape


def leave_gradients_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Keep DeepSpeed from reducing these gradients: `ds_grad_is_ready = False` is its own word for "not yet".

    Its hooks still run. Those of leaf modules come before ours, because the engine registers its own later,
    and fill in zeros where a parameter of the module has no gradient.
    """
    for parameter in parameters:
        parameter.ds_grad_is_ready = False  # type: ignore[attr-defined]


def stay_whole(parameter: Any, own: Tensor, whole: Tensor) -> None:
    """Let a parameter be whole from now on; this rank's slice becomes a part of the whole."""
    parameter.ds_tensor.data = own
    parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
    parameter.ds_status = ZeroParamStatus.AVAILABLE


def remove_hooks(engine: Any) -> None:
    """Make the modules of a new engine plain again: no hooks, and no dicts that watch every access to a parameter.

    A model that is being built has no hooks of its own.
    """
    for module in engine.module.modules():
        module._parameters = module._original_parameters
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()


class Partition:
    """One rank's float32 master weights, gradients and optimizer state, as DeepSpeed's ZeRO-3 optimizer lays them out.

    `engine` is what `deepspeed.initialize` returned for a trained model; `resident` holds its weights if they stay
    whole, and DeepSpeed then neither gathers nor frees them.
    """

    def __init__(self, engine: Any, resident: Any = None) -> None:
        self._zero, self._resident = engine.optimizer, resident
        self.masters: list[Tensor] = self._zero.fp32_partitioned_groups_flat
        # Master weights on the host have gradients from the start. On the GPU DeepSpeed would assign
        # them anew in each step, and take them away again.
        if not self._zero.offload_optimizer:
            sizes = [master.numel() for master in self.masters]
            flat = self._zero.grad_partitions_flat_buffer.split(sizes)
            for master, gradient in zip(self.masters, flat):
                master.grad = gradient  # a view: no copy is needed
        names = {p: name for name, p in engine.module.named_parameters()}
        self.slices = list(self._slices(names))
        # of all sub-groups, or none: then torch's optimizer updates them
        self.updates: list[OnePassUpdate] = []
        for index, (master, parameters) in enumerate(zip(self.masters, self._zero.fp16_groups)):
            own = [p.ds_tensor.view(-1) for p in parameters]
            update = OnePassUpdate(self._zero.optimizer, self._group(index), master, own)
            if update.usable:
                self.updates.append(update)
        if resident is not None:
            self._zero.lp_param_buffer = self._zero.fp16_partitioned_groups_flat = None
            return
        # DeepSpeed learns in which order the modules run, to gather ahead and to know what may stay gathered.
        # Passes without a backward half have an order of their own: if one coordinator saw both kinds, it
        # would never learn either order.
        self._forward_only = copy.copy(self._zero.parameter_offload.param_coordinator)
        self._forward_only._clear_trace_structures()

    def _slices(self, names: dict[nn.Parameter, str]) -> Iterator[ParameterSlice]:
        zero = self._zero
        for index, parameters in enumerate(zero.fp16_groups):
            group = self._group(index)
            master, offset = self.masters[index], 0
            for p in parameters:
                _, start, length = own_slice(p)
                yield ParameterSlice(
                    names[p],
                    whole_shape(p),
                    p.ds_numel,
                    master.grad[offset : offset + length],
                    start,
                    group.get("scope", "default"),
                    parameter=p,
                    size=p.partition_numel(),
                    master=master,
                    offset=offset,
                )
                offset += p.partition_numel()

    def _group(self, index: int) -> dict[str, Any]:
        """Return the optimizer's parameter group to which a sub-group belongs."""
        return self._zero.optimizer.param_groups[self._zero.sub_group_to_group_id[index]]

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Gather weights for a pass without a backward half, in the order learnt from such passes."""
        offload = self._zero.parameter_offload
        training, offload.param_coordinator = offload.param_coordinator, self._forward_only
        try:
            yield
        finally:
            offload.param_coordinator = training

    @torch.no_grad()
    def publish(self, factors: dict[str, float] | None = None) -> None:
        """Give the master weights to the model, after an update or a change from outside.

        For an update, `factors` are what each scope's gradients are still to be multiplied by.

        These are the parts of DeepSpeed's own step without its norm and its search for overflows, which would
        read every gradient twice more: the gradient policies have looked at the gradient, checked it and
        clipped it already.
        """
        zero, resident = self._zero, self._resident
        if resident is None:
            zero._partition_all_parameters()
        else:
            resident.wait()
        for group, (master, parameters) in enumerate(zip(self.masters, zero.fp16_groups)):
            if factors and self.updates:
                self.updates[group](factors[self._group(group).get("scope", "default")])
            else:
                if factors:
                    zero._optimizer_step(group)
                if resident is None:
                    zero._reassign_or_swap_out_partitioned_parameters(group)
                else:
                    own = [p.ds_tensor for p in parameters]
                    torch._foreach_copy_(own, master.split([slice.numel() for slice in own]))
            if resident is not None:  # the next group is updated while this one is gathered
                resident.gather(parameters)
        if resident is None:
            zero._post_step(set())  # gathers the small parameters that are kept whole

    def begin_step(self) -> None:
        """Let DeepSpeed forget the backward passes so far; the master weights keep their gradients."""
        self._zero.zero_grad()

    def tensors(self) -> list[Any]:
        """Return everything that takes memory for training."""
        moments = self._zero.optimizer.state.values()
        # weights, and the buffer of gradients, which takes its memory under offload too
        own = tree_leaves([vars(self._zero), *moments])
        return [*own, *(master.grad for master in self.masters)]


def empty(engine: Any, module: nn.Module, partition: Partition | None) -> None:
    """Remove DeepSpeed's hooks and free the model's memory; nothing of it may be used afterwards.

    DeepSpeed's own tables refer to the model as long as the process lives, so its tensors are emptied.
    """
    if engine is not None:
        engine.destroy()
    tensors = [t for p in module.parameters() for t in (p.data, p.grad, p.ds_tensor)]
    if partition is not None:
        tensors += partition.tensors()
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().resizable():
            tensor.untyped_storage().resize_(0)
