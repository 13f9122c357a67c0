"""The decoder layer, in the stages that the memory levels keep, recompute or cut into tiles.

    hidden -project-> q k v -exchange-> q' k' v' -attend-> out' -exchange-> out -output-> hidden -feed_forward-> hidden

Parameter names are those of transformers. Plain projections run inside the fused nodes of half_blocks.py; a projection
that is wrapped by an adapter or watched by a hook is called as a module, and sees every use.

Shapes: S local tokens, D width, H query heads, K kv heads, E head dim.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models import half_blocks
from models.arch import ModelConfig
from models.fused import rms_norm, rotate, swiglu
from ulysses.memory.levels import AUTOGRAD, run_layer
from ulysses.memory.offload import Offloader
from ulysses.memory.replay import RandomState, has_dropout, replay
from ulysses.memory.tiling import TilingOptions, run_tiles, tile_gradients, tiled
from ulysses.parallel.attention import UlyssesAttention


class Linear(nn.Linear):
    """Be nn.Linear on rows [S, D] without its random start: weights are filled from a file or by `init_parameter`."""

    def forward(self, x: Tensor) -> Tensor:
        return half_blocks.linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Be nn.Embedding without its random start."""

    weight: nn.Parameter

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Scale every row of [..., D] to unit mean square, times `weight`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Attention(nn.Module):
    """Hold the four projections; `attention` itself has no parameters and is shared by all layers."""

    def __init__(self, config: ModelConfig, attention: UlyssesAttention) -> None:
        super().__init__()
        D, E = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = E
        self.q_proj = Linear(D, H * E, bias=config.attention_bias)
        self.k_proj = Linear(D, K * E, bias=config.attention_bias)
        self.v_proj = Linear(D, K * E, bias=config.attention_bias)
        self.o_proj = Linear(H * E, D, bias=False)
        self.attention = attention

    def project(self, x: Tensor, rope: half_blocks.Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [S, H, E], key and value [S, K, E] of normalised x [S, D]; positions rotated in."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, k, *rope)
        return q, k, v


class MLP(nn.Module):
    """Compute down(silu(gate(x)) * up(x)) for rows [S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, F, bias=False)
        self.up_proj = Linear(D, F, bias=False)
        self.down_proj = Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Run one layer on this rank's tokens; the unit that ZeRO-3 gathers as a whole.

    forward(hidden [S, D], (cos, sin) each [S, E/2], plan) -> hidden [S, D]; `plan` is the batch's attention plan.
    `recompute`, `tiling` and `offloader` say what its graph keeps; `Decoder.set_memory` sets them. `puts_off`: nothing is
    computed before backward (ulysses/memory/pairs.py).
    """

    def __init__(self, config: ModelConfig, attention: UlyssesAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.recompute: str = "none"
        self.tiling = TilingOptions()
        self.offloader: Offloader | None = None
        self.puts_off = False

    def forward(self, hidden: Tensor, rope: half_blocks.Rope, plan: Any) -> Tensor:
        backward = torch.is_grad_enabled()
        tile_rows = self.tiling.rows(hidden.shape[0], self.recompute if backward else "")
        attention = self.self_attn.attention
        if backward and self.recompute not in AUTOGRAD:
            return run_layer(
                self,
                attention,
                hidden,
                rope,
                plan,
                level=self.recompute,
                tile_rows=tile_rows,
                head_chunks=self.tiling.head_chunks,
                offloader=self.offloader,
                put_off=self.puts_off,
            )
        middle = self.output(hidden, attention(*self.project(hidden, rope), plan=plan))
        whole = tile_rows >= middle.shape[0] and not (backward and self.recompute == "mlp")
        if whole:
            return self.feed_forward(middle)
        run = partial(self.feed_forward_tiles, tile_rows=tile_rows)
        if not backward:
            return run(middle)
        random = RandomState() if self.draws() else None

        def gradients(rows: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
            with replay(random):
                return self.feed_forward_gradients(rows, grad, tile_rows)

        return tiled(run, gradients, middle, self.stage_parameters()[2])

    def project(self, hidden: Tensor, rope: half_blocks.Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [S, H, E], key and value [S, K, E] of the layer's input."""
        weights = self._project_weights()
        if weights is None:
            return self.self_attn.project(self.input_layernorm(hidden), rope)
        return half_blocks.project(
            hidden, weights, rope, self.input_layernorm.eps, self.self_attn.head_dim
        )

    def head_groups(
        self, hidden: Tensor, rope: half_blocks.Rope, count: int
    ) -> half_blocks.HeadGroups | None:
        """Return `project` for `count` groups of heads one after the other, or None if the modules themselves must run."""
        weights = self._project_weights()
        if weights is None:
            return None
        return half_blocks.HeadGroups(
            hidden, weights, rope, self.input_layernorm.eps, self.self_attn.head_dim, count
        )

    def _project_weights(self) -> half_blocks.ProjectWeights | None:
        norm, a = self.input_layernorm, self.self_attn
        q, k, v = a.q_proj, a.k_proj, a.v_proj
        if not half_blocks.is_plain(norm, q, k, v):
            return None
        return half_blocks.ProjectWeights(
            norm.weight, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias
        )

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the projected attention output [S, H, E] to the layer's input."""
        return hidden + self.self_attn.o_proj(attended.flatten(1))

    def output_groups(self, count: int) -> half_blocks.OutputGroups | None:
        """Return `output` with gradients for `count` groups of heads one after the other, or None if the module itself must run."""
        o = self.self_attn.o_proj
        return (
            half_blocks.OutputGroups(o.weight, self.self_attn.head_dim, count)
            if half_blocks.is_plain(o)
            else None
        )

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the MLP of the normalised rows; row by row independent, so it can run in tiles."""
        weights = self._feed_forward_weights()
        if weights is None:
            return self._feed_forward_by_modules(hidden)
        return half_blocks.feed_forward(hidden, weights, self.post_attention_layernorm.eps)

    def feed_forward_tiles(self, rows: Tensor, tile_rows: int) -> Tensor:
        """Run `feed_forward` tile by tile, without a graph."""
        weights = self._feed_forward_weights()
        if weights is None:
            return run_tiles(self._feed_forward_by_modules, rows, tile_rows)
        return half_blocks.feed_forward_tiles(
            rows, weights, self.post_attention_layernorm.eps, tile_rows
        )

    def feed_forward_gradients(
        self, rows: Tensor, grad: Tensor, tile_rows: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward tile by tile; return the gradients of `rows` and of `stage_parameters()[2]`."""
        weights = self._feed_forward_weights()
        if weights is None:
            return tile_gradients(
                self._feed_forward_by_modules, rows, grad, self.stage_parameters()[2], tile_rows
            )
        return half_blocks.feed_forward_gradients(
            rows, grad, weights, self.post_attention_layernorm.eps, tile_rows
        )

    def _feed_forward_by_modules(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _feed_forward_weights(self) -> half_blocks.FeedForwardWeights | None:
        norm, mlp = self.post_attention_layernorm, self.mlp
        if mlp._forward_hooks or not half_blocks.is_plain(
            norm, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        ):
            return None
        return half_blocks.FeedForwardWeights(
            norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        )

    def stage_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Return the trainable parameters of project, of output and of feed_forward, adapters included."""
        a, mlp = self.self_attn, self.mlp
        return (
            _trainable(self.input_layernorm, a.q_proj, a.k_proj, a.v_proj),
            _trainable(a.o_proj),
            _trainable(self.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        )

    def draws(self) -> bool:
        """Say whether active dropout hides in a wrapped projection."""
        a, mlp = self.self_attn, self.mlp
        projections = (
            a.q_proj,
            a.k_proj,
            a.v_proj,
            a.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
        return any(type(p) is not Linear and has_dropout(p) for p in projections)


def _trainable(*modules: nn.Module) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for module in modules:  # runs twice per layer and step: a plain module is not walked
        own = module.parameters() if module._modules else module._parameters.values()
        found += [p for p in own if p is not None and p.requires_grad]
    return found
