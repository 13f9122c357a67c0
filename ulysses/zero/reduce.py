"""Average gradients over all ranks into each rank's float32 slices, while the backward pass goes on.

    a unit's backward ends    its gradients are whole, in the weights' dtype
      inside a node           all-to-all: each rank receives every peer's copy of the slices it is responsible for,
                              and adds these copies in float32, in the order of the ranks
      between nodes           reduce-scatter of the sums among the ranks that have the same place in their nodes
    small gradients           are collected and travel in one float32 all-reduce
    result                    divided by the world size, written to the slice (first micro-batch) or added to it

In bfloat16 this sends half the bytes of a float32 reduce-scatter and needs no float32 copy of every gradient.
It rounds nothing that a float32 sum would not round, while a bfloat16 reduce-scatter rounds at every hop.
Between nodes the partial sums travel in float32 or `between`.

W = N nodes x L ranks, rank = node * L + place; slice r of a parameter belongs to rank r.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ulysses import environment
from ulysses.parallel.mesh import gather
from ulysses.zero.update import ParameterSlice

# Units whose gradients wait for their reduction, and take memory, before the host waits too.
IN_FLIGHT = 4


class GradientReduction:
    """Take every gradient as soon as it is complete; one object per trained engine, made by all ranks together.

    Args:
        slices: of all trained parameters, their gradients on the GPU or in (pinned) host memory.
        units: modules whose parameters' gradients are complete when the module's backward is.
        device: of the model.
        lent: gradients lie in memory that the next backward pass writes again (memory/graphs.py).
        bucket: gradients with fewer elements travel together, in float32 all-reduces of about this many elements.
        between: dtype of the sums that travel between nodes.
    """

    def __init__(
        self,
        slices: Iterable[ParameterSlice],
        units: Iterable[nn.Module],
        device: torch.device,
        *,
        lent: bool,
        bucket: int,
        between: torch.dtype = torch.float32,
    ) -> None:
        self._slices = list(slices)
        self._lent, self._between, self._bucket = lent, between, bucket
        self._world = dist.get_world_size()
        self._on_host = self._slices[0].grad.device.type != device.type
        self._make_groups(ranks_of_a_node())
        # At high priority a reduction starts at the next kernel boundary instead of behind all queued matrix
        # products.
        self._backend = torch.get_device_module(device)
        self._stream = self._backend.Stream(priority=-1)
        self._average: Any = None  # a kernel that also adds to the slice
        if device.type == "cuda" and not self._on_host:
            from ulysses.zero import gpu_kernels

            if gpu_kernels.AVAILABLE:
                self._average = gpu_kernels.average
        self._events: deque[Any] = deque()
        self._waiting: list[tuple[ParameterSlice, Tensor]] = []
        self._written: set[str] = set()
        self._hooks: list[Any] = []
        alone = {s.parameter: s for s in self._slices}
        for unit in units:
            inside = [alone.pop(p) for p in unit.parameters() if p in alone]
            self._hooks.append(unit.register_full_backward_hook(partial(self._take, inside)))
        for p, s in alone.items():
            if s.numel >= bucket:
                hook = p.register_post_accumulate_grad_hook(partial(self._take, [s]))
                self._hooks.append(hook)

    def _make_groups(self, node_size: int) -> None:
        """Make communicators of our own: in a common one, reductions and gathers would wait for each other."""
        self._nodes = self._world // node_size
        self._inside = self._across = self._all = dist.new_group()
        if self._nodes > 1:  # every rank makes every group, in the same order
            nodes = torch.arange(self._world).view(-1, node_size)
            self._inside, _ = dist.new_subgroups_by_enumeration(nodes.tolist())
            self._across, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist())

    def finish(self) -> None:
        """Take what no hook has taken, and send what is still collected; call it after each backward pass."""
        self._take(self._slices, last=True)
        if self._lent:
            self._backend.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Let the current stream (for host memory: the host) wait for all sums of the step.

        Raises:
            RuntimeError: if a parameter received no gradient since the last `forget`, naming it. Every stage gives
                every trained parameter a gradient in every micro-batch, so something else must have taken it.
        """
        missing = [s.name for s in self._slices if s.name not in self._written]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self._slices)} trained parameters received no gradient in this step, the "
                f"first is {missing[0]}; freeze what the loss does not use"
            )
        self._backend.current_stream().wait_stream(self._stream)
        if self._on_host:
            self._events[-1].synchronize()

    def forget(self) -> None:
        """Begin a new step: the next gradients replace what the slices hold."""
        self._written.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Remove the hooks and forget the slices."""
        for hook in self._hooks:
            hook.remove()
        self._slices, self._waiting = [], []

    @torch.no_grad()
    def _take(self, slices: Iterable[ParameterSlice], *_: Any, last: bool = False) -> None:
        """Take the gradients that parameters have now: reduce large ones at once, small ones when there are enough."""
        found = []
        for s in slices:
            grad, s.parameter.grad = s.parameter.grad, None
            if grad is not None:
                found.append((s, grad.reshape(-1)))
        if self._world == 1 and not self._on_host:
            self._store(found)
            return
        with self._on_stream():
            for s, grad in found:
                if grad.is_cuda:
                    grad.record_stream(self._stream)
                if self._world == 1:
                    self._store([(s, grad)])
                elif len(grad) < self._bucket:
                    self._waiting.append((s, grad))
                else:
                    self._reduce(s, grad)
            collected = sum(len(grad) for _, grad in self._waiting)
            if self._waiting and (last or collected >= self._bucket):
                self._reduce_waiting()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work on the stream of the reductions, after everything queued on the current stream so far."""
        if len(self._events) >= IN_FLIGHT:
            self._events.popleft().synchronize()
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            yield
            self._events.append(self._backend.Event())
            self._events[-1].record()

    def _reduce(self, s: ParameterSlice, flat: Tensor) -> None:
        """Average a whole gradient over all ranks in float32, and store this rank's slice."""
        W, size, length = self._world, s.size, len(s.grad)
        if self._nodes > 1:
            padded = F.pad(flat, (0, W * size - s.numel))
            by_place = padded.view(self._nodes, -1, size).transpose(0, 1).contiguous()
            copies = torch.empty_like(by_place)
            dist.all_to_all_single(copies, by_place, group=self._inside)
            sums = copies.sum(0, dtype=torch.float32).to(self._between)
            total = sums.new_empty(size)
            dist.reduce_scatter_tensor(total, sums.view(-1), group=self._across)
            self._store([(s, total[:length].float() * (1 / W))])
            return
        sizes = [max(0, min(size, s.numel - r * size)) for r in range(W)]
        copies = flat.new_empty(W, length)
        dist.all_to_all_single(copies.view(-1), flat, [length] * W, sizes, group=self._inside)
        if self._average:
            self._average(copies, s.grad, add=s.name in self._written)
            self._written.add(s.name)
        else:
            self._store([(s, copies.mean(0, dtype=torch.float32))])

    def _reduce_waiting(self) -> None:
        """Average the collected small gradients, whole, in one float32 all-reduce."""
        slices, grads = zip(*self._waiting)
        self._waiting = []
        flat = torch.cat(grads).float().mul_(1 / self._world)
        dist.all_reduce(flat, group=self._all)
        wholes = zip(slices, flat.split([len(grad) for grad in grads]))
        self._store([(s, whole.narrow(0, s.start, len(s.grad))) for s, whole in wholes])

    def _store(self, means: list[tuple[ParameterSlice, Tensor]]) -> None:
        """Write this rank's means to their slices, or add them to what earlier micro-batches wrote."""
        if self._on_host:
            for s, mean in means:
                total = mean.float()
                if s.name in self._written:  # the GPU adds
                    total = s.grad.to(mean.device, non_blocking=True).add_(total)
                s.grad.copy_(total, non_blocking=True)
        else:  # in a few kernels for all of them
            for again in (False, True):
                chosen = [
                    (s.grad, mean) for s, mean in means if (s.name in self._written) == again
                ]
                if chosen:
                    (torch._foreach_add_ if again else torch._foreach_copy_)(*zip(*chosen))
        self._written.update(s.name for s, _ in means)


def ranks_of_a_node() -> int:
    """Return L as the launcher says, or the world size if nodes differ or ranks are not numbered node by node."""
    world, size = dist.get_world_size(), environment.local_world_size()
    usable = world % size == 0 and dist.get_rank() % size == environment.local_rank()
    return size if {*gather(size if usable else world)} == {size} else world
