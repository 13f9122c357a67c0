"""The gated delta rule as the mixer of a layer: linear attention, whose memory of a document is a matrix of every head.

    normalised rows -> q | k | v, b, a -> to heads -> convolution, rule -> to tokens -> norm, times silu(z) -> out_proj

Convolution and rule run on whole documents of a rank's heads. The gate z is projected after the rule, so that nothing
keeps it.

Shapes: S local tokens, T packed tokens, D width, K key heads of width E, H value heads of width V.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from losses.precision import at_least_float32
from models.arch import ModelConfig
from models.modules import Linear, MakeLinear, RMSNorm, some_columns
from models.ops.activation import ActivateNode
from models.ops.delta_rule import (
    Convolution,
    Heads,
    Rule,
    convolve,
    decays,
    delta_rule,
    run_waves,
)
from models.ops.norm import NormNode, NormRule
from models.ops.plain import is_plain, is_watched
from ulysses.memory.levels import Rope
from ulysses.memory.size import MixerSize, Setting
from ulysses.parallel.whole_rows import RowHeads


class Filters(nn.Module):
    """Hold the convolution's filter of every column of q | k | v, [F, 1, W]."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, 1, width))


class GatedDelta(nn.Module):
    """Hold the projections, the filters and each value head's decay; its methods are those of levels.py's Mixer."""

    has_gate = True

    def __init__(self, config: ModelConfig, kernel: str, linear: MakeLinear) -> None:
        super().__init__()
        assert config.delta is not None
        D, c = config.hidden_size, config.delta
        self.kernel, self.fused = kernel, config.family.fused_projections
        self.heads = self.heads_of(config)
        widths, H = self.heads.widths, self.heads.values
        # as many columns as heads are too few for the blocks of a quantised matrix
        if self.fused:
            self.in_proj_qkvz = linear(D, sum(widths) + widths[-1], bias=False)
            self.in_proj_ba = Linear(D, 2 * H, bias=False)
        else:
            self.in_proj_qkv = linear(D, sum(widths), bias=False)
            self.in_proj_z = linear(D, widths[-1], bias=False)
            self.in_proj_b = Linear(D, H, bias=False)
            self.in_proj_a = Linear(D, H, bias=False)
        self.conv1d = Filters(sum(widths), c.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.norm = RMSNorm(self.heads.value_dim, NormRule(config.rms_norm_eps))
        self.out_proj = linear(widths[-1], D, bias=False)

    @staticmethod
    def heads_of(config: ModelConfig) -> Heads:
        """Return the heads of a model's layers of linear attention."""
        c = config.delta
        assert c is not None
        counts = c.linear_num_key_heads, c.linear_num_value_heads
        return Heads(*counts, c.linear_key_head_dim, c.linear_value_head_dim)

    def forward(self, x: Tensor, rope: Rope, plan: Any) -> Tensor:
        """Return what the layer adds of normalised x [S, D]; the layer calls this only if a hook watches."""
        *heads, _ = self.project(x, None, rope)
        return self.output(self.mix(*heads, plan=plan), x, None)

    @property
    def is_watched(self) -> bool:
        """Whether only a call of the whole module runs somebody's hook."""
        return is_watched(self) or is_watched(self.conv1d)

    def project(self, hidden: Tensor, norm: RMSNorm | None, rope: Rope) -> tuple[Tensor, ...]:
        """Return q | k | v [S, F], b and a [S, H] of the layer's input, and the input, for `output`."""
        x = hidden if norm is None else norm(hidden)
        if not self.fused:
            return self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x), hidden
        qkv = torch.cat(self._columns(x)[:3])
        both = self.in_proj_ba(x).unflatten(1, (self.heads.keys, 2, -1))
        b, a = (part.flatten(1) for part in both.unbind(2))
        return some_columns(self.in_proj_qkvz, x, qkv), b, a, hidden

    def _columns(self, x: Tensor) -> list[Tensor]:
        """Return the columns of q, k, v and z in the fused projection, where those of a key head stand together."""
        each = [width // self.heads.keys for width in self.heads.widths]
        count = self.in_proj_qkvz.out_features
        columns = torch.arange(count, device=x.device).view(self.heads.keys, -1)
        return [part.flatten() for part in columns.split([*each, each[-1]], 1)]

    def _gate(self, x: Tensor) -> Tensor:
        if not self.fused:
            return self.in_proj_z(x)
        return some_columns(self.in_proj_qkvz, x, self._columns(x)[3])

    def mix(self, *heads: Tensor, plan: Any) -> Tensor:
        """Run the rule; with a graph, which keeps the shards and runs the rule again in backward."""
        return _Mix.apply(self, plan, *heads, *self._trained)

    def to_heads(self, heads: Sequence[Tensor], plan: Any) -> tuple[Tensor, ...]:
        if plan.mesh.sequence_parallel_size == 1:
            return tuple(heads)
        return self._joined(self._layout(plan).to_heads(self._parts(heads), 2))

    def to_heads_backward(self, grads: Sequence[Tensor], plan: Any) -> tuple[Tensor, ...]:
        if plan.mesh.sequence_parallel_size == 1:
            return tuple(grads)
        return self._joined(self._layout(plan).to_heads_backward(self._parts(grads), 2))

    def _layout(self, plan: Any) -> RowHeads:
        return RowHeads(self.heads.keys, self.heads.values, plan)

    def _parts(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """View q | k | v, b and a, of all heads or of a rank's, as five tensors [..., heads, width]."""
        qkv, b, a = rows
        return [*self.heads_in(qkv, b.shape[1]), b[..., None], a[..., None]]

    def heads_in(self, qkv: Tensor, values: int | None = None) -> list[Tensor]:
        """View q | k | v of so many value heads, by default all, as three tensors [..., heads, width]."""
        E, V = self.heads[2:]
        width = (values or self.heads.values) * V
        q, k, v = qkv.split([*2 * [(qkv.shape[1] - width) // 2], width], 1)
        return [x.unflatten(1, (-1, width)) for x, width in ((q, E), (k, E), (v, V))]

    @staticmethod
    def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Do the opposite of `_parts`."""
        qkv, others = parts[:3], parts[3:]
        return torch.cat([x.flatten(1) for x in qkv], 1), *(x[..., 0] for x in others)

    def mix_forward(self, shards: Sequence[Tensor], plan: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (self._mixed(shards, plan),)

    def mix_backward(
        self, grad: Tensor, shards: Sequence[Tensor], results: Sequence[Tensor], plan: Any
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        wanted = [x.detach().requires_grad_() for x in shards] + self._trained
        with torch.enable_grad():
            out = self._mixed(wanted[: len(shards)], plan)
        grads = torch.autograd.grad(out, wanted, grad)
        return grads[: len(shards)], grads[len(shards) :]

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for p in (self.conv1d.weight, self.A_log, self.dt_bias) if p.requires_grad]

    def _mixed(self, shards: Sequence[Tensor], plan: Any) -> Tensor:
        """Convolve, and run the rule, over all documents with a rank's heads: [T, own H, V]."""
        qkv, b, a = shards
        per_head: tuple[Tensor, Tensor] = self.A_log, self.dt_bias
        filters = self.conv1d.weight[:, 0]
        if plan.mesh.sequence_parallel_size > 1:
            own, (E, V) = self._layout(plan).own, self.heads[2:]
            per_head = own(self.A_log), own(self.dt_bias)
            q, k, v = filters.split(self.heads.widths)
            of_keys = [own(x.unflatten(0, (-1, E)), keys=True) for x in (q, k)]
            of_values = own(v.unflatten(0, (-1, V)))
            filters = torch.cat([x.flatten(0, 1) for x in (*of_keys, of_values)])
        rule, convolution = self.operations(qkv)
        heads = self.heads_in(convolution(qkv, filters, plan.recurrence), b.shape[1])
        g, beta = decays(a, *per_head), at_least_float32(b).sigmoid()
        return run_waves(heads, g, beta, plan.recurrence.waves, rule)

    def operations(self, rows: Tensor) -> tuple[Rule, Convolution]:
        """Return the rule and the convolution of such rows: plain torch, or kernels on a GPU in half precision."""
        if not rows.is_cuda or rows.dtype.itemsize > 2 or self.kernel == "reference":
            return delta_rule, convolve
        from models.ops import delta_kernels  # which needs optional packages

        return delta_kernels.delta_rule, delta_kernels.convolve

    def to_tokens(self, out: Tensor, plan: Any) -> Tensor:
        return (
            out if plan.mesh.sequence_parallel_size == 1 else self._layout(plan).to_tokens(out)
        )

    def to_tokens_backward(self, grad: Tensor, plan: Any) -> Tensor:
        if plan.mesh.sequence_parallel_size == 1:
            return grad
        return self._layout(plan).to_tokens_backward(grad)

    def output(self, mixed: Tensor, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return what the layer adds of the rule's output [S, H, V] and of the layer's input."""
        gate = self._gate(hidden if norm is None else norm(hidden))
        if is_plain(self.norm):
            normal = NormNode.apply(mixed, self.norm.weight, self.norm.rule)
        else:
            normal = self.norm(mixed)
        return self.out_proj(ActivateNode.apply(gate, normal.flatten(1), "silu"))

    @property
    def output_is_fresh(self) -> bool:
        """Whether nobody else may hold what `output` returns, as a hook or an adapter might."""
        return is_plain(self.out_proj)

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

    @staticmethod
    def size(config: ModelConfig, setting: Setting) -> MixerSize:
        """Return what linear attention takes; a rank's heads count for all rows, those of several ranks on each."""
        heads, width = GatedDelta.heads_of(config), config.hidden_size
        *_, E, V = heads
        columns, out = sum(heads.widths), heads.widths[-1]
        keys, values, ranks = RowHeads.own_heads(setting.ranks, heads.keys, heads.values)
        own = 2 * keys * E + values * (V + 2)  # q | k | v, b and a
        taps = config.delta.linear_conv_kernel_dim if config.delta else 0
        return MixerSize(
            parameters=width * (columns + 2 * heads.values + 2 * out),
            out=out,
            results=out,
            exact=0,
            tensors=1,
            # normalised rows for the projections and for the gate; the shards; the gate, the normalised output, and
            # their product
            kept=2 * width + setting.ranks * own + 3 * out,
            restored=width,
            # the shards, behind the convolution and at unit length, the gradients of these, the output's
            work=6 * setting.ranks * own + 2 * out,
            packed=3 * (columns + 2 * heads.values),
            sent=own * (setting.ranks - 1) + out * (ranks - 1) / ranks,
            # a token of a head reads a state twice and writes to it
            row_flops=6 * heads.values * E * V + 2 * taps * columns,
            backward=3.8,  # which runs forward once more
            state=(taps - 1) * columns + heads.values * E * V * 4 / setting.element_size,
            captured=0,
        )


class _Mix(torch.autograd.Function):
    """Exchange, run the rule and exchange; keeps the shards."""

    @staticmethod
    def forward(ctx: Any, mixer: GatedDelta, plan: Any, *heads: Tensor) -> Tensor:
        shards = mixer.to_heads(heads[:3], plan)
        ctx.save_for_backward(*shards)
        ctx.mixer, ctx.plan = mixer, plan
        (out,) = mixer.mix_forward(shards, plan)
        return mixer.to_tokens(out, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        mixer, plan = ctx.mixer, ctx.plan
        grad = mixer.to_tokens_backward(grad, plan)
        grads, of_parameters = mixer.mix_backward(grad, ctx.saved_tensors, (), plan)
        return None, None, *mixer.to_heads_backward(grads, plan), *of_parameters
