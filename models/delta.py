"""The gated delta rule as the mixer of a layer: linear attention, whose memory of a document is one matrix per head.

    normalised rows -> q | k | v, b, a -> to heads -> convolution, rule -> to tokens -> norm, times silu(z) -> out_proj

Convolution and rule run over whole documents, for the heads of one rank. The gate z is projected after the rule, so
that it is not kept.

Shapes: S local tokens, T packed tokens, D width, K key heads of width E, H value heads of width V.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.families import Delta
from models.modules import Float32Parameter, Linear, Norm, RMSNorm, Uninitialised
from models.ops import delta_kernels, delta_rule
from models.ops.gated_mlp import Activation
from models.ops.linear import Matrix, Products, recorded, trained
from models.ops.norm import NormRule
from ulysses.memory.levels import Rope
from ulysses.parallel.attention import Exchange, UlyssesAttention, head_exchange
from ulysses.parallel.layout import AttentionPlan, Tensors


class Filters(Uninitialised, nn.Conv1d):
    """Hold the convolution's filter of every column of q | k | v, [F, 1, W]."""

    weight: nn.Parameter


@dataclass
class LinearAttention:
    """Run convolution and rule over whole documents; its methods are those of Attention in
    ulysses/parallel/attention.py.

    Its parameters are the filters [F, 1, W], A_log and dt_bias [H], those of all heads on every rank.
    """

    delta: Delta
    kernel: str
    reads_results = False

    def exchange(self, plan: AttentionPlan) -> Exchange:
        """Return the exchanges of q | k | v, b and a, and of the output."""
        return head_exchange(self.delta.parts, plan)

    def attend_forward(
        self, shards: Tensors, plan: AttentionPlan, *parameters: Tensor
    ) -> Tensors:
        """Run convolution and rule, for this rank's heads: [T, heads, V]."""
        qkv, b, a = shards
        filters, *of_heads = parameters
        my_columns = self.exchange(plan).my_columns
        parts = filters[:, 0].split(self.delta.widths)
        my_filters = torch.cat([my_columns(x, part) for part, x in enumerate(parts)])
        inputs = qkv, b, a, my_filters, *(my_columns(x, -1) for x in of_heads)
        return [delta_rule.mix_pack(self.delta, plan.recurrence, self.kernels(qkv), *inputs)]

    def attend_backward(
        self,
        grad: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
        *parameters: Tensor,
    ) -> tuple[Tensors, Tensors]:
        """Run convolution and rule again, with a graph, and return its gradients."""
        leaves = [x.detach().requires_grad_() for x in shards]
        with torch.enable_grad():
            (out,) = self.attend_forward(leaves, plan, *parameters)
        grads = torch.autograd.grad(out, (*leaves, *trained(parameters)), grad)
        return grads[: len(shards)], grads[len(shards) :]

    def kernels(self, rows: Tensor) -> ModuleType:
        """Return the module that runs rule and convolution of such rows: on a GPU in half precision the kernels'."""
        if not rows.is_cuda or rows.dtype.itemsize > 2 or self.kernel == "reference":
            return delta_rule
        return delta_kernels


class GatedDelta(nn.Module):
    """Hold the projections, the filters and each value head's decay; its methods are those of layer_node.py's Mixer."""

    def __init__(
        self, config: ModelConfig, attention: UlyssesAttention, linear: type[Linear]
    ) -> None:
        super().__init__()
        assert config.delta is not None
        D, self.delta = config.hidden_size, config.delta
        self.fused = config.family.fused_projections
        self.attention = LinearAttention(self.delta, attention.kernel)
        widths, H = self.delta.widths, self.delta.linear_num_value_heads
        # the matrices of b and a have one row for every head, too few for the blocks of a quantised matrix
        if self.fused:
            self.in_proj_qkvz = linear(D, sum(widths) + widths[-1], bias=False)
            self.in_proj_ba = Linear(D, 2 * H, bias=False)
        else:
            self.in_proj_qkv = linear(D, sum(widths), bias=False)
            self.in_proj_z = linear(D, widths[-1], bias=False)
            self.in_proj_b = Linear(D, H, bias=False)
            self.in_proj_a = Linear(D, H, bias=False)
        F, W = sum(widths), self.delta.linear_conv_kernel_dim
        self.conv1d = Filters(F, F, W, groups=F, bias=False)
        self.A_log = Float32Parameter(torch.empty(H))
        self.dt_bias = Float32Parameter(torch.empty(H))
        self.norm = RMSNorm(self.delta.linear_value_head_dim, NormRule(config.rms_norm_eps))
        self.out_proj = linear(widths[-1], D, bias=False)

    def project(self, hidden: Tensor, norm: Norm, rope: Rope) -> tuple[Tensor, ...]:
        """Return q | k | v [S, F], b and a [S, H] of the layer's input, and the input, for `output`."""
        x = norm(hidden)
        if not self.fused:
            parts = self.in_proj_qkv, self.in_proj_b, self.in_proj_a
            return *recorded(Products(*(part.operands() for part in parts)), x), hidden
        qkv, both = recorded(Products(self._rows(slice(3)), self.in_proj_ba.operands()), x)
        both = both.unflatten(1, (self.delta.linear_num_key_heads, 2, -1))
        b, a = (part.flatten(1) for part in both.unbind(2))
        return qkv, b, a, hidden

    def _rows(self, part: slice) -> Matrix:
        """Return some of q, k, v and z from the fused matrix, in which the rows of a key head stand together."""
        count, heads = self.in_proj_qkvz.out_features, self.delta.linear_num_key_heads
        each = [width // heads for width in self.delta.widths]
        rows = torch.arange(count, device=self.in_proj_qkvz.weight.device).view(heads, -1)
        parts = rows.split([*each, each[-1]], 1)[part]
        index = torch.cat([part_rows.flatten() for part_rows in parts])
        return self.in_proj_qkvz.operands()._replace(row_index=index)

    @property
    def attention_parameters(self) -> list[nn.Parameter]:
        """The parameters of convolution and rule."""
        return [self.conv1d.weight, self.A_log, self.dt_bias]

    def output(self, mixed: Tensor, hidden: Tensor, norm: Norm) -> Tensor:
        """Return what the layer adds to its input, from the rule's output [S, H, V] and from that input."""
        matrix = self._rows(slice(3, 4)) if self.fused else self.in_proj_z.operands()
        (gate,) = recorded(Products(matrix), norm(hidden))
        return self.out_proj(*recorded(Activation(), gate, self.norm(mixed).flatten(1)))

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return False, because the rule's chunks are counted on the host."""
        return False
