"""Average gradients over all ranks into each rank's float32 sums, while the backward pass goes on.

    a unit's backward ends    its gradients are whole, in the weights' dtype (reduce.py)
      inside a node           all-to-all: each rank receives every peer's gradient of the slices that it updates,
                              and adds these copies in float32
      between nodes           reduce-scatter of the sums among the ranks that have the same place in their nodes
    small gradients           are collected and travel in one float32 all-reduce
    result                    divided by the world size, written to the sum (first micro-batch) or added to it

In bfloat16 this sends half the bytes of a float32 reduce-scatter and needs no float32 copy of every gradient. It rounds
no more than a float32 sum does, while a bfloat16 reduce-scatter rounds at every hop.
Between nodes the partial sums travel in float32 or `between`.

W = N nodes x L ranks, rank = node * L + place; slice r of a parameter belongs to rank r.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ulysses import environment
from ulysses.parallel.mesh import gather
from ulysses.zero.reduce import GradientReduction, SlicesWithGradients
from ulysses.zero.update import Shard


class AveragedReduction(GradientReduction):
    """Average every gradient over all ranks as soon as it is complete; all ranks construct it together.

    Args:
        bucket: gradients with fewer elements travel together, in float32 all-reduces of about this many elements.
        between: dtype of the sums that travel between nodes.
    """

    may_keep = False  # means in float32 take no less memory than the sums

    def __init__(
        self, *args: Any, bucket: int, between: torch.dtype, gradients_reused: bool
    ) -> None:
        super().__init__(*args, bucket=bucket, gradients_reused=gradients_reused)
        self._between, self._bucket = between, bucket
        self._world = dist.get_world_size()
        node_size = ranks_of_a_node()
        self._collected: SlicesWithGradients = []
        self._nodes = self._world // node_size
        # communicators of their own: in a common one, reductions and gathers would wait for each other
        self._inside = self._across = self._all = dist.new_group()
        if self._nodes > 1:  # every rank makes every group, in the same order
            nodes = torch.arange(self._world).view(-1, node_size)
            self._inside, _ = dist.new_subgroups_by_enumeration(nodes.tolist())
            self._across, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist())

    def forget(self) -> None:
        super().forget()
        self._collected.clear()

    def _receive(self, grads: SlicesWithGradients, last: bool) -> None:
        """Reduce large gradients at once, small ones when there are enough, and store this rank's slices."""
        for s, grad in grads:
            if len(grad) < self._bucket:
                self._collected.append((s, grad))
            else:
                super()._receive([(s, self._mean(s.shard, grad))], last)
        elements = sum(len(grad) for _, grad in self._collected)
        if self._collected and (last or elements >= self._bucket):
            super()._receive(self._means_of_collected(), last)

    def _mean(self, shard: Shard, flat: Tensor) -> Tensor:
        """Average a whole gradient over all ranks in float32, and return this rank's slice."""
        W, size, length = self._world, shard.size, shard.length
        if self._nodes > 1:
            padded = F.pad(flat, (0, W * size - shard.numel))
            by_place = padded.view(self._nodes, -1, size).transpose(0, 1).contiguous()
            copies = torch.empty_like(by_place)
            dist.all_to_all_single(copies, by_place, group=self._inside)
            sums = copies.sum(0, dtype=torch.float32).to(self._between)
            total = sums.new_empty(size)
            dist.reduce_scatter_tensor(total, sums.view(-1), group=self._across)
            return total[:length].float() * (1 / W)
        sizes = [max(0, min(size, shard.numel - r * size)) for r in range(W)]
        copies = flat.new_empty(W, length)
        dist.all_to_all_single(copies.view(-1), flat, [length] * W, sizes, group=self._inside)
        return copies.mean(0, dtype=torch.float32)

    def _means_of_collected(self) -> SlicesWithGradients:
        """Average the collected small gradients, whole, in one float32 all-reduce, and return this rank's slices."""
        slices, grads = zip(*self._collected)
        self._collected = []
        flat = torch.cat(grads).float().mul_(1 / self._world)
        dist.all_reduce(flat, group=self._all)
        wholes = zip(slices, flat.split([len(grad) for grad in grads]))
        return [(s, whole.narrow(0, s.shard.start, s.shard.length)) for s, whole in wholes]


def ranks_of_a_node() -> int:
    """Return L as the launcher says, or the world size if nodes differ or ranks are not numbered node by node."""
    world, size = dist.get_world_size(), environment.local_world_size()
    usable = world % size == 0 and dist.get_rank() % size == environment.local_rank()
    return size if {*gather(size if usable else world)} == {size} else world
