"""Everything the engine uses of DeepSpeed beyond its documented interface, each use with its reason.

Nothing else in this repository touches these attributes. They may change with any release, so pyproject.toml
pins the version they were tested with, and a run with another one is refused.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn

from ulysses.environment import without_compiler
from ulysses.zero.partition import Shard, shard_of
from ulysses.zero.update import is_pinned

AHEAD = 2  # layers that the host may run ahead of the GPU


def build_sharded(create: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    """Create a model inside ZeRO-3's partitioned construction: no process ever holds the whole model."""
    if not torch.cuda.is_available():
        # DeepSpeed would compile a collective for CPUs with the host's compiler; gloo does the same work. The build
        # takes half a minute, and a killed one leaves a lock that every later run waits for.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # which torch has done; DeepSpeed notes it
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    # Each parameter is gathered straight into its own memory: the coalesced gather copies every layer once more between
    # the gather and its first use. The engine may not read this setting: it would stop gathering ahead.
    zero = {**config["zero_optimization"], "stage3_allgather_sequential": True}
    with deepspeed.zero.Init(config_dict_or_path={**config, "zero_optimization": zero}):
        model = create()
    parameter: Any
    for parameter in model.parameters():
        if hasattr(parameter, "in_float32"):  # which zero.Init takes from every tensor
            for tensor in (parameter, parameter.ds_tensor):
                tensor.data = tensor.data.float()
        parameter.shard = Shard(parameter.ds_tensor, parameter.ds_shape)
    return model


class ShardedWeights:
    """Weights that are released after each use: DeepSpeed gathers a unit's when it begins, and those of the next ahead.

    Args:
        model: from `build_sharded`.
        config: `deepspeed` of ulysses.zero.settings.derive.
        units: modules that DeepSpeed gathers as a whole.
    """

    def __init__(
        self, model: nn.Module, config: dict[str, Any], units: Sequence[nn.Module]
    ) -> None:
        if units:
            deepspeed.utils.set_z3_leaf_modules(model, list({type(unit) for unit in units}))
        # without an optimizer DeepSpeed does nothing else than this
        with without_compiler():  # it imports Muon, which it compiles and nobody uses here
            self._engine, self._offload, *_ = deepspeed.initialize(model=model, config=config)
        # DeepSpeed learns in which order the modules run, to gather ahead and to know what may stay gathered.
        # Passes without a backward half have an order of their own: if one coordinator saw both kinds, it
        # would never learn either order.
        self._forward_only = copy.copy(self._offload.param_coordinator)
        self._forward_only._clear_trace_structures()
        # Each slice was cut off between large allocations; side by side they leave no holes in the GPU's memory.
        for dtype in {p.dtype for p in model.parameters() if p.requires_grad}:
            trained = [p for p in model.parameters() if p.requires_grad and p.dtype == dtype]
            own = [shard_of(p).own for p in trained]
            if is_pinned(own[0]):
                break
            for held, part in zip(own, torch.cat(own).split([len(x) for x in own])):
                held.data = part
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
        """Remove DeepSpeed's hooks."""
        self._engine.destroy()
