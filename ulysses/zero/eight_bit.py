"""AdamW whose moments take a byte each: bitsandbytes' AdamW8bit over this rank's slices of parameters.

    moment    codes [n] in uint8, places in a table of 256 numbers, times absmax [n / 256] in float32, of every block

This rank's slice of a parameter begins with a block, and no block reaches over two slices. Where the length of slices
is a multiple of 256 the blocks are those of bitsandbytes on the whole parameter; elsewhere they begin in other places,
which gives other roundings of the same size. Slices below 4,096 elements keep float32. The table's least number is -1,
where bitsandbytes has -0.993: so a block's largest element is exact whatever its sign, and a checkpoint's float32
moments restore codes and absmax bit by bit. Source: Dettmers et al. 2021 (2110.02861).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from bitsandbytes.functional import dequantize_blockwise
from bitsandbytes.optim import AdamW8bit
from torch import Tensor
from torch.nn.functional import pad

from ulysses.zero.update import SubGroup

BLOCK = 256  # the only block size of bitsandbytes' optimizers
PLACES = {"exp_avg": 1, "exp_avg_sq": 2}  # bitsandbytes' names for a moment end with its number


@dataclass
class EightBitSubGroup(SubGroup):
    """A sub-group with quantised moments, which its optimizer has for each slice."""

    def __post_init__(self) -> None:
        group = self.group
        lengths = [len(weight) for weight in self.weights]
        parts = self.master.split(lengths)
        settings = {"betas": group.betas, "eps": group.eps, "weight_decay": group.weight_decay}
        self.optimizer = adamw = AdamW8bit(parts, **settings)
        adamw.name2qmap["dynamic"][0] = -1.0
        for place, part in enumerate(parts):
            adamw.init_state(adamw.param_groups[0], part, 0, place)
        starts = accumulate(lengths, initial=0)
        self.moments: dict[int, Any] = {i: adamw.state[part] for i, part in zip(starts, parts)}

    def update(self, grads: Sequence[Tensor], lr: float, factor: float) -> None:
        """Take the step slice by slice, so that no more than one gradient has a float32 copy."""
        (settings,) = self.optimizer.param_groups
        settings["lr"] = lr
        if self.master.grad is not None:
            # the parts of the sums have the padding of the master's
            grads = self.gradient_sums().split([len(weight) for weight in self.weights])
        for place, (part, grad) in enumerate(zip(settings["params"], grads)):
            part.grad = grad.float().mul_(factor)
            self.optimizer.update_step(settings, part, 0, place)  # type: ignore[attr-defined]
            part.grad = None
        self.write()

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return self.moments[0]["step"]

    @updates.setter
    def updates(self, number: int) -> None:
        for moments in self.moments.values():
            moments["step"] = number

    def _moment(self, kind: str, offset: int) -> list[Any]:
        """Return codes, absmax and table of a slice's moment; for a moment in float32 its values, None and None."""
        names = ("state", "absmax", "qmap")
        return [self.moments[offset].get(f"{name}{PLACES[kind]}") for name in names]

    def state(self, kind: str, offset: int, length: int) -> Tensor:
        """Return the master weights of a slice, or one of its moments in float32."""
        if kind == "master":
            return super().state(kind, offset, length)
        values, absmax, table = self._moment(kind, offset)
        if absmax is not None:
            values = dequantize_blockwise(values, absmax=absmax, code=table, blocksize=BLOCK)
        return values[:length]

    def restore(self, kind: str, offset: int, values: Tensor) -> None:
        """Round a slice's moment to the nearest numbers of its table."""
        if kind == "master" or self._moment(kind, offset)[1] is None:
            return
        codes, absmax, table = self._moment(kind, offset)
        blocks = pad(values, (0, len(absmax) * BLOCK - len(values))).view(-1, BLOCK)
        absmax.copy_(blocks.abs().amax(1))
        scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        middles = (table[1:] + table[:-1]) / 2
        nearest = torch.bucketize(scaled, middles, out_int32=True)
        codes.copy_(nearest.view(-1)[: len(codes)])
