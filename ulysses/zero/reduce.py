"""Take gradients, while the backward pass goes on, for this rank's slices.

a unit's backward ends    its gradients are whole, in the weights' dtype
one process               gradients of a step's only micro-batch stay as they are until the update; gradients of several
                          micro-batches are written to float32 sums (the first) or added to them
several processes         gradients are first averaged over the processes, in float32 (across_ranks.py)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ulysses.gradients.gradients import GradientSlice
from ulysses.zero.update import ParameterSlice

# The gradients of so many units may wait for their reduction, and take memory, before the host waits too.
IN_FLIGHT = 4
SlicesWithGradients = list[tuple[ParameterSlice, Tensor]]


class GradientReduction:
    """Take every gradient as soon as it is complete; one object per trained engine.

    may_keep: whether gradients of a step's only micro-batch may stay as they are, on the model's device.

    Args:
        slices: of all trained parameters, their sums on the GPU or in (pinned) host memory.
        units: modules whose parameters' gradients are complete when the module's backward is.
        device: of the model.
        gradients_reused: whether the next backward pass writes to the memory of these gradients (memory/graphs.py).
        bucket: gradients with fewer elements that belong to no unit are taken at the end of the backward pass.
    """

    may_keep = True

    def __init__(
        self,
        slices: Iterable[ParameterSlice],
        units: Iterable[nn.Module],
        device: torch.device,
        *,
        gradients_reused: bool,
        bucket: int,
    ) -> None:
        self._slices = list(slices)
        self._gradients_reused = gradients_reused
        self._on_host = self._slices[0].sub_group.master.device.type != device.type
        # whether what is done with gradients runs on a stream of its own, beside the backward pass
        self._works_aside = self._on_host or not self.may_keep
        self._uses_sums = False
        if self._works_aside:
            self._make_sums()
        # At high priority a reduction starts at the next kernel boundary, not behind all queued matrix products.
        self._backend = torch.get_device_module(device)
        self._stream = self._backend.Stream(priority=-1)
        self._events: deque[Any] = deque()
        self._values: dict[str, Tensor] = {}  # of the step's gradient, by the parameters' names
        self._hooks: list[Any] = []
        without_unit = {s.parameter: s for s in self._slices}
        for unit in units:
            of_unit = [without_unit.pop(p) for p in unit.parameters() if p in without_unit]
            hook = partial(self._take, of_unit)
            self._hooks.append(unit.register_full_backward_hook(hook))
        for p, s in without_unit.items():
            if s.shard.numel >= bucket:
                hook = partial(self._take, [s])
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def begin(self, *, only_microbatch: bool) -> None:
        """Begin a backward pass, perhaps that of the step's only micro-batch."""
        if not (only_microbatch or self._uses_sums):
            self._make_sums()

    def _make_sums(self) -> None:
        """Take the memory for sums. All later gradients go there: memory beside the sums was not planned."""
        self._uses_sums = True
        for s in self._slices:
            s.sub_group.gradient_sums()

    def finish(self) -> None:
        """Take the gradients that no hook has taken, and those still collected; call it after each backward pass."""
        self._take(self._slices, last=True)
        if self._gradients_reused:
            self._backend.current_stream().wait_stream(self._stream)

    def gradients(self) -> list[GradientSlice]:
        """Let the current stream (for host memory: the host) wait for the whole step's gradient, and return it.

        Raises:
            RuntimeError: if a parameter received no gradient since the last `forget`, naming it. Every stage gives
                every trained parameter a gradient in every micro-batch, so something else must have taken it.
        """
        missing = [s.name for s in self._slices if s.name not in self._values]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self._slices)} trained parameters received no gradient in this step, the "
                f"first is {missing[0]}; freeze what the loss does not use"
            )
        self._backend.current_stream().wait_stream(self._stream)
        if self._on_host:
            self._events[-1].synchronize()
        return [
            GradientSlice(
                s.name,
                s.shard.shape,
                self._values[s.name],
                s.shard.start,
                s.sub_group.group.scope,
            )
            for s in self._slices
        ]

    def forget(self) -> None:
        """Begin a new step: drop the gradients that were kept; the next gradients overwrite the sums."""
        self._values.clear()

    def close(self) -> None:
        """Remove the hooks and forget the slices."""
        for hook in self._hooks:
            hook.remove()
        self._slices = []
        self.forget()

    @torch.no_grad()
    def _take(self, slices: Iterable[ParameterSlice], *_: Any, last: bool = False) -> None:
        """Take the gradients that parameters have now; `last` says that no more come in this backward pass.

        This is torch's hook too, whose further arguments say nothing more.
        """
        taken = []
        for s in slices:
            grad, s.parameter.grad = s.parameter.grad, None
            if grad is not None:
                taken.append((s, grad.reshape(-1)))
        stream = self._own_stream(taken) if self._works_aside else nullcontext()
        with stream:
            self._receive(taken, last)

    @contextmanager
    def _own_stream(self, grads: SlicesWithGradients) -> Iterator[None]:
        """Work with gradients on the stream of the reductions, after everything queued on the current one so far."""
        if len(self._events) >= IN_FLIGHT:
            self._events.popleft().synchronize()
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            for _, grad in grads:
                if grad.is_cuda:
                    grad.record_stream(self._stream)
            yield
            self._events.append(self._backend.Event())
            self._events[-1].record()

    def _receive(self, means: SlicesWithGradients, last: bool) -> None:
        """Keep this rank's means, or write them to their sums, or add them to what earlier micro-batches wrote."""
        if not self._uses_sums:
            for s, mean in means:
                # two parts of one gradient are added as autograd adds them
                first_part = self._values.get(s.name)
                self._values[s.name] = mean if first_part is None else first_part + mean
            return
        if self._on_host:
            for s, mean in means:
                total = mean.float()
                if s.name in self._values:  # the GPU adds
                    total = s.sum.to(mean.device, non_blocking=True).add_(total)
                s.sum.copy_(total, non_blocking=True)
        else:  # a few kernels for all of them
            first = [(s.sum, mean) for s, mean in means if s.name not in self._values]
            later = [(s.sum, mean) for s, mean in means if s.name in self._values]
            if first:
                torch._foreach_copy_(*zip(*first))
            if later:
                torch._foreach_add_(*zip(*later))
        self._values |= {s.name: s.sum for s, _ in means}
