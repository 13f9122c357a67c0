"""Decoders and language models on packed, sequence-sharded batches; models/scored.py has those that give values.

    tokens [S] -> embed_tokens -> layers -> norm -> lm_head (positions with a target) -> LogProbs [S]

Logits never leave the head.

Shapes: S local tokens, M positions with a target, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from losses.logprobs import HeadOptions, LogProbs, linear_logprobs
from models.arch import ModelConfig
from models.layers import DecoderLayer
from models.modules import Embedding, RMSNorm
from models.ops.norm import NormRule
from models.ops.rotary import rotary_tables
from ulysses.memory.graphs import LayerGraphs
from ulysses.memory.levels import LEVELS, LayerMemory
from ulysses.parallel.attention import UlyssesAttention
from ulysses.parallel.batch import ShardedBatch
from ulysses.parallel.mesh import ParallelMesh
from ulysses.parallel.random_keys import keyed_generator

# The names of the parameters that a PolicyValue (models/scored.py) has besides the policy begin with this.
VALUE = "value."


class Decoder(nn.Module):
    """Turn token ids [S] into hidden states [S, D]; the final norm is applied by the caller to the rows it needs."""

    record: Any  # a RouterRecord of models/moe.py, or None
    graphs: LayerGraphs | None
    layers: Any  # an nn.ModuleList of DecoderLayers

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh | None,
        attention: str,
        memory: LayerMemory,
        quantize: str,
    ) -> None:
        super().__init__()
        self.config = config
        attention_by_window = {
            window: UlyssesAttention(
                mesh,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                attention,
                window=window,
                softmax_scale=config.softmax_scale,
            )
            for window in (None, config.sliding_window)
        }
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.record = None
        if config.moe:
            from models.moe import RouterRecord

            self.record = RouterRecord(config)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(
                    config,
                    kind,
                    attention_by_window[config.window(kind)],
                    quantize,
                    self.record,
                )
                for kind in config.layers
            ]
        )
        rule = NormRule(config.rms_norm_eps, config.family.centred_norms)
        self.norm = RMSNorm(config.hidden_size, rule)
        self.set_memory(memory)

    def forward(self, batch: ShardedBatch) -> Tensor:
        hidden = self.embed(batch.tokens)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # under frozen embeddings ZeRO-3 would release the first layer's weights before its backward has run
            hidden = hidden.detach().requires_grad_()
        ropes = rotary_tables(batch.positions, self.config)
        if self.graphs is not None and torch.is_grad_enabled():
            graph_output = self.graphs(hidden, ropes, batch.attention_plan)
            if graph_output is not None:
                return graph_output
        if self.record is not None:
            self.record.open(batch)
        for layer in self.layers:
            hidden = layer(hidden, ropes[layer.kind.rotary], batch.attention_plan)
        if self.record is not None:
            self.record.close()
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [S, D] of token ids, times the family's multiplier."""
        hidden, factor = self.embed_tokens(tokens), self.config.multipliers.embedding_multiplier
        if factor == 1:
            return hidden
        # rounded to the weights' dtype, as in transformers
        return hidden * float(torch.tensor(factor, dtype=hidden.dtype, device="cpu"))

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may run the layers' feed-forwards, because none of them makes the host wait."""
        return all(layer.mlp.is_capturable for layer in self.layers)

    def set_memory(self, memory: LayerMemory) -> None:
        """Set what the layers keep for backward."""
        count, levels = len(self.layers), memory.recompute
        if isinstance(levels, str):
            levels = [levels] * count
        if len(levels) != count or not set(levels) <= set(LEVELS):
            raise ValueError(
                f"recompute is {memory.recompute} but must be one of {', '.join(LEVELS)}, or a list of one for each of "
                f"the {count} layers"
            )
        offloaded = count if memory.offloaded_layers is None else memory.offloaded_layers
        for number, (layer, level) in enumerate(zip(self.layers, levels)):
            layer.recompute, layer.mlp_tile = level, memory.mlp_tile
            layer.offloader = memory.offloader if number < offloaded else None
        self.graphs = LayerGraphs(self.layers) if memory.graphs else None


class VocabularyHead(nn.Module):
    """Project positions to the vocabulary in tiles and return the log-probabilities of their targets.

    `weight` [V, D] is the embedding's own parameter when embeddings are tied. forward(hidden [M, D], targets [M]) runs
    with M = 0 too, so that its collectives and zero gradients happen on every rank. Further keywords (entropy, lse,
    mean_logit, temperature, loss_weights) are those of linear_logprobs.
    """

    def __init__(self, config: ModelConfig, tied: nn.Parameter | None) -> None:
        super().__init__()
        size = config.vocab_size, config.hidden_size
        self.weight = nn.Parameter(torch.empty(size)) if tied is None else tied

    def forward(
        self, hidden: Tensor, targets: Tensor, **options: Unpack[HeadOptions]
    ) -> LogProbs:
        return linear_logprobs(hidden, self.weight, targets, **options)


class HeadedDecoder(nn.Module):
    """A decoder of a family of models/families.py and a head; parameter names are those of transformers.

    mesh: None is one process. attention: the kernel's name. memory: what is kept for backward. quantize: how the
    layers' matrices are held (models/quantized.py). A loader, or `init_parameter`, fills the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh | None = None,
        *,
        attention: str = "auto",
        memory: LayerMemory = LayerMemory(),  # noqa: B008 - immutable
        quantize: str = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, mesh, attention, memory, quantize)
        self.add_head()

    def add_head(self) -> None:
        """Create the modules that turn hidden states into the model's results."""
        raise NotImplementedError


class CausalLM(HeadedDecoder):
    """A language model: the log-probabilities of a batch's targets."""

    def add_head(self) -> None:
        tied = self.model.embed_tokens.weight if self.config.tie_word_embeddings else None
        self.lm_head = VocabularyHead(self.config, tied)

    def forward(
        self,
        batch: ShardedBatch,
        *,
        nll: bool = False,
        project: bool = True,
        **options: Unpack[HeadOptions],
    ) -> LogProbs | Tensor:
        """Return the log-probabilities of the batch's targets, [S] float32, zero where the loss weight is 0.

        Positions of weight 0 cost no vocabulary projection. `nll` asks for this rank's sum of loss weights * -logps,
        which then has the only gradient and costs one projection less. `options` are those of linear_logprobs:
        `entropy`, `lse` and `mean_logit` ask for these values of the same positions, `temperature` divides the logits,
        `tile_loss` is a loss of all logits. Without `project` the rows that the vocabulary's matrix would multiply are
        returned, [M, D] of the positions whose weight is not 0. All ranks of the sequence-parallel group call together.
        """
        rows = self.rows(batch)
        if not project:
            scaling = self.config.multipliers.logits_scaling
            return rows if scaling == 1 else rows / scaling
        if nll:
            options["loss_weights"] = batch.loss_weights.index_select(0, batch.valid_index)
        return self.log_probs(rows, batch, options)

    def rows(self, batch: ShardedBatch) -> Tensor:
        """Return the final hidden states [M, D] of the positions whose weight is not 0."""
        return self.model.norm(self.model(batch).index_select(0, batch.valid_index))

    def log_probs(self, rows: Tensor, batch: ShardedBatch, options: HeadOptions) -> LogProbs:
        """Return the log-probabilities [S] of the batch's targets from the hidden states that `rows` returns."""
        if (scaling := self.config.multipliers.logits_scaling) != 1:
            if "tile_loss" in options:  # it reads logits of temperature 1
                rows = rows / scaling
            else:
                options["temperature"] = options.get("temperature", 1.0) * scaling
        out = self.lm_head(rows, batch.targets.index_select(0, batch.valid_index), **options)
        return LogProbs._make(None if x is None else placed(x, batch) for x in out)


def placed(values: Tensor, batch: ShardedBatch) -> Tensor:
    """Place values [M] at the positions whose weight is not 0, zeros elsewhere; a scalar is returned as it is."""
    zeros = values.new_zeros(len(batch.tokens))
    return values if values.dim() == 0 else zeros.index_copy(0, batch.valid_index, values)


def init_parameter(
    name: str,
    shape: Sequence[int],
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw one whole parameter; its values depend on seed, name, shape and the type of the device alone.

    Linear and embedding weights are N(0, initializer_range^2), norms multiply by 1, biases are 0, `score.weight` has
    the standard deviation 1 / (D + 1). Drawn in float32, then cast.
    """
    values = torch.zeros(tuple(shape), device=device)
    if name.endswith("norm.weight"):
        values.fill_(
            not config.family.centred_norms or name.endswith("linear_attn.norm.weight")
        )
    elif name.endswith("linear_attn.A_log"):
        values.uniform_(0.01, 16, generator=keyed_generator(device, seed, name)).log_()
    elif name.endswith("linear_attn.dt_bias"):
        values.fill_(1)
    elif not name.endswith((".bias", "_proj_bias")):
        std = (
            1 / (config.hidden_size + 1) if name == "score.weight" else config.initializer_range
        )
        values.normal_(0.0, std, generator=keyed_generator(device, seed, name))
    return values.to(dtype)
