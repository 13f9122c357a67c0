"""AdamW whose moments take a byte each: bitsandbytes' blockwise update on this rank's slices of parameters.

    moment    codes [n] in uint8, places in a table of 256 numbers, times absmax [n / 256] in float32, of every block

A block begins with this rank's slice of a parameter, and none reaches over two of them. Where slices are multiples of
256 long the blocks are those of bitsandbytes on the whole parameter; elsewhere they begin in other places, which gives
other roundings of the same size. The table's least number is -1, where bitsandbytes has -0.993: so a block's largest
element is exact whatever its sign, and a checkpoint's float32 moments restore codes and absmax bit by bit.

Source: Dettmers et al. 2021 (2110.02861).
"""

from itertools import accumulate
from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor
from torch.nn.functional import pad

from ulysses.zero.update import SubGroup

BLOCK = 256  # bitsandbytes knows no other in an optimizer
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class EightBitSubGroup(SubGroup):
    """A sub-group with quantised moments."""

    @property
    def moments(self) -> dict[str, Any]:
        """The number of updates, and of both moments the table, and codes and absmax of every slice."""
        state = self.optimizer.state[self.master]
        if not state:
            state["step"] = torch.zeros(())
            device, lengths = self.master.device, [len(own) for own in self.weights]
            for kind, signed in SIGNED.items():
                table = functional.create_dynamic_map(signed).to(device)
                table[0] = -1.0 if signed else 0.0
                codes = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
                blocks = [torch.zeros(-(-n // BLOCK), device=device) for n in lengths]
                state[kind] = table, codes.split(lengths), blocks
        return state

    def update(self, lr: float, factor: float) -> None:
        """Take one step by bitsandbytes' kernels, slice by slice."""
        (settings,), state = self.optimizer.param_groups, self.moments
        state["step"] += 1
        lengths = [len(own) for own in self.weights]
        slices = zip(self.master.grad.split(lengths), self.master.split(lengths))  # type: ignore[union-attr]
        (table, *first), (square_table, *second) = (state[kind] for kind in SIGNED)
        for (grad, master), codes, absmax, squares, square_absmax in zip(
            slices, *first, *second
        ):
            functional.optimizer_update_8bit_blockwise(
                "adam",
                grad,
                master,
                codes,
                squares,
                *settings["betas"],
                beta3=0.0,
                alpha=0.0,
                eps=settings["eps"],
                step=int(state["step"]),
                lr=lr,
                qmap1=table,
                qmap2=square_table,
                absmax1=absmax,
                absmax2=square_absmax,
                weight_decay=settings["weight_decay"],
                gnorm_scale=factor,
            )
        self.write()

    def _quantised(self, kind: str, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the table, and codes and absmax of the slice that begins at `offset`."""
        starts = accumulate((len(own) for own in self.weights), initial=0)
        table, codes, absmax = self.moments[kind]
        place = list(starts).index(offset)
        return table, codes[place], absmax[place]

    def state(self, kind: str, offset: int, length: int) -> Tensor:
        """Return the master weights of a slice, or one of its moments as new float32 numbers."""
        if kind == "master":
            return super().state(kind, offset, length)
        table, codes, absmax = self._quantised(kind, offset)
        values = functional.dequantize_blockwise(
            codes, absmax=absmax, code=table, blocksize=BLOCK
        )
        return values[:length]

    def restore(self, kind: str, offset: int, values: Tensor) -> None:
        """Round a slice's moment to the nearest numbers of its table."""
        if kind == "master":
            return
        table, codes, absmax = self._quantised(kind, offset)
        blocks = pad(values, (0, len(absmax) * BLOCK - len(values))).view(-1, BLOCK)
        absmax.copy_(blocks.abs().amax(1))
        scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        middles = (table[1:] + table[:-1]) / 2
        found = torch.bucketize(scaled, middles, out_int32=True)
        codes.copy_(found.view(-1)[: len(codes)])
