"""The states of linear attention while sampling: one of a fixed size for every answer, however long it is.

Shapes: B slots, n of them at work, L tokens of each, F columns of q | k | v, W the convolution's width, H value heads,
E and V the widths of keys and values.
"""

from dataclasses import astuple

import torch
from torch import Tensor

from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.delta import GatedDelta
from models.families import Delta
from models.ops.delta_rule import as_heads, decays, own_widths
from ulysses.parallel.recurrence import Recurrence

HELD = -1  # the last state, a copy of one slot's


class States:
    """Hold the states of all slots, for the layers of linear attention in their order.

    inputs [layers, B + 1, W - 1, F]: what the convolution sees of the tokens before the next one.
    memory [layers, B + 1, H, E, V]: in float32 or better. The last state of both is HELD.
    """

    def __init__(self, config: ModelConfig, slots: int, like: Tensor) -> None:
        # a model without linear attention has states of no layers
        delta = config.delta or Delta(1, 1, 0, 0, 1)
        count = [kind.mixer for kind in config.layers].count("linear_attention")
        _, H, E, V, width = astuple(delta)
        self.inputs = like.new_zeros(count, slots + 1, width - 1, sum(delta.widths))
        self.memory = at_least_float32(like.new_zeros(1)).new_zeros(count, slots + 1, H, E, V)
        self.parts = self.inputs, self.memory

    def clear(self, slots: Tensor) -> None:
        """Clear the states of these slots, in which new prompts begin."""
        for part in self.parts:
            part[:, slots] = 0

    def copy(self, sources: int | list[int], slots: int | slice) -> None:
        """Give slots the states of others."""
        for part in self.parts:
            part[:, slots] = part[:, sources]

    def read(
        self, slots: Tensor, lengths: Tensor, layer: int, mixer: GatedDelta, *rows: Tensor
    ) -> Tensor:
        """Run a layer over tokens of prompts, L of each, and return its output [n L, H, V].

        Args:
            lengths: how many tokens of each prompt change its state, the first ones, [n].
            rows: q | k | v, b and a [n L, ...].
        """
        qkv, b, a = rows[0].unflatten(0, (len(slots), -1)), *rows[1:]
        n, L = qkv.shape[:2]
        before, kernels = self.inputs.shape[2], mixer.attention.kernels(qkv)
        longer = torch.cat([self.inputs[layer, slots], qkv], 1)

        def pack(length: int) -> Recurrence:
            return Recurrence(range(0, n * length + 1, length), {}, qkv.device)

        filters, delta = mixer.conv1d.weight[:, 0], mixer.delta
        convolved = kernels.convolve(
            longer.flatten(0, 1),
            filters,
            pack(before + L),
            own_widths(delta, qkv.shape[2], b.shape[1]),
        )
        new = [x.unflatten(0, (n, -1))[:, before:].flatten(0, 1) for x in convolved]
        counts = (torch.arange(L, device=qkv.device) < lengths[:, None]).flatten()[:, None]
        out, last = kernels.delta_rule(
            *as_heads(delta, new),
            decays(a, mixer.A_log, mixer.dt_bias) * counts,
            at_least_float32(b).sigmoid() * counts,
            level=pack(L).tree_levels[0]._replace(final_states=slots),
            start=self.memory[layer, slots],
        )
        newest = lengths[:, None] + torch.arange(before, device=qkv.device)
        prompts = torch.arange(n, device=qkv.device)[:, None]
        self.inputs[layer, slots], self.memory[layer, slots] = longer[prompts, newest], last
        return out

    def step(self, layer: int, mixer: GatedDelta, qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Run a layer over the next token of the first n slots, in place: [n, H, V]."""
        inputs, memory = (part[layer, : len(qkv)] for part in self.parts)
        weights = mixer.conv1d.weight[:, 0], mixer.A_log, mixer.dt_bias
        return mixer.attention.kernels(qkv).mix_step(
            mixer.delta, inputs, memory, qkv, b, a, *weights
        )
