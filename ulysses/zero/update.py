# ruff: noqa: N803 (Triton names its compile-time arguments in capitals)
"""AdamW's update of one rank's master weights, in one pass over memory on a GPU.

    reads    gradient (times the factor that clipping left to do), master weight, both moments
    writes   master weight, both moments, and the weight in the model's dtype where the model has it

torch's fused AdamW, the copy to the model and the clipping before it take three passes: 46 bytes for each weight of a
bfloat16 model, here 30. The arithmetic is torch's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_BLOCK = 2048
_ALIGNED = 16  # elements

if triton is not None:

    @triton.jit
    def _adamw_kernel(
        master,
        grad,
        mean,
        square,
        places,
        factor,
        step_size,
        kept,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        root_correction,
        eps,
        DTYPE: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        place = places + 3 * tl.program_id(0).to(tl.int64)
        start, count, address = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        # where all numbers are multiples of 16, loads and stores of 16 bytes do
        start, count = tl.multiple_of(start, ALIGNED), tl.multiple_of(count, ALIGNED)
        weights = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNED)
        within = tl.arange(0, BLOCK)
        at, mask = start + within, within < count
        g = tl.load(grad + at, mask) * factor
        m = beta1 * tl.load(mean + at, mask) + one_minus_beta1 * g
        v = beta2 * tl.load(square + at, mask) + one_minus_beta2 * g * g
        p = tl.load(master + at, mask) * kept
        p -= step_size * m / (tl.sqrt(v) / root_correction + eps)
        tl.store(mean + at, m, mask)
        tl.store(square + at, v, mask)
        tl.store(master + at, p, mask)
        tl.store(weights + within, p.to(DTYPE), mask)


def moments(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """Return AdamW's state of some master weights; it is created as zeros if no update has happened yet."""
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros(())  # on the host, where torch's AdamW has it too
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(master) for _ in range(2))
    return state


class OnePassUpdate:
    """Update a sub-group: its flat float32 `master` weights [N], and the model's flat `weights` in the same order.

    All of them stay where they are in memory. It is `usable` for AdamW with everything on one GPU.
    """

    def __init__(
        self,
        optimizer: Any,
        group: dict[str, Any],
        master: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        self._optimizer, self._group, self._master = optimizer, group, master
        unusual = "amsgrad", "maximize"
        self.usable = (
            triton is not None
            and type(optimizer) is torch.optim.AdamW
            and not any(optimizer.defaults[name] for name in unusual)
            and master.is_cuda
            and weights[0].is_cuda
        )
        if not self.usable:
            return
        blocks, numbers, start = [], [_ALIGNED], 0
        for own in weights:
            at = torch.arange(0, len(own), _BLOCK)
            left, address = (len(own) - at).clamp(max=_BLOCK), own.data_ptr()
            blocks.append(torch.stack((start + at, left, address + at * own.element_size()), 1))
            numbers += start, len(own), address
            start += len(own)
        self._places, self._dtype = torch.cat(blocks).to(master.device), own.dtype
        self._aligned = math.gcd(*numbers)

    def __call__(self, factor: float) -> None:
        """Take one step with the group's settings and `factor` times the gradient that the master weights have."""
        group, state = self._group, moments(self._optimizer, self._master)
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["step"] += 1
        updates = int(state["step"])
        with torch.cuda.device(self._master.device):
            _adamw_kernel[(len(self._places),)](
                self._master,
                self._master.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                self._places,
                factor,
                lr / (1 - beta1**updates),
                1 - lr * group["weight_decay"],
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                math.sqrt(1 - beta2**updates),
                group["eps"],
                DTYPE=getattr(tl, str(self._dtype).removeprefix("torch.")),
                ALIGNED=self._aligned,
                BLOCK=_BLOCK,
            )
