"""Batched sampling with a KV cache, in a model of its own around whole weights: no hooks, no communication.

    waiting answers      slots [B]                        one step, captured as a CUDA graph
    key 7: p p p    -->  [ p p p a a . . . ]   tokens -> decoder, keys and values written into the cache -> logits
    key 8: p p p    -->  [ p p p a . . . . ]          -> tokens drawn by u(seed, rollout, key, number of the token)
    key 9: p p      -->  [ p p a a a a . . ]          -> all slots go on until the host looks which answers have ended

A slot's cache holds its prompt except for the last token, which the first step takes: every step then does the same.
A prompt is prefilled once and copied to the slots of all its answers. Every LOOK steps the host takes the tokens that
were drawn, cuts answers at their end, and gives their slots to waiting ones. The random numbers of an answer depend on
its key alone, not on the other slots; processes decode their answers without waiting for each other.

Shapes: B slots, n rows of them at work, L tokens of each, M longest sequence, D width, H query heads, K kv heads,
E head dim, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from models.arch import ModelConfig
from models.kinds import empty_model
from models.ops.rotary import rotary_tables
from models.self_attention import SelfAttention
from ulysses.parallel.batch import Sequence
from ulysses.parallel.random_keys import STEP, scatter_bits, seed_of, uniform_bits, wrapped
from ulysses.rl.states import HELD, States

LOOK = 16  # steps
GRAPH_COLUMNS = 256  # a graph reads a multiple of so many columns of the cache, and serves all shorter lengths
PREFILL_TOKENS = 8192  # the most tokens of prompts that are computed together
# The most bytes that drawing takes per slot and vocabulary entry, in the memory of the graphs and again outside.
DRAWING_BYTES = 128
# cuDNN is left out: it compiles a plan for every new length.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn and when a completion ends; the [ppo] table checks the ranges.

    `batch` answers are decoded at a time, which changes memory and speed but, apart from rounding, not the result.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0  # 1 keeps all tokens
    top_k: int = 0  # 0 keeps all tokens
    stop_tokens: tuple[int, ...] = ()  # the one that ends a completion is part of it
    seed: int = 0
    batch: int = 64


@dataclass
class Completion:
    """One answer: its tokens (the stop token included), their log-probabilities, and whether a stop token ended it."""

    tokens: list[int] = field(default_factory=list)
    # of the whole tempered distribution, before top_p and top_k
    logps: list[float] = field(default_factory=list)
    ended: bool = False

    def after(self, prompt: list[int], weight: float = 1.0) -> Sequence:
        """Return a prompt with this answer, whose tokens are trained with this weight."""
        given, drawn = len(prompt), len(self.tokens)
        return Sequence(prompt + self.tokens, [0.0] * given + [weight] * drawn)


class Request(NamedTuple):
    """A completion of at most `limit` tokens; `call` is its number among those of the episode or answer `number`."""

    number: int
    prompt: Prompt
    limit: int
    call: int = 0

    @property
    def key(self) -> int:
        """What decides, with seed, rollout and token number, what is drawn."""
        return seed_of(self.number, self.call) if self.call else self.number


Task = tuple[Request, Completion]  # an answer at work, with the tokens drawn so far


class Requests:
    """What a sampler is asked for; here all of it is known at once, and elsewhere more comes while it decodes.

    Attributes:
        count, longest: the most completions at a time, and the tokens of the longest one with its prompt.
        completions: by the numbers of the prompts, in their order.
    """

    def __init__(self, prompts: Mapping[int, Iterable[int]], limit: int) -> None:
        tuples = {n: tuple(map(int, prompt)) for n, prompt in prompts.items()}
        self.count = len(tuples)
        self.longest = max(map(len, tuples.values()), default=0) + limit
        self.completions = {n: Completion() for n in tuples}
        self._new = [Request(n, prompt, limit) for n, prompt in tuples.items()]

    @property
    def is_open(self) -> bool:
        """Whether there may be new requests."""
        return bool(self._new)

    def take(self, wait: bool) -> list[Request]:
        """Return the new requests; with `wait`, wait for one, or until there will be none."""
        new, self._new = self._new, []
        return new

    def answer(self, request: Request, completion: Completion) -> None:
        """Hand over a completion, in any thread."""
        self.completions[request.number] = completion


def sampling_bytes(config: ModelConfig, longest: int, element_size: int) -> tuple[float, float]:
    """Return the bytes that sampling takes beside the weights: once, and for each slot of `longest` tokens."""
    inner, copied, D = config.intermediate_size, 0, config.hidden_size
    if moe := config.moe:
        inner = moe.num_experts_per_tok * moe.moe_intermediate_size
        inner += moe.shared_expert_intermediate_size or 0
        copied = moe.num_experts_per_tok * D
    prefill = PREFILL_TOKENS * (3 * inner + copied + 4 * D)
    # a key and a value of every token, wider by 8 entries for sinks; a state of every answer
    E, states = config.head_dim + 8 * config.family.sinks, 0.0
    attending = sum(kind.mixer != "linear_attention" for kind in config.layers)
    cached = attending * longest * 2 * config.num_key_value_heads * E
    if delta := config.delta:
        heads = delta.linear_num_value_heads * delta.linear_value_head_dim
        states = 4 * heads * delta.linear_key_head_dim
        states += element_size * (delta.linear_conv_kernel_dim - 1) * sum(delta.widths)
    each = element_size * cached + states * (config.num_hidden_layers - attending)
    return element_size * prefill, each + DRAWING_BYTES * config.vocab_size


def fitting_slots(config: ModelConfig, longest: int, dtype: torch.dtype, free: float) -> int:
    """Return how many slots of `longest` tokens fit into `free` bytes, graphs and prefill included."""
    fixed, each = sampling_bytes(config, longest, dtype.itemsize)
    return int((free - fixed) // each)


@dataclass(eq=False)
class Sampler:
    """Decode from whole weights under transformers' names.

    Args:
        weights: {name: tensor}; aliases of gathered parameters are fine, nothing is written to them.
        requests: for completions of prompts of at least one token, which are new at any time.
        progress: is called with the number of new tokens at every look.
        graphs: capture the steps as CUDA graphs, on a GPU.
        look: steps between two looks at what was drawn, for which the host waits for a GPU; 0 is LOOK there and 1 on a
            CPU. It changes the speed only.
        prefill: the most tokens of prompts that are computed together, which bounds the memory.

    Attributes:
        decoder: the layers, whose parameters are the weights.
        held: the newest prompt in the cache, and its slot; later answers to it copy its keys and values.
        captured: the graphs of the steps by rows and columns of the cache; they share the memory `pool`.

    What steps read and write, in tensors whose addresses stay, as CUDA graphs need:
        cache: keys and values of the layers with attention, [layers, 2, B, K, M, E]. With sinks the first column holds
            one more key, whose value is 0: it alone has a 1 in a further entry, where queries have their sink's logit.
        states: of the layers with linear attention.
        slot_state: [4, B] int64 of the answers at work: the newest token, its position, how many were drawn before
            the next one, and the hash of the answer's number.
        new: the tokens of the last step and their log-probabilities, [2, B] float64.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    requests: Requests
    options: SamplingOptions
    rollout: int = 0
    progress: Callable[[int], object] = lambda tokens: None
    graphs: bool = True
    look: int = 0
    prefill: int = PREFILL_TOKENS

    def __post_init__(self) -> None:
        config, options = self.config, self.options
        model = empty_model(config)
        model.load_state_dict(self.weights, assign=True, strict=False)
        self.decoder = model.model.eval()
        embedding = self.decoder.embed_tokens.weight
        self.head = embedding if config.tie_word_embeddings else self.weights["lm_head.weight"]
        self.device = embedding.device
        on_gpu = self.device.type == "cuda"
        self.graphs = self.graphs and on_gpu and self.decoder.is_capturable
        self.look = self.look or (LOOK if on_gpu else 1)
        count = min(options.batch, self.requests.count)
        self.sink = int(config.family.sinks)  # the first column of a token
        # aligned for half-precision kernels
        columns = -(-(self.requests.longest + self.sink) // 8) * 8
        mixers = [kind.mixer for kind in config.layers]
        layers = len(mixers) - mixers.count("linear_attention")
        width = config.head_dim + 8 * self.sink  # kernels take multiples of 8
        shape = (layers, 2, count, config.num_key_value_heads, columns, width)
        zeros = partial(torch.zeros, device=self.device)  # masked entries must not be NaN
        self.cache = zeros(shape, dtype=self.head.dtype)
        self.cache[:, 0, :, :, : self.sink, config.head_dim :: 8] = 1
        self.states = States(config, count, self.head)
        self.slot_state = zeros(4, count, dtype=torch.int64)
        self.new = zeros(2, count, dtype=torch.float64)
        self.held: dict[Prompt, int] = {}
        self.captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.no_grad()
    @sdpa_kernel(KERNELS)
    def sample(self) -> None:
        """Answer all requests."""
        rows, waiting = 0, deque[Request]()
        busy: dict[int, Task] = {}  # by their slots
        while busy or waiting or self.requests.is_open:
            new = self.requests.take(wait=not (busy or waiting))
            # equal prompts one after the other, and those of like length: they share the work, or its padding
            waiting += sorted(new, key=lambda one: (len(one.prompt), one.prompt, one.key))
            if waiting:
                rows = self.new.shape[1]
            elif not busy:
                continue
            free = [slot for slot in range(rows) if slot not in busy]
            taken = {slot: waiting.popleft() for slot in free[: len(waiting)]}
            if taken:
                self._fill(taken)
                busy |= {slot: (request, Completion()) for slot, request in taken.items()}
            # with graphs only for a quarter of the rows: capturing another graph costs as much as a few steps
            elif not self.graphs or 4 * len(busy) <= rows:
                busy = self._close_up(busy)
                rows = rows // 4 if self.graphs else len(busy)
            steps, seen = self._plan([*busy.values()])
            new = [self._advance(rows, seen) for _ in range(steps)]
            self._take(busy, torch.stack(new, dim=-1))

    def _close_up(self, busy: dict[int, Task]) -> dict[int, Task]:
        """Move the answers at work into the first slots, if there is a gap."""
        slots, count = sorted(busy), len(busy)
        if slots[-1] >= count:
            for part in (*self.cache.flatten(0, 1), *self.slot_state):
                part[:count] = part[slots]
            self.states.copy(slots, slice(count))
            self.held = {}
        return {new: busy[old] for new, old in enumerate(slots)}

    def _plan(self, tasks: list[Task]) -> tuple[int, int]:
        """Return the number of steps until the host looks again, and the columns of the cache that they see."""
        left = max(request.limit - len(answer.tokens) for request, answer in tasks)
        steps = min(self.look, left)
        longest = max(len(request.prompt) + len(answer.tokens) for request, answer in tasks)
        seen = self.sink + longest + steps
        seen += -seen % (GRAPH_COLUMNS if self.graphs else 8)
        return steps, min(seen, self.cache.shape[4])

    def _take(self, busy: dict[int, Task], new: Tensor) -> None:
        """Add newly drawn tokens [2, n, steps] to the answers at work; answers that end leave their slots."""
        options, (tokens, logps), count = self.options, new.tolist(), 0
        for slot, (request, answer) in list(busy.items()):
            for token, logp in zip(tokens[slot], logps[slot]):
                answer.tokens.append(int(token))
                answer.logps.append(logp)
                count += 1
                answer.ended = token in options.stop_tokens
                if answer.ended or len(answer.tokens) == request.limit:
                    del busy[slot]
                    self.requests.answer(request, answer)
                    break
        self.progress(count)

    # ---------------------------------------------------------------- new answers

    def _fill(self, taken: dict[int, Request]) -> None:
        """Begin the answers to the requests `taken` in their slots."""
        prompts = {slot: request.prompt for slot, request in taken.items()}
        fresh = {p: slot for slot, p in prompts.items() if p not in self.held}

        def copy(prompt: Prompt, source: int, state: int, slot: int) -> None:
            columns = self.cache[..., : len(prompt), :]
            columns[:, :, slot] = columns[:, :, source]
            self.states.copy(state, slot)

        # first from the held prompt, in whose slot another one may begin
        for slot, prompt in prompts.items():
            if prompt in self.held:
                # the state in its slot has gone on to its answer, but a copy of it has been kept
                copy(prompt, self.held[prompt], HELD, slot)
        self._prefill(fresh)
        for slot, prompt in prompts.items():
            if prompt in fresh:
                copy(prompt, fresh[prompt], fresh[prompt], slot)
        slots = list(prompts)
        self.held = {prompts[slots[-1]]: slots[-1]}
        self.states.copy(slots[-1], HELD)
        begun = [(one.prompt[-1], len(one.prompt) - 1, 0, one.key) for one in taken.values()]
        state = torch.tensor(begun).T
        for part in (self.options.seed, self.rollout):
            state[3] = _mixed(state[3], torch.tensor(wrapped(part)))
        self.slot_state[:, slots] = state.to(self.device)

    def _prefill(self, prompts: dict[Prompt, int]) -> None:
        """Write the keys and values of prompts, except for their last tokens, into the cache of their slots."""
        left = sorted(prompts, key=len)
        while left:
            count = max(1, self.prefill // len(left[-1]))
            group, left = left[-count:], left[:-count]
            slots = torch.tensor([prompts[p] for p in group], device=self.device)
            # the last token of a shorter prompt is computed too, and again by the first step
            padded = pad_sequence([torch.tensor(p) for p in group], batch_first=True)
            tokens = padded[:, :-1].to(self.device)
            lengths = torch.tensor([len(p) - 1 for p in group], device=self.device)
            self.states.clear(slots)
            for first in range(0, tokens.shape[1], self.prefill):
                self._chunk(slots, tokens[:, first : first + self.prefill], first, lengths)

    def _chunk(self, slots: Tensor, tokens: Tensor, first: int, lengths: Tensor) -> None:
        """Write the keys and values of prompts' tokens [n, L], which begin at position `first`.

        `lengths` [n] are those of the whole prompts without their last tokens; further tokens are padding.
        """
        # brings in torch's compiler, which takes seconds
        from torch.nn.attention.bias import causal_lower_right

        last, sink = first + tokens.shape[1], self.sink
        positions = torch.arange(first, last, device=self.device)

        def attend(
            cache: Tensor, mixer: SelfAttention, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            both = F.pad(torch.stack([key, value]), (0, 8 * sink))
            cache[:, slots, :, sink + first : sink + last] = both
            keys, values = cache[:, slots, :, : sink + last] if first or sink else both
            window, mask = mixer.attention.window, causal_lower_right(last - first, last + sink)
            if window and window < last:
                age = positions[:, None] - torch.arange(last, device=self.device)
                mask = F.pad((age >= 0) & (age < window), (sink, 0), value=True)
            return self._attention(mixer, query, keys, values, mask, enable_gqa=True)

        counted = (lengths - first).clamp(0, last - first)
        recur = partial(self.states.read, slots, counted)
        self._forward(tokens, positions.expand_as(tokens), self.cache, attend, recur)

    # ---------------------------------------------------------------- a step

    def _advance(self, rows: int, seen: int) -> Tensor:
        """Take a step and return its tokens and log-probabilities, [2, rows].

        The first step of every size runs without a graph, which warms up the kernels that its graph captures then.
        """
        if graph := self.captured.get((rows, seen)):
            graph.replay()
        else:
            self._step(rows, seen)
            if self.graphs:
                graph = torch.cuda.CUDAGraph()
                # other threads, such as NCCL's, may go on using the GPU
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    self._step(rows, seen)
                self.captured[rows, seen] = graph
        return self.new[:, :rows].clone()

    def _step(self, rows: int, seen: int) -> None:
        """Draw a token in each of the first `rows` slots, which look at `seen` columns of their cache.

        The host neither waits for the device here nor copies anything to it.
        """
        (token, position, drawn, key), sink = self.slot_state[:, :rows], self.sink
        slots = torch.arange(rows, device=self.device)
        age = position[:, None] - torch.arange(seen - sink, device=self.device)
        zeros, masks = self.head.new_zeros(rows, seen - sink), {}
        for window in {*self.config.windows, None}:
            mask = zeros.masked_fill((age < 0) | (age >= (window or seen)), -math.inf)
            masks[window] = F.pad(mask, (sink, 0))[:, None, None]

        def attend(
            cache: Tensor, mixer: SelfAttention, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            for cached, new in zip(cache, (key, value)):
                cached[slots, :, sink + position, : new.shape[-1]] = new[:, :, 0]
            keys, values = cache[:, :, :, :seen]
            # heads that share keys take the axis of a longer query's tokens, so that no key is repeated
            grouped = query.view(rows, keys.shape[1], -1, query.shape[-1])
            mask = masks[mixer.attention.window]
            return self._attention(mixer, grouped, keys, values, mask).reshape(query.shape)

        cache = self.cache[:, :, :rows]
        hidden = self._forward(
            token[:, None], position[:, None], cache, attend, self.states.step
        )
        u = uniform_bits(scatter_bits(_mixed(key, drawn) + STEP)).double() * 2.0**-53
        tokens, logps = self._draw(hidden, u)
        self.new[:, :rows] = torch.stack([tokens.double(), logps])
        token.copy_(tokens)
        drawn += 1
        # an answer that has ended goes on in the last column at most, until the host takes its slot
        position.add_(1).clamp_(max=self.cache.shape[4] - 1 - sink)

    def _attention(
        self,
        mixer: SelfAttention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        **options: bool,
    ) -> Tensor:
        """Return the queries' attention, to a layer's sinks too."""
        scale, width = mixer.attention.softmax_scale, self.config.head_dim
        if mixer.sinks is not None:
            query = F.pad(query, (0, 8))
            query[..., width] = (mixer.sinks / scale).view(query.shape[1], -1)
        out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, **options)
        return out[..., :width]

    def _draw(self, hidden: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token per row of hidden [n, D] by u [n]; returns tokens [n] and their log-probabilities [n].

        Probabilities are integers in units of 2^-52, whose running sums are exact, so that every run draws the same;
        CUDA's running sums of floats are not. Tokens as probable as the last one that top_k or top_p keeps stay too.
        """
        options = self.options
        scaling = options.temperature * self.config.multipliers.logits_scaling
        logits = F.linear(hidden, self.head).double().div_(scaling)
        logps = logits.log_softmax(-1)
        kept = logps.exp().mul_(2.0**52).long()
        if options.top_k:
            edge = logps.topk(min(options.top_k, logps.shape[-1]), dim=-1).values[:, -1:]
            kept = kept.masked_fill(logps < edge, 0)
        if options.top_p < 1:
            ordered = kept.sort(-1, descending=True).values
            # a token stays while those before it hold less than top_p
            before = ordered.cumsum(-1) - ordered
            gone = before >= options.top_p * kept.sum(-1, keepdim=True)
            edge = ordered.masked_fill(gone, 1 << 53).amin(-1, keepdim=True)
            kept = kept.masked_fill(kept < edge, 0)
        cumulative = kept.cumsum(-1)
        total = cumulative[:, -1:]
        # u times the total may round up to the total: then the last token with any probability is drawn
        at = torch.minimum((u[:, None] * total).long(), total - 1)
        tokens = torch.searchsorted(cumulative, at, right=True)
        return tokens[:, 0], logps.gather(-1, tokens)[:, 0]

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        attend: Callable[..., Tensor],
        recur: Callable[..., Tensor],
    ) -> Tensor:
        """Return normalised hidden states [n L, D] of tokens [n, L] at `positions`.

        Args:
            attend: gets a layer's cache and mixer with query, key and value [n, heads, L, E]; it stores key and value,
                and returns the query's attention.
            recur: gets the number of a layer among those of linear attention, its mixer and the mixer's projections,
                and returns the layer's output before its last projection.
        """
        shape, decoder = tokens.shape, self.decoder
        ropes = rotary_tables(positions.reshape(-1), self.config)
        hidden = decoder.embed(tokens.reshape(-1))
        caches, places = iter(cache), count()
        for layer in decoder.layers:
            *projected, hidden = layer.project(hidden, ropes[layer.kind.rotary])
            if layer.kind.mixer == "linear_attention":
                mixed = recur(next(places), layer.mixer, *projected)
            else:
                heads = (a.unflatten(0, shape).transpose(1, 2) for a in projected)
                mixed = attend(next(caches), layer.mixer, *heads)
                mixed = mixed.transpose(1, 2).flatten(0, 1)
            hidden = layer.second_half.add_tiles(layer.output(hidden, mixed))
        return decoder.norm(hidden)


def _mixed(state: Tensor, part: Tensor) -> Tensor:
    """Hash a further part of a key into the hash of those before it."""
    return scatter_bits(state + (part + 1) * STEP + 1)
