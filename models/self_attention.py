"""Softmax attention as the mixer of a layer.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

import torch
from torch import Tensor, nn

from models.arch import ModelConfig
from models.modules import Linear, Norm, RMSNorm
from models.ops.linear import Matrix, Products, recorded
from models.ops.norm import NormRule
from models.ops.rotary import Projection
from ulysses.memory.levels import Rope
from ulysses.parallel.attention import UlyssesAttention
from ulysses.parallel.kernels.choice import VARLEN, resolve_kernel


class SelfAttention(nn.Module):
    """Hold the four projections, and in some families the norms of queries and keys, or sinks [H].

    `attention` itself has no parameters and is shared by all layers with its window. The methods from `project` on are
    those of ulysses/memory/layer_node.py's Mixer.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: UlyssesAttention,
        linear: type[Linear],
    ) -> None:
        super().__init__()
        D, E, family = config.hidden_size, config.head_dim, config.family
        self.head_dim, self.has_gate = E, family.output_gate
        width, kv_width = config.num_attention_heads * E, config.num_key_value_heads * E
        # with a gate, the rows of every head's query are followed by those of its gate
        q_width = 2 * width if self.has_gate else width
        self.q_proj = linear(D, q_width, bias=config.attention_bias)
        self.k_proj = linear(D, kv_width, bias=config.attention_bias)
        self.v_proj = linear(D, kv_width, bias=config.attention_bias)
        self.o_proj = linear(width, D, bias=config.output_bias)
        self.rule = NormRule(config.rms_norm_eps, family.centred_norms)
        self.norms: list[RMSNorm] = []  # of queries and of keys, or none
        if family.qk_norm != "none":
            of_rows = family.qk_norm == "row"
            self.q_norm = RMSNorm(width if of_rows else E, self.rule)
            self.k_norm = RMSNorm(kv_width if of_rows else E, self.rule)
            self.norms = [self.q_norm, self.k_norm]
        self.attention = attention
        self.sinks: nn.Parameter | None = None
        if family.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def project(self, hidden: Tensor, norm: Norm, rope: Rope) -> tuple[Tensor, ...]:
        """Return query [S, H, E], key and value [S, K, E] of the layer's input, and the input, for `output`."""
        query = self._half_of_q_proj(0) if self.has_gate else self.q_proj.operands()
        matrices = Products(query, self.k_proj.operands(), self.v_proj.operands())
        cos, sin = rope
        projection = Projection(
            matrices,
            self.head_dim,
            self.rule,
            norm=norm.weight,
            norms=[n.weight for n in self.norms],
            cos=cos,
            sin=sin,
        )
        return recorded(projection, hidden)

    def _half_of_q_proj(self, half: int) -> Matrix:
        """Return q_proj with the rows of the queries [H E] alone, or for half 1 with those of the gates."""
        rows = torch.arange(self.q_proj.out_features, device=self.q_proj.weight.device)
        index = rows.view(-1, 2, self.head_dim)[:, half].flatten()
        return self.q_proj.operands()._replace(row_index=index)

    @property
    def attention_parameters(self) -> list[nn.Parameter]:
        """The sinks, if there are any."""
        return [] if self.sinks is None else [self.sinks]

    def output(self, attended: Tensor, hidden: Tensor, norm: Norm) -> Tensor:
        """Return what the layer adds to its input, from the attention's output [S, H, E] and from that input."""
        rows = attended.flatten(1)
        if self.has_gate:
            (gate,) = recorded(Products(self._half_of_q_proj(1)), norm(hidden))
            rows = rows * gate.sigmoid()
        return self.o_proj(rows)

    def fits_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the kernel reads the documents' bounds on the device."""
        kernel = resolve_kernel(
            self.attention.kernel, device, dtype, self.head_dim, window=self.attention.window
        )
        return kernel.name in VARLEN
