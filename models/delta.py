"""The gated delta rule as the mixer of a layer: linear attention, whose memory of a document is a matrix of every head.

    normalised rows -> q | k | v, b, a -> to heads -> convolution, rule -> to tokens -> norm, times silu(z) -> out_proj

Convolution and rule run on whole documents of a rank's heads. The gate z is projected after the rule, so that nothing
keeps it.

Shapes: S local tokens, T packed tokens, D width, K key heads of width E, H value heads of width V.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.arch import ModelConfig
from models.modules import Exact, Linear, MakeLinear, Norm, RMSNorm, Unfilled
from models.ops import delta_kernels, delta_rule
from models.ops.gated_mlp import ActivateNode
from models.ops.linear import Matrix, linear
from models.ops.norm import NormNode, NormRule
from ulysses.memory.levels import Rope
from ulysses.parallel.attention import UlyssesAttention
from ulysses.parallel.layout import AttentionPlan, Context, Tensors
from ulysses.parallel.whole_rows import RowHeads


class Filters(Unfilled, nn.Conv1d):
    """Hold the convolution's filter of every column of q | k | v, [F, 1, W]."""

    weight: nn.Parameter


class GatedDelta(nn.Module):
    """Hold the projections, the filters and each value head's decay; its methods are those of layer_node.py's Mixer."""

    has_gate = True

    def __init__(
        self, config: ModelConfig, attention: UlyssesAttention, linear: MakeLinear
    ) -> None:
        super().__init__()
        assert config.delta is not None
        D, self.shape = config.hidden_size, config.delta
        self.kernel, self.fused = attention.kernel, config.family.fused_projections
        widths, H = self.shape.widths, self.shape.linear_num_value_heads
        # as many columns as heads are too few for the blocks of a quantised matrix
        if self.fused:
            self.in_proj_qkvz = linear(D, sum(widths) + widths[-1], bias=False)
            self.in_proj_ba = Linear(D, 2 * H, bias=False)
        else:
            self.in_proj_qkv = linear(D, sum(widths), bias=False)
            self.in_proj_z = linear(D, widths[-1], bias=False)
            self.in_proj_b = Linear(D, H, bias=False)
            self.in_proj_a = Linear(D, H, bias=False)
        F, W = sum(widths), self.shape.linear_conv_kernel_dim
        self.conv1d = Filters(F, F, W, groups=F, bias=False)
        self.A_log = Exact(torch.empty(H))
        self.dt_bias = Exact(torch.empty(H))
        self.norm = RMSNorm(self.shape.linear_value_head_dim, NormRule(config.rms_norm_eps))
        self.out_proj = linear(widths[-1], D, bias=False)

    def project(self, hidden: Tensor, norm: Norm, rope: Rope) -> tuple[Tensor, ...]:
        """Return q | k | v [S, F], b and a [S, H] of the layer's input, and the input, for `output`."""
        x = norm(hidden)
        if not self.fused:
            parts = self.in_proj_qkv, self.in_proj_b, self.in_proj_a
            return *linear(x, *(part.operands() for part in parts)), hidden
        qkv, both = linear(x, self._rows(slice(3)), self.in_proj_ba.operands())
        both = both.unflatten(1, (self.shape.linear_num_key_heads, 2, -1))
        b, a = (part.flatten(1) for part in both.unbind(2))
        return qkv, b, a, hidden

    def _rows(self, part: slice) -> Matrix:
        """Return some of q, k, v and z in the fused projection's matrix, whose rows stand together by key head."""
        count, heads = self.in_proj_qkvz.out_features, self.shape.linear_num_key_heads
        each = [width // heads for width in self.shape.widths]
        rows = torch.arange(count, device=self.in_proj_qkvz.weight.device).view(heads, -1)
        parts = rows.split([*each, each[-1]], 1)[part]
        chosen = torch.cat([own.flatten() for own in parts])
        return self.in_proj_qkvz.operands()._replace(chosen=chosen)

    def _gate(self, x: Tensor) -> Tensor:
        own = self._rows(slice(3, 4)) if self.fused else self.in_proj_z.operands()
        return linear(x, own)[0]

    def mix(self, *heads: Tensor, plan: AttentionPlan) -> Tensor:
        """Run the rule; with a graph, which keeps the shards and runs the rule again in backward."""
        return _Mix.apply(self, plan, *heads, *self._trained)

    def to_heads(self, heads: Tensors, plan: AttentionPlan) -> Tensors:
        if plan.mesh.sequence_parallel_size == 1:
            return heads
        (qkv, *others), exchange = heads, RowHeads(self.shape.parts, plan)
        rows = exchange.to_heads([*qkv.split(self.shape.widths, 1), *others])
        *each, b, a = exchange.widths
        return tuple(x.contiguous() for x in rows.split([sum(each), b, a], 1))

    def to_heads_backward(self, grads: Tensors, plan: AttentionPlan) -> Tensors:
        if plan.mesh.sequence_parallel_size == 1:
            return grads
        exchange = RowHeads(self.shape.parts, plan)
        *qkv, b, a = exchange.to_heads_backward(torch.cat([*grads], 1))
        return torch.cat(qkv, 1), b, a

    def mix_forward(self, shards: Tensors, plan: AttentionPlan) -> Tensors:
        with torch.no_grad():
            return (self._mixed(shards, plan),)

    def mix_backward(
        self,
        grad: Tensor,
        shards: Tensors,
        results: Tensors,
        plan: AttentionPlan,
    ) -> tuple[Tensors, Tensors]:
        wanted = [x.detach().requires_grad_() for x in shards] + self._trained
        with torch.enable_grad():
            out = self._mixed(wanted[: len(shards)], plan)
        grads = torch.autograd.grad(out, wanted, grad)
        return grads[: len(shards)], grads[len(shards) :]

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for p in (self.conv1d.weight, self.A_log, self.dt_bias) if p.requires_grad]

    def _mixed(self, shards: Tensors, plan: AttentionPlan) -> Tensor:
        """Convolve, and run the rule, over all documents with a rank's heads: [T, own H, V]."""
        (qkv, b, a), own = shards, RowHeads(self.shape.parts, plan).own
        parts = self.conv1d.weight[:, 0].split(self.shape.widths)
        filters = torch.cat([own(x, part) for part, x in enumerate(parts)])
        given = qkv, b, a, filters, own(self.A_log, -1), own(self.dt_bias, -1)
        return delta_rule.mix_pack(self.shape, plan.recurrence, self.kernels(qkv), *given)

    def kernels(self, rows: Tensor) -> ModuleType:
        """Return who runs rule and convolution of such rows: plain torch, or kernels on a GPU in half precision."""
        if not rows.is_cuda or rows.dtype.itemsize > 2 or self.kernel == "reference":
            return delta_rule
        return delta_kernels

    def to_tokens(self, out: Tensor, plan: AttentionPlan) -> Tensor:
        if plan.mesh.sequence_parallel_size == 1:
            return out
        return RowHeads(self.shape.parts, plan).to_tokens(out)

    def to_tokens_backward(self, grad: Tensor, plan: AttentionPlan) -> Tensor:
        if plan.mesh.sequence_parallel_size == 1:
            return grad
        return RowHeads(self.shape.parts, plan).to_tokens_backward(grad)

    def output(self, mixed: Tensor, hidden: Tensor, norm: Norm) -> Tensor:
        """Return what the layer adds of the rule's output [S, H, V] and of the layer's input."""
        gate = self._gate(norm(hidden))
        normal = NormNode.apply(mixed, self.norm.weight, self.norm.rule)
        return self.out_proj(ActivateNode.apply(gate, normal.flatten(1), "silu"))

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return False: the rule's chunks are counted on the host."""
        return False

    @property
    def stages(self) -> tuple[Sequence[nn.Module | nn.Parameter], ...]:
        """The modules and parameters of project, of the mix itself and of output."""
        mix = self.conv1d, self.A_log, self.dt_bias
        project: Sequence[nn.Module]
        if self.fused:
            project, gate = (self.in_proj_qkvz, self.in_proj_ba), self.in_proj_qkvz
        else:
            project = self.in_proj_qkv, self.in_proj_b, self.in_proj_a
            gate = self.in_proj_z
        return project, mix, (gate, self.norm, self.out_proj)


MixContext = Context[tuple[GatedDelta, AttentionPlan]]


class _Mix(torch.autograd.Function):
    """Exchange, run the rule and exchange; keeps the shards."""

    @staticmethod
    def forward(
        ctx: MixContext, mixer: GatedDelta, plan: AttentionPlan, *heads: Tensor
    ) -> Tensor:
        shards = mixer.to_heads(heads[:3], plan)
        ctx.save_for_backward(*shards)
        ctx.rest = mixer, plan
        (out,) = mixer.mix_forward(shards, plan)
        return mixer.to_tokens(out, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: MixContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixer, plan = ctx.rest
        grad = mixer.to_tokens_backward(grad, plan)
        grads, of_parameters = mixer.mix_backward(grad, ctx.saved_tensors, (), plan)
        return None, None, *mixer.to_heads_backward(grads, plan), *of_parameters
