# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""A kernel for GPUs: AdamW's update in one pass over memory.

    reads    gradient (wherever it is, times the factor of clipping), master weight, both moments
    writes   master weight, both moments, and the weight in the model's dtype where the model has it

The clipping, torch's fused AdamW and the copy to the model would take three passes: 46 bytes for each weight of a
bfloat16 model, here 30, or 28 where the gradient was kept in bfloat16. The arithmetic is torch's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses.zero.update import SubGroup

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_BLOCK = 2048
_ALIGNED = 16  # elements; a greater common alignment of addresses and lengths is of no use

if triton is not None:

    @triton.jit
    def _adamw_kernel(
        master,
        grads,
        mean,
        square,
        places,
        factor,
        step_size,
        decay,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        root_correction,
        eps,
        DTYPE: tl.constexpr,
        GRAD_DTYPE: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        place = places + 5 * tl.program_id(0).to(tl.int64)
        start, count, address = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        grad_address = tl.load(grads + tl.load(place + 3)) + tl.load(place + 4) * (
            GRAD_DTYPE.primitive_bitwidth // 8
        )
        # where all numbers are multiples of 16, the compiler loads and stores 16 bytes at a time
        start, count = tl.multiple_of(start, ALIGNED), tl.multiple_of(count, ALIGNED)
        weights = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNED)
        grad = tl.multiple_of(grad_address.to(tl.pointer_type(GRAD_DTYPE)), ALIGNED)
        within = tl.arange(0, BLOCK)
        at, mask = start + within, within < count
        g = tl.load(grad + within, mask).to(tl.float32) * factor
        m = beta1 * tl.load(mean + at, mask) + one_minus_beta1 * g
        v = beta2 * tl.load(square + at, mask) + one_minus_beta2 * g * g
        p = tl.load(master + at, mask) * decay
        p -= step_size * m / (tl.sqrt(v) / root_correction + eps)
        tl.store(mean + at, m, mask)
        tl.store(square + at, v, mask)
        tl.store(master + at, p, mask)
        tl.store(weights + within, p.to(DTYPE), mask)


def _in_triton(tensor: Tensor) -> Any:
    """Return the tensor's dtype in Triton's words."""
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


@dataclass
class OnePassSubGroup(SubGroup):
    """A sub-group on one GPU, whose tensors stay in their places."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # of every block: where it begins in the master, its elements, the address of its weights, the number of its
        # gradient, and where it begins in that
        blocks, numbers, start = [], [_ALIGNED], 0
        for index, (weight, length) in enumerate(zip(self.weights, self.lengths)):
            address = weight.data_ptr()
            at = torch.arange(0, length, _BLOCK)
            left, places = (length - at).clamp(max=_BLOCK), address + at * weight.element_size()
            grads = torch.full_like(at, index)
            blocks.append(torch.stack((start + at, left, places, grads, at), 1))
            numbers += start, length, address
            start += len(weight)
        self._places = torch.cat(blocks).to(self.master.device)
        self._addresses: list[int] = []  # of the last step's gradients
        self._aligned = math.gcd(*numbers)

    def update(self, grads: Sequence[Tensor], lr: float, factor: float) -> None:
        """Take the step and give the result to the model in one pass over memory."""
        state, group = self.moments, self.group
        beta1, beta2 = group.betas
        state["step"] += 1
        updates = int(state["step"])
        addresses = [grad.data_ptr() for grad in grads]
        if addresses != self._addresses:  # mostly they are those of the step before
            self._addresses = addresses
            # pinned, so that the host does not wait
            self._grads = torch.tensor(addresses, pin_memory=True).to(
                self.master.device, non_blocking=True
            )
        with torch.cuda.device(self.master.device):
            _adamw_kernel[(len(self._places),)](
                self.master,
                self._grads,
                state["exp_avg"],
                state["exp_avg_sq"],
                self._places,
                factor,
                lr / (1 - beta1**updates),
                1 - lr * group.weight_decay,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                math.sqrt(1 - beta2**updates),
                group.eps,
                DTYPE=_in_triton(self.weights[0]),
                GRAD_DTYPE=_in_triton(grads[0]),
                ALIGNED=math.gcd(self._aligned, *addresses),
                BLOCK=_BLOCK,
            )
