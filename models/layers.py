"""The decoder layer, in the stages that the memory levels keep, recompute or cut into tiles.

    hidden -project-> q k v -exchange-> q' k' v' -attend-> out' -exchange-> out -output-> hidden -feed_forward-> hidden

Parameter names are those of transformers. Plain projections run inside the fused nodes of half_blocks.py; a projection
that is wrapped by an adapter or watched by a hook is called as a module, and sees every use.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models import half_blocks
from models.arch import ModelConfig
from models.fused import RotateNode, SwiGLUNode
from ulysses.memory.levels import LayerNode, Pair, Rope
from ulysses.memory.offload import Offloader
from ulysses.memory.tiling import add_by_tiles, tile_gradients, tile_rows
from ulysses.parallel.attention import UlyssesAttention


class Unfilled(nn.Module):
    """Leave a module of torch without its random start: a file or `init_parameter` fills the weights."""

    def reset_parameters(self) -> None:
        pass


class Linear(Unfilled, nn.Linear):
    """Multiply rows [S, D] by a matrix; unlike torch's, the graph keeps no view of it."""

    def forward(self, x: Tensor) -> Tensor:
        return half_blocks.LinearNode.apply(x, self.weight, self.bias)


MakeLinear = Callable[..., Linear]


class Embedding(Unfilled, nn.Embedding):
    """Look up the rows of token ids [S]."""

    weight: nn.Parameter


class RMSNorm(Unfilled, nn.RMSNorm):
    """Scale every row of [..., D] to unit mean square, times `weight`."""

    eps: float


class Attention(nn.Module):
    """Hold the four projections, and in some families the norms of every head's query and key.

    `attention` itself has no parameters and is shared by all layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: UlyssesAttention,
        linear: MakeLinear,
    ) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_dim = E = config.head_dim
        heads, kv_heads = config.num_attention_heads * E, config.num_key_value_heads * E
        self.q_proj = linear(D, heads, bias=config.attention_bias)
        self.k_proj = linear(D, kv_heads, bias=config.attention_bias)
        self.v_proj = linear(D, kv_heads, bias=config.attention_bias)
        self.o_proj = linear(heads, D, bias=config.output_bias)
        self.eps = config.rms_norm_eps
        self.norms: list[RMSNorm] = []  # of queries and of keys, or none
        if config.qk_norm:
            self.q_norm = RMSNorm(E, self.eps)
            self.k_norm = RMSNorm(E, self.eps)
            self.norms = [self.q_norm, self.k_norm]
        self.attention = attention

    def forward(self, x: Tensor, rope: Rope, plan: Any) -> Tensor:
        """Return the projected attention output of normalised x [S, D]; the layer calls this only if a hook watches."""
        return self.o_proj(self.attention(*self.project(x, rope), plan=plan).flatten(1))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [S, H, E], key and value [S, K, E] of normalised x [S, D]; positions rotated in."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in projections
        )
        norms = self.norms
        if not half_blocks.is_plain(*norms):
            q, k = (norm(x) for norm, x in zip(norms, (q, k)))
            norms = []  # done
        return *RotateNode.apply(q, k, *rope, self.eps, *(norm.weight for norm in norms)), v


class MLP(nn.Module):
    """Compute down(silu(gate(x)) * up(x)) for rows [S, D]."""

    def __init__(self, config: ModelConfig, linear: MakeLinear) -> None:
        super().__init__()
        D = config.hidden_size
        F = config.intermediate_size
        self.gate_proj = linear(D, F, bias=False)
        self.up_proj = linear(D, F, bias=False)
        self.down_proj = linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLUNode.apply(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """One layer on this rank's tokens; ZeRO-3 gathers it as a whole.

    forward(hidden [S, D], (cos, sin) each [S, E/2], plan) -> hidden [S, D]; `plan` is the batch's attention plan,
    `pair` what this layer shares with its neighbour at level "pair". `recompute`, `mlp_tile` and `offloader` decide
    what its graph keeps; `Decoder.set_memory` sets them. With a hook on self_attn, or on the attention inside, the
    graph keeps everything, because only a call of the whole module runs the hook.
    """

    recompute: str
    mlp_tile: int
    offloader: Offloader | None

    def __init__(
        self,
        config: ModelConfig,
        attention: UlyssesAttention,
        linear: MakeLinear,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, attention, linear)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(
        self, hidden: Tensor, rope: Rope, plan: Any, pair: Pair | None = None
    ) -> Tensor:
        attention = self.self_attn.attention
        learns = torch.is_grad_enabled()
        if half_blocks.is_watched(self.self_attn) or half_blocks.is_watched(attention):
            middle = hidden + self.self_attn(self.input_layernorm(hidden), rope, plan)
        elif learns and self.recompute != "none":
            parameters = [p for stage in self.stage_parameters() for p in stage]
            return LayerNode.apply(self, rope, plan, pair, hidden, *parameters)
        else:
            *heads, hidden = self.project(hidden, rope)
            middle = self.output(hidden, attention(*heads, plan=plan))
        return self.feed_forward(middle) if learns else self.feed_forward_tiles(middle)

    def project(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return query [S, H, E], key and value [S, K, E] of the layer's input, and the input, for `output`."""
        norm, a = self.input_layernorm, self.self_attn
        projections = a.q_proj, a.k_proj, a.v_proj
        if not half_blocks.is_plain(norm, *projections, *a.norms):
            return *a.project(norm(hidden), rope), hidden
        weights = [module.weight for module in (norm, *projections)]
        weights += [*(p.bias for p in projections), *(n.weight for n in a.norms)]
        return half_blocks.ProjectNode.apply(hidden, *rope, a.head_dim, norm.eps, *weights)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the projected attention output [S, H, E] to the layer's input."""
        o = self.self_attn.o_proj
        out = o(attended.flatten(1))
        # a hook or an adapter may hold the product, which is then left as it is
        return out.add_(hidden) if half_blocks.is_plain(o) else hidden + out

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the MLP of the normalised rows; each row is independent, so it can run in tiles."""
        weights = self._mlp_weights()
        if weights is None:
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        return half_blocks.FeedForwardNode.apply(hidden, *weights)

    def feed_forward_tiles(self, rows: Tensor) -> Tensor:
        """Run `feed_forward` in tiles, without a graph."""
        weights = self._mlp_weights()

        def product(rows: Tensor) -> Tensor:
            if weights is None:
                return self.mlp(self.post_attention_layernorm(rows))
            return half_blocks.mlp(rows, *weights)[-1]

        return add_by_tiles(product, rows, tile_rows(len(rows), self.mlp_tile))

    def feed_forward_gradients(self, rows: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward of each tile; return the gradients of `rows` and of `stage_parameters()[2]`."""
        weights = self._mlp_weights()
        tile = tile_rows(len(rows), self.mlp_tile)
        if weights is None:
            parameters = self.stage_parameters()[2]
            return tile_gradients(self.feed_forward, rows, grad, parameters, tile)
        grad_rows, *found = half_blocks.feed_forward_gradients(rows, grad, weights, tile)
        return grad_rows, [g for g in found if g is not None]

    def _mlp_weights(self) -> tuple[Any, ...] | None:
        """Return the arguments of half_blocks.mlp if it may stand in for the modules."""
        norm: Any = self.post_attention_layernorm
        modules = norm, *self.mlp.children()
        if half_blocks.is_watched(self.mlp) or not half_blocks.is_plain(*modules):
            return None
        return *(module.weight for module in modules), norm.eps

    def stage_parameters(self) -> tuple[list[nn.Parameter], ...]:
        """Return the trainable parameters of project, of output and of feed_forward, adapters included."""
        a = self.self_attn
        stages = (
            (self.input_layernorm, a.q_proj, a.k_proj, a.v_proj, *a.norms),
            (a.o_proj,),
            (self.post_attention_layernorm, self.mlp),
        )
        return tuple(
            [p for module in stage for p in module.parameters() if p.requires_grad]
            for stage in stages
        )
