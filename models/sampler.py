"""Batched sampling with a KV cache, from plain weights: no modules, no hooks, no communication.

    prompts  [ p p p . . ]   prefill   keys and values of every layer     [B, K, M, E]
             [ p p p p p ]      |      one token per sequence and pass, written at its own position
             [ p . . . . ]      v
    token t of prompt p in rollout r  =  inverse of the cumulative distribution at u(seed, r, p, t)

Prompts lie left-aligned, so positions are those of training and nothing is masked but the future. What a prompt gets
depends on its key alone, not on the other prompts of its batch; processes decode their own prompts without waiting.
On a GPU the host runs ahead: it checks every LOOK tokens which sequences have ended, and drops what they drew since.

Shapes: B sequences, P longest prompt, M longest sequence, D width, H query heads, K kv heads, E head dim, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.arch import ModelConfig
from models.fused import rms_norm, rotate_pair, swiglu
from models.rope import inverse_frequencies, rotary_table
from ulysses.parallel.random_keys import STEP, scatter_bits, uniform_bits, wrapped

LOOK = 16  # tokens


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn and when a completion ends; the [ppo] table checks the ranges."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0  # 1 keeps all tokens
    top_k: int = 0  # 0 keeps all tokens
    stop_tokens: tuple[int, ...] = ()  # the one that ends a completion is part of it


@dataclass
class Completion:
    """One answer: its tokens (the stop token included), their log-probabilities, and whether a stop token ended it.

    The log-probabilities are those of the whole tempered distribution, before top_p and top_k.
    """

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    ended: bool = False


def uniforms(seed: int, rollout: int, prompts: Sequence[int], token: int) -> np.ndarray:
    """Return u in [0, 1), float64, for token number `token` of every prompt: a hash of all four."""
    state = np.asarray(prompts, np.int64)
    for part in (seed, rollout, token):
        state = scatter_bits(state + wrapped((part + 1) * STEP + 1))
    return uniform_bits(scatter_bits(state + STEP)) * 2.0**-53


def cache_bytes(config: ModelConfig, sequences: int, longest: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of `sequences` sequences of `longest` tokens."""
    return (
        2
        * config.num_hidden_layers
        * sequences
        * longest
        * config.num_key_value_heads
        * config.head_dim
        * dtype.itemsize
    )


class Sampler:
    """Decode from whole weights under transformers' names.

    Args:
        weights: {name: tensor}; aliases of gathered parameters are fine, nothing is written to them.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = weights
        embedding = weights["model.embed_tokens.weight"]
        self.head = embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.device = embedding.device
        self.frequencies = inverse_frequencies(config, self.device)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        seed: int = 0,
        rollout: int = 0,
        keys: Sequence[int] | None = None,
        batch: int = 64,
        look: int = 0,
    ) -> list[Completion]:
        """Return one completion per prompt.

        Args:
            keys: the number of each prompt in the rollout, which with seed, rollout and token number decides what is
                drawn; by default its place in `prompts`.
            batch: prompts decoded at a time; changes memory and speed, not the result (but for rounding).
            look: tokens between looks at which sequences have ended; likewise. 0: LOOK on a GPU, where a look waits for
                the device, and 1 on a CPU.
        """
        look = look or (1 if self.device.type == "cpu" else LOOK)
        keys = range(len(prompts)) if keys is None else keys
        if any(len(p) == 0 for p in prompts):
            raise ValueError("a prompt has no tokens; give each at least one")
        # prompts of like length together: less padding
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, Completion] = {}
        for first in range(0, len(order), batch):
            part = order[first : first + batch]
            done = self._batch(
                [prompts[i] for i in part], options, seed, rollout, [keys[i] for i in part], look
            )
            found.update(zip(part, done))
        return [found[i] for i in range(len(prompts))]

    def _batch(
        self,
        prompts: list[Sequence[int]],
        options: SamplingOptions,
        seed: int,
        rollout: int,
        keys: list[int],
        look: int,
    ) -> list[Completion]:
        lengths, limit = [len(p) for p in prompts], options.max_new_tokens
        count, longest = len(prompts), max(lengths)
        cache = _Cache(self.config, count, _rounded(longest + limit), self.head)
        padded = torch.zeros(count, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.as_tensor(np.asarray(prompt))
        positions = torch.arange(longest, device=self.device).expand(count, -1)
        hidden = self._forward(padded.to(self.device), positions, cache)
        places = torch.tensor(lengths, device=self.device)  # where the first drawn token goes
        last = hidden[torch.arange(count, device=self.device), places - 1]
        drawn = places  # of the token before; the first is predicted by the prompt
        answers = [Completion() for _ in prompts]
        rows = list(range(count))  # the sequences still decoded, as rows of the cache
        t = 0  # tokens that each of them has
        while rows:
            span = range(t, min(t + look, limit))
            draws = np.stack([uniforms(seed, rollout, [keys[r] for r in rows], i) for i in span])
            u = torch.from_numpy(draws).to(self.device)
            block, values = [], []
            for i in span:
                if i:
                    seen = _rounded(max(lengths[r] for r in rows) + i)
                    at = (places + (i - 1))[:, None]
                    last = self._forward(drawn[:, None], at, cache, seen)[:, 0]
                drawn, value = self._draw(last, options, u[i - t])
                block.append(drawn)
                values.append(value)
            for found, value in zip(torch.stack(block).tolist(), torch.stack(values).tolist()):
                for r, token, logp in zip(rows, found, value):
                    answer = answers[r]
                    if not answer.ended:
                        answer.tokens.append(token)
                        answer.logps.append(logp)
                        answer.ended = token in options.stop_tokens
            t = span.stop
            going = [i for i, r in enumerate(rows) if not answers[r].ended] if t < limit else []
            if going and len(going) < len(rows):
                keep = torch.tensor(going, device=self.device)
                drawn, places = drawn[keep], places[keep]
                cache.keep(keep)
            rows = [rows[i] for i in going]
        return answers

    def _draw(self, hidden: Tensor, options: SamplingOptions, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token per row of hidden [B, D] by u [B]; returns tokens [B] and their log-probabilities [B]."""
        logits = F.linear(hidden, self.head).double()
        if options.temperature == 0:
            logps = torch.log_softmax(logits, -1)
            tokens = logits.argmax(-1)
        else:
            logps = torch.log_softmax(logits / options.temperature, -1)
            kept = _kept(logps, options)
            cumulative = kept.cumsum(-1)
            total = cumulative[:, -1:]
            # u times the total may round up to it: then the last token that has any probability
            at = torch.minimum((u[:, None] * total).long(), total - 1)
            tokens = torch.searchsorted(cumulative, at, right=True)[:, 0]
        return tokens, logps.gather(-1, tokens[:, None])[:, 0]

    def _forward(self, tokens: Tensor, positions: Tensor, cache: "_Cache", seen: int = 0) -> Tensor:
        """Return normalised hidden states [B, L, D] of tokens [B, L] at `positions`, adding to the cache.

        A single token (L = 1) looks at the cache's first `seen` columns, up to its own position.
        """
        c, w = self.config, self.weights
        count, length = tokens.shape
        future = torch.arange(seen, device=self.device) > positions[:, :1] if seen else None

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, w[f"{name}.weight"], c.rms_norm_eps)

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))

        rope = rotary_table(positions.reshape(-1), self.frequencies)
        hidden = F.embedding(tokens.reshape(-1), w["model.embed_tokens.weight"])
        for number in range(c.num_hidden_layers):
            layer = f"model.layers.{number}"
            x = norm(hidden, f"{layer}.input_layernorm")
            query, key, value = (
                linear(x, f"{layer}.self_attn.{p}").unflatten(1, (-1, c.head_dim)) for p in "qkv"
            )
            query, key = rotate_pair(query, key, *rope)
            query, key, value = (
                a.unflatten(0, (count, length)).transpose(1, 2) for a in (query, key, value)
            )
            attended = cache.attend(number, query, key, value, positions[:, 0], future)
            attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
            hidden = hidden + linear(attended, f"{layer}.self_attn.o")
            x = norm(hidden, f"{layer}.post_attention_layernorm")
            gate, up = (linear(x, f"{layer}.mlp.{p}") for p in ("gate", "up"))
            hidden = hidden + linear(swiglu(gate, up), f"{layer}.mlp.down")
        return norm(hidden, "model.norm").unflatten(0, (count, length))


class _Cache:
    """Keys and values [B, K, M, E] of every layer; row b is filled up to its own position."""

    def __init__(self, config: ModelConfig, count: int, longest: int, like: Tensor) -> None:
        size = (count, config.num_key_value_heads, longest, config.head_dim)
        self.keys, self.values = (
            [like.new_zeros(size) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )

    def keep(self, rows: Tensor) -> None:
        """Drop the finished sequences."""
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor[rows]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        at: Tensor,
        future: Tensor | None,
    ) -> Tensor:
        """Store key, value [B, K, L, E] and return attention [B, H, L, E] of the query over all up to its position.

        Without `future` these are whole prompts. With `future` [B, M'] each is one token, at position `at` [B], that
        attends to the first M' columns except those marked.
        """
        keys, values = self.keys[layer], self.values[layer]
        if future is None:  # padding lies behind the prompts and is overwritten as they grow
            length = query.shape[2]
            keys[:, :, :length], values[:, :, :length] = key, value
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        rows, seen = torch.arange(len(at), device=at.device), future.shape[1]
        keys[rows, :, at], values[rows, :, at] = key[:, :, 0], value[:, :, 0]
        grouped = query.unflatten(1, (keys.shape[1], -1))[:, :, :, 0]  # [B, K, H / K, E]
        scores = (grouped @ keys[:, :, :seen].transpose(2, 3)).float() * query.shape[-1] ** -0.5
        weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
        return (weights @ values[:, :, :seen]).flatten(1, 2)[:, :, None]


def _rounded(columns: int) -> int:
    """Return the next multiple of 8, which half-precision matrix kernels want."""
    return -(-columns // 8) * 8


def _kept(logps: Tensor, options: SamplingOptions) -> Tensor:
    """Return the probabilities [B, V] that top_k and top_p leave, in units of 2^-52; ties at the edge stay.

    Sums of integers are exact, so that the draw is the same on every run; CUDA has no such running sum of floats.
    """
    kept = (logps.exp() * 2.0**52).long()
    V = kept.shape[-1]
    if 0 < options.top_k < V:
        edge = logps.topk(options.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(logps < edge, 0)
    if options.top_p < 1:
        ordered = kept.sort(-1, descending=True).values
        # a token stays while those before it hold less than top_p
        before = ordered.cumsum(-1) - ordered
        gone = before >= options.top_p * kept.sum(-1, keepdim=True)
        kept = kept.masked_fill(kept < ordered.masked_fill(gone, 1 << 53).amin(-1, keepdim=True), 0)
    return kept
