"""What sampling keeps of layers of linear attention: the state of every answer, however long it is.

Shapes: B slots, n of them at work, L tokens of each, F columns of q | k | v, W the convolution's width, H value heads,
E and V the widths of keys and values.
"""

from itertools import accumulate, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.delta import GatedDelta
from models.ops.delta_rule import decays, delta_step
from ulysses.parallel.waves import Recurrence


class States:
    """Hold the states of all slots, for the layers of linear attention in their order.

    inputs [layers, B, W - 1, F]: what the convolution sees of the tokens before the next one. memory [layers, B, H, E,
    V], in float32 or better. `held` is a copy of a slot's, at the end of its prompt.
    """

    def __init__(self, config: ModelConfig, slots: int, like: Tensor) -> None:
        assert config.delta is not None
        count = [kind.mixer for kind in config.layers].count("linear_attention")
        heads, width = GatedDelta.heads_of(config), config.delta.linear_conv_kernel_dim
        shape = count, slots, heads.values, heads.key_dim, heads.value_dim
        self.inputs = like.new_zeros(count, slots, width - 1, sum(heads.widths))
        self.memory = at_least_float32(like.new_zeros(1)).new_zeros(shape)
        self.held = [part[:, 0].clone() for part in self.parts]

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.memory

    def clear(self, slots: list[int]) -> None:
        """Begin new documents in these slots."""
        for part in self.parts:
            part[:, slots] = 0

    def hold(self, slot: int) -> None:
        """Keep a copy of a slot's state, which goes on."""
        self.held = [part[:, slot].clone() for part in self.parts]

    def copy(self, source: int | None, slot: int) -> None:
        """Give a slot the state of another one, or the one that is held."""
        for part, held in zip(self.parts, self.held):
            part[:, slot] = held if source is None else part[:, source]

    def move(self, slots: list[int]) -> None:
        """Put the states of these slots into the first ones."""
        for part in self.parts:
            part[:, : len(slots)] = part[:, slots]

    def read(
        self, layer: int, slots: Tensor, lengths: Tensor, mixer: GatedDelta, *rows: Tensor
    ) -> Tensor:
        """Run a layer over tokens of prompts, of which the first `lengths` [n] count: [n L, H, V].

        rows: q | k | v, b and a [n L, ...].
        """
        qkv, b, a = (x.unflatten(0, (len(slots), -1)) for x in rows)
        n, L = qkv.shape[:2]
        filters, before = mixer.conv1d.weight[:, 0], self.inputs.shape[2]
        longer = torch.cat([self.inputs[layer, slots], qkv], 1)
        rule, convolution = mixer.operations(qkv)

        def pack(length: int) -> Recurrence:
            bounds = [0, *accumulate(repeat(length, n))]
            return Recurrence(bounds, {}, qkv.device)

        mixed = convolution(longer.flatten(0, 1), filters, pack(before + L))
        mixed = mixed.unflatten(0, (n, -1))[:, before:].flatten(0, 1)
        counts = (torch.arange(L, device=qkv.device) < lengths[:, None]).flatten()[:, None]
        g = decays(a.flatten(0, 1), mixer.A_log, mixer.dt_bias) * counts
        beta = at_least_float32(b.flatten(0, 1)).sigmoid() * counts
        wave = pack(L).waves[0]._replace(hands_on=slots)
        out, last = rule(*mixer.heads_in(mixed), g, beta, wave, self.memory[layer, slots])
        kept = lengths[:, None] + torch.arange(before, device=qkv.device)
        each = torch.arange(n, device=qkv.device)[:, None]
        self.inputs[layer, slots], self.memory[layer, slots] = longer[each, kept], last
        return out

    def step(self, layer: int, mixer: GatedDelta, qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Run a layer over the next token of the first n slots, in place: [n, H, V]."""
        inputs, memory = (part[layer, : len(qkv)] for part in self.parts)
        window = torch.cat([inputs, qkv[:, None]], 1)
        inputs.copy_(window[:, 1:])
        taps = at_least_float32(mixer.conv1d.weight[:, 0].T)
        mixed = F.silu((window * taps).sum(1)).to(qkv.dtype)
        g, beta = decays(a, mixer.A_log, mixer.dt_bias), at_least_float32(b).sigmoid()
        return delta_step(*mixer.heads_in(mixed), g, beta, memory).to(qkv.dtype)
