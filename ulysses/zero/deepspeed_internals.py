"""Everything that the engine uses of DeepSpeed beyond its documented interface, each use with its reason.

No other file touches these attributes. They may change with any release, so pyproject.toml pins the version that they
were tested with, and a run with another version is refused.
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
from ulysses.zero.update import Shard, is_pinned

AHEAD = 2  # layers that the host may run ahead of the GPU


def build_sharded(create: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    """Create a model inside ZeRO-3's partitioned construction: no process ever holds the whole model."""
    if not torch.cuda.is_available():
        # DeepSpeed would compile a collective for CPUs with the host's compiler; gloo does the same work. The build
        # takes half a minute, and a killed one leaves a lock that every later run waits for.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch has started the processes; DeepSpeed takes note of it
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    # Each parameter is gathered straight into its own memory: the coalesced gather copies every layer once more between
    # the gather and its first use. Only zero.Init reads the setting: DeepSpeed's engine would stop gathering ahead.
    zero = {**config["zero_optimization"], "stage3_allgather_sequential": True}
    with deepspeed.zero.Init(config_dict_or_path={**config, "zero_optimization": zero}):
        model = create()
    parameter: Any
    for parameter in model.parameters():
        if hasattr(parameter, "in_float32"):  # zero.Init has cast every parameter to one dtype
            for tensor in (parameter, parameter.ds_tensor):
                tensor.data = tensor.data.float()
        parameter.shard = Shard(parameter.ds_tensor, parameter.ds_shape)
    return model


class ShardedWeights:
    """Weights that are released after each use: DeepSpeed gathers those of the unit that begins, and of the next ahead.

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
        # without an optimizer DeepSpeed gathers and releases weights, and does nothing else
        with without_compiler():  # DeepSpeed imports and compiles Muon, which nobody uses here
            self._engine, self._offload, *_ = deepspeed.initialize(model=model, config=config)
        # DeepSpeed learns in which order the modules run, to gather ahead and to know what may stay gathered.
        # Passes without a backward half have another order: if one coordinator saw both kinds, it would learn neither.
        self._forward_only = copy.copy(self._offload.param_coordinator)
        self._forward_only._clear_trace_structures()
        # Each slice was cut off between large allocations; side by side they leave no holes in the GPU's memory.
        for dtype in {p.dtype for p in model.parameters() if p.requires_grad}:
            trained = [p for p in model.parameters() if p.requires_grad and p.dtype == dtype]
            slices = [p.shard.local for p in trained]
            if is_pinned(slices[0]):
                break
            together = torch.cat(slices).split([len(x) for x in slices])
            for slice_of_parameter, part in zip(slices, together):
                slice_of_parameter.data = part
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
        """Gather in the order of training passes or, where gradients are off, of passes without a backward half."""
        training = self._offload.param_coordinator
        if not torch.is_grad_enabled():
            self._offload.param_coordinator = self._forward_only
        try:
            yield
        finally:
            self._offload.param_coordinator = training

    def backward_done(self) -> None:
        """Release the weights that a backward pass has left whole, such as a unit's whose input needs no gradient."""
        self._offload.release_backward_leftovers()

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Return the context in which these parameters are whole; all ranks enter and leave it together."""
        return deepspeed.zero.GatheredParameters(parameters)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Let every rank change its slices in the block, where no weight is whole; afterwards small ones are again."""
        self._offload.partition_all_parameters()
        yield
        if small := self._offload.persistent_parameters:
            small[0].all_gather(small)

    def rewritten(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: the new values of these slices are gathered when the weights are used."""

    def close(self) -> None:
        """Remove DeepSpeed's hooks."""
        self._engine.destroy()
