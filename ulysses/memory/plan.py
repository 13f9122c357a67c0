"""Predict a training step's bytes and seconds from plain numbers, and choose what the layers keep.

    allocated = states + the largest moment
        head:    all that the layers keep; gathered vocabulary weights, their gradient and its reduction
        layer:   all that the layers up to it keep; two gathered layers, one's gradients, its attention or its MLP
        forward: a pass without gradient, of the model itself or of another one; nothing is kept yet
        rollout: PPO's whole policy, KV cache and first pass over the prompts; nothing is kept yet
    gpu  = allocated * (1 + SLACK) + CUDA context + NCCL's buffers    (the allocator gives its cache back when it must)
    host = the process + optimizer, parameters and activations moved there + the copy that a checkpoint passes through

ZeRO-3 states of a trained parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (accumulated gradient) = 18 bytes over
all ranks in bfloat16; a frozen one costs its weight. Measured steps judge all this (tests/unit/test_plan.py).

Shapes: S local tokens, D width, F feed-forward width, V vocabulary, N a layer's matrices, W processes.
"""

from bisect import bisect_left
from math import gcd
from typing import Any, NamedTuple

from ulysses.memory.levels import LEVELS
from ulysses.memory.offload import CHUNK_BYTES
from ulysses.memory.tiling import TileRows, tile_rows
from ulysses.parallel.layout import HeadLayout, head_layout

GIB = 1 << 30
FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
HOST_FILL = 0.9  # share of a node's free memory that training may take
LOGITS_TILE_BYTES = 1 << 30  # float32 logits of one "auto" tile on a GPU
# offloaded layers whose tensors are on the GPU nevertheless: one in use, one being copied
WORKING_GROUPS = 2
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers
SLACK = 0.03  # fragments that the allocator cannot give back, as a share of its peak
CONTEXT_BYTES = 1.3e9  # CUDA context and libraries, outside the allocator, on an H200
COMMUNICATOR_BYTES = 2.1e9  # NCCL's buffers, with more than one process

# Rates measured on H200, as shares of the machine's peaks.
MATRICES = 0.55  # matrix products, the elementwise kernels between them included
ATTENTION = 0.63  # attention kernels
EXCHANGE = 0.35  # all-to-alls, which share the links with ZeRO-3's traffic
GATHER = 0.37  # all-gathers and reduce-scatters
HBM = 0.6  # the optimizer's update, decoding
STEP_SECONDS = 0.015  # per micro-batch: metadata, the first gather, the last reduction, metrics
TOKEN_LAYER_SECONDS = 2.5e-4  # the host's time for one layer of one decoded token
UPDATE_BYTES = 38  # read and written per trained parameter: norm, clipping, AdamW, casts


class Model(NamedTuple):
    """A model's shape; `parameters` and `trained` count all and the trained ones, of all decoders."""

    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    parameters: int
    trained: int
    has_head: bool = True  # False: a score per token instead of the vocabulary
    # 2: a second stack of layers runs on the same tokens (a separate value model)
    decoders: int = 1

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        return 2 * self.width * (self.query_width + self.kv_width)

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + 3 * self.width * self.intermediate

    @property
    def vocabulary_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def is_full(self) -> bool:
        """Whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters


class Machine(NamedTuple):
    """GPUs and memory in bytes, speeds in FLOP/s and bytes/s per GPU; the defaults are an H200 node's."""

    gpus: int
    gpu_bytes: float
    host_bytes: float = 0.0  # per node, free for training; 0 if unknown
    gpus_per_node: int = 8
    peak_flops: float = 989e12
    link: float = 450e9  # between GPUs of a node, one direction
    node_link: float = 50e9  # between nodes
    hbm: float = 4.8e12
    host_link: float = 15e9  # all GPUs of a node copying at once

    @property
    def local_processes(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def host_budget(self) -> float:
        """The host memory that one process may take."""
        return HOST_FILL * self.host_bytes / self.local_processes

    def link_over(self, ranks: int) -> float:
        """Return the speed of the slowest link between this many neighbouring ranks."""
        return self.link if ranks <= self.gpus_per_node else min(self.link, self.node_link)


class PlannedRollout(NamedTuple):
    """What one process decodes before `steps` optimizer steps: PPO's answers, `batch` of them at a time."""

    answers: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    merged: bool = False  # adapters are added into a copy of the matrices first


class Work(NamedTuple):
    """What a step computes: `tokens` of one micro-batch per sequence-parallel group, in `documents` of equal length."""

    tokens: int
    sp: int = 1
    micro_batches: int = 1
    documents: int = 1  # 2 for one pair
    # passes without gradient over the same tokens (live reference, KTO's baseline)
    forwards: float = 0.0
    rollout: PlannedRollout | None = None
    # common divisor of the heads of all models that share the mesh; 0: one model
    common_heads: int = 0

    @property
    def local(self) -> int:
        return -(-self.tokens // self.sp)


class MemorySettings(NamedTuple):
    """The memory settings of a run.

    level: recompute level of the layers. The last `upper_layers` have the level `upper` instead, which keeps more:
    their backward comes first, and what they kept is free again when the others start to recompute.
    offloaded_layers: how many, from the first on, keep their tensors on the host.
    """

    level: str = "none"
    upper: str = "none"
    upper_layers: int = 0
    offloaded_layers: int = 0
    mlp_tile: TileRows = "auto"
    logits_rows: int = 0  # 0: tiles of LOGITS_TILE_BYTES
    element_size: int = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    others: tuple[Model, ...] = ()  # frozen models that the run holds as well
    saves: bool = False  # checkpoints are written: their copy passes through host memory


class Prediction(NamedTuple):
    """Bytes of one rank.

    gpu: all that the GPU must hold. allocated: the allocator's peak, of which states, kept and working are parts.
    host: the host's; offloaded: pinned memory for activations; moved: all that the settings moved to the host.
    """

    gpu: float
    host: float
    allocated: float
    states: float
    kept: float
    working: float
    offloaded: float
    moved: float


class Case(NamedTuple):
    """What the planner is asked about: a model's step on a machine with some memory settings."""

    model: Model
    machine: Machine
    work: Work
    settings: MemorySettings

    def having(self, **settings: Any) -> "Case":
        """Return the case with some settings replaced."""
        return self._replace(settings=self.settings._replace(**settings))

    @property
    def levels(self) -> tuple[str, ...]:
        """Every layer's level, the first layer's first."""
        s = self.settings
        return (s.level,) * (self.model.layers - s.upper_layers) + (s.upper,) * s.upper_layers

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        s, count = self.settings, self.settings.upper_layers
        return f"{s.level}*{self.model.layers - count}+{s.upper}*{count}" if count else s.level

    @property
    def shards(self) -> tuple[int, int, HeadLayout]:
        """How many ranks split the heads, how many the query rows, and the heads on each rank."""
        sp, model = self.work.sp, self.model
        ranks = gcd(sp, model.heads, self.work.common_heads)
        return ranks, sp // ranks, head_layout(model.heads, model.kv_heads, ranks)

    def fits_gpu(self) -> bool:
        return predict(self).gpu <= FILL * self.machine.gpu_bytes

    def fits_host(self) -> bool:
        """Return whether the node has room for what is moved there; a node of unknown memory has.

        Where nothing is moved, what seems free decides nothing: some kernels report memory that grows on demand.
        """
        p, machine = predict(self), self.machine
        return not p.moved or not machine.host_bytes or p.host <= machine.host_budget

    def fits(self) -> bool:
        return self.fits_gpu() and self.fits_host()


def predict(case: Case) -> Prediction:
    """Predict the bytes of a rank."""
    model, s, world = case.model, case.settings, case.machine.gpus
    weights = s.element_size * (model.parameters + sum(m.parameters for m in s.others)) / world
    trained = 16 * model.trained / world  # float32 weights have a separate master too
    states = weights * (not s.offload_parameters) + trained * (not s.offload_optimizer)
    below = model.layers - s.upper_layers
    away = min(s.offloaded_layers, below) if s.level != "none" else 0
    pair = s.level == "pair"
    here = below - away + min(away, WORKING_GROUPS * (1 + pair))
    if pair:  # an odd layer keeps its own input, and the pair at work its second layer's too
        here += below % 2 + 2
    upper = kept_bytes(case, s.upper) * s.upper_layers
    kept = model.decoders * (kept_bytes(case, s.level) * here + upper)
    moments = [_head_moment(case)]
    if below:  # the upper layers are done by then, and what they kept is free
        moments.append(_layer_moment(case, s.level) - upper)
    if s.upper_layers:
        moments.append(_layer_moment(case, s.upper))
    working = max(moments)
    passes = [_forward_moment(case._replace(model=m)) for m in (model, *s.others)]
    allocated = states + max(kept + working, _rollout_moment(case), *passes)
    gpu = allocated * (1 + SLACK) + CONTEXT_BYTES + COMMUNICATOR_BYTES * (world > 1)
    offloaded = model.decoders * pinned_bytes(case) * away
    moved = weights + trained - states + offloaded
    saving = 4 * model.trained / world if s.saves else 0  # one kind of the state at a time
    host = moved + saving + PROCESS_BYTES
    return Prediction(gpu, host, allocated, states, kept, working, offloaded, moved)


def kept_bytes(case: Case, level: str) -> float:
    """Return the bytes that one layer's graph keeps at a level, weights aside; the log-sum-exp is float32."""
    model, out = case.model, case.model.query_width
    kept = model.width // 2 if level == "pair" else model.width
    if level in ("keep_attention", "none"):
        kept += out
    if level == "none":  # q', k', v', out if it is exchanged, middle, gate and up
        kept += out * (1 + (case.work.sp > 1)) + 2 * _held(case)
        kept += model.width + 2 * model.intermediate
        if not model.is_full:  # adapters keep the inputs of the projections as well
            kept += 2 * model.width + model.intermediate
    lse = 4 * model.heads if level in ("keep_attention", "none") else 0
    return float(kept * case.settings.element_size + lse) * case.work.local


def pinned_bytes(case: Case) -> float:
    """Return the most host bytes that one layer's activations take: any tensor's last chunk may stay partly empty."""
    tensors = 3 if case.settings.level == "keep_attention" else 1
    return kept_bytes(case, case.settings.level) + CHUNK_BYTES * tensors


def _held(case: Case) -> int:
    """Return the width of the keys that a rank holds per local token after the exchange, all copies included."""
    head_ranks, row_ranks, layout = case.shards
    return layout.key * head_ranks * row_ranks * case.model.head_dim


def _packed(case: Case) -> int:
    """Return the width of what an exchange of q, k and v holds: its inputs, its buffer and its results."""
    row_ranks = case.shards[1]  # keys and values go to every row set
    return 3 * (case.model.query_width + 2 * case.model.kv_width * row_ranks)


def _gathered(case: Case) -> int:
    """Return the bytes of two layers' gathered weights."""
    return 2 * case.settings.element_size * case.model.layer_parameters * (case.machine.gpus > 1)


def _logits_tile(case: Case) -> int:
    """Return the bytes of one tile of logits, in float32 and in the weights' dtype."""
    s, V = case.settings, case.model.vocabulary
    rows = s.logits_rows or max(1, LOGITS_TILE_BYTES // (4 * V))
    return min(case.work.local, rows) * V * (4 + s.element_size)


def _head_moment(case: Case) -> float:
    model, size, world = case.model, case.settings.element_size, case.machine.gpus
    words = model.vocabulary_parameters
    # the rows' hidden states and gradients, the rotary table, gathered weights
    fixed = (3 * size * model.width + 4 * model.head_dim) * case.work.local + _gathered(case)
    fixed += size * words * (world > 1)
    if not model.has_head:  # the embedding's gradient, whole, and its reduction
        return fixed + 2 * size * words * model.is_full
    if not model.is_full:
        return fixed + _logits_tile(case)
    # the float32 sum over the tiles, then its cast, the buffer it travels in and the float32 sum over the ranks
    reduction = (2 * size + 4 / world) * words * (world > 1)
    return fixed + 4 * words + max(_logits_tile(case), reduction)


def _layer_moment(case: Case, level: str) -> float:
    model, size, S = case.model, case.settings.element_size, case.work.local
    D, F, q, held = model.width, model.intermediate, model.query_width, _held(case)
    rows = S if level == "none" else tile_rows(S, case.settings.mlp_tile)
    fixed = _gathered(case) + 4 * model.head_dim * S
    if model.is_full:
        # the layer's gradients, float32 sums over its tiles, and as measured the vocabulary's
        fixed += size * (model.layer_parameters + model.vocabulary_parameters)
        fixed += 4 * 3 * D * F * (rows < S)
    # projections called as modules keep every intermediate of a tile
    wrapped = 1 if model.is_full else 2
    # q, k, v, the gradients of the output and of theirs, the kernel's float32 sums of these: 5 q, and measured steps
    # take one more; before and after them: what the exchanges pack
    attention = max(6 * q + 8 * held, _packed(case)) - (q + 2 * held) * (level == "none")
    attention += 2 * D + q * (level in ("block", "pair"))  # two gradients of the residual, out
    return fixed + size * max(4 * S * D + 4 * wrapped * rows * F, S * attention)


def _forward_moment(case: Case) -> float:
    """Return the bytes of a pass without gradient: two gathered layers and one's work, or the head."""
    model, size, S = case.model, case.settings.element_size, case.work.local
    mlp = 3 * tile_rows(S, case.settings.mlp_tile) * model.intermediate
    layer, head = size * max(mlp, S * _packed(case)), 0
    if model.has_head:
        head = size * model.vocabulary_parameters * (case.machine.gpus > 1) + _logits_tile(case)
    rows = (2 * size * model.width + 4 * model.head_dim) * S
    return rows + _gathered(case) + max(layer, head)


def _rollout_moment(case: Case) -> float:
    model, size, rollout = case.model, case.settings.element_size, case.work.rollout
    if rollout is None:
        return 0.0
    policy = size * (model.layers * model.layer_parameters + 2 * model.vocabulary_parameters)
    count = min(rollout.answers, rollout.batch)
    length = rollout.prompt_tokens + rollout.new_tokens
    cache = 2 * size * model.layers * count * length * model.kv_width
    prompts = size * count * rollout.prompt_tokens * (3 * model.intermediate + 4 * model.width)
    # float64 logits, log-probabilities, what top_p keeps, their sums
    drawing = 4 * 8 * count * model.vocabulary
    return policy * (1 + rollout.merged) + cache + max(prompts, drawing)


def step_flops(case: Case) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for a micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    model, work = case.model, case.work
    S, N, F = work.tokens / work.sp, model.layer_parameters, model.width * model.intermediate
    forward = 2.0 * work.tokens**2 / work.documents * model.query_width / work.sp
    again = model.attention_parameters + (2 if model.is_full else 3) * F
    directions = 3 if model.is_full else 2
    matrices = attention = 0.0
    for level in case.levels:
        pair = level == "pair"  # the forward pass of every second layer once more
        matrices += directions * N + again * (level != "none") + N / 2 * pair
        attention += 3.5 + (level in ("block", "pair")) + pair / 2
    head = model.vocabulary_parameters if model.has_head else 0  # logits are computed twice
    matrices = model.decoders * matrices + head * (directions + 1)
    matrices += work.forwards * (model.layers * N + head) + 3 * model.trained * (not model.is_full)
    return 2 * S * matrices, forward * (model.decoders * attention + work.forwards * model.layers)


def step_seconds(case: Case) -> float:
    """Estimate the seconds of one optimizer step: FLOPs and bytes over the rates measured on H200."""
    (model, machine, work, s), W = case, case.machine.gpus
    matrices, attention = step_flops(case)
    seconds = (matrices / MATRICES + attention / ATTENTION) / machine.peak_flops
    # exchanges: twice forward and backward, three times where the layers exchange again
    head_ranks, _, layout = case.shards
    heads = 2 * layout.query * (head_ranks - 1) + 2 * layout.key * (work.sp - 1)
    times = 2 * model.layers + sum(level != "none" for level in case.levels)
    sent = model.decoders * times * s.element_size * model.head_dim * heads * work.local
    seconds += sent / (EXCHANGE * machine.link_over(work.sp))
    # during the computation: weights are gathered twice and gradients reduced; copies to and from the host
    traffic = s.element_size * ((2 + work.forwards) * model.parameters + model.trained)
    traffic *= (W - 1) / W / (GATHER * machine.link_over(W))
    moved = 4 * model.trained / W * s.offload_optimizer
    moved += 2 * s.element_size * model.parameters / W * s.offload_parameters
    moved += 2 * s.offloaded_layers * model.decoders * kept_bytes(case, s.level)
    micro_batch = max(seconds, traffic, moved / machine.host_link) + STEP_SECONDS
    update = UPDATE_BYTES * model.trained / W
    update /= machine.host_link if s.offload_optimizer else HBM * machine.hbm
    return work.micro_batches * micro_batch + update + _rollout_seconds(case)


def _rollout_seconds(case: Case) -> float:
    """Return one step's share of decoding: one token of all answers at a time, reading weights and half the cache."""
    model, machine, rollout = case.model, case.machine, case.work.rollout
    if rollout is None:
        return 0.0
    batches = -(-rollout.answers // rollout.batch)
    policy = model.layers * model.layer_parameters + model.vocabulary_parameters
    cached = rollout.answers / batches * (rollout.prompt_tokens + rollout.new_tokens / 2)
    read = case.settings.element_size * (policy + 2 * model.layers * cached * model.kv_width)
    token = max(read / (HBM * machine.hbm), model.layers * TOKEN_LAYER_SECONDS)
    prompts = 2 * policy * rollout.answers * rollout.prompt_tokens
    prompts /= MATRICES * machine.peak_flops
    return (batches * rollout.new_tokens * token + prompts) / rollout.steps


def one_level(case: Case, level: str, offload: str = "none") -> Case:
    """Return the case with one level for all layers.

    offload: "none"; "auto", the fewest layers that make the GPU suffice, else all that the host holds; "checkpoints",
    all that the host holds.
    """
    case = case.having(level=level, upper_layers=0, offloaded_layers=0)
    if offload == "none" or level == "none":
        return case
    each = case.model.decoders * pinned_bytes(case)
    most = int((case.machine.host_budget - predict(case).host) // each)
    away = max(0, min(case.model.layers, most))
    if offload == "auto":
        enough = (n for n in range(away) if case.having(offloaded_layers=n).fits_gpu())
        away = next(enough, away)
    return case.having(offloaded_layers=away)


def choose(case: Case, levels: tuple[str, ...] = LEVELS, offload: str = "none") -> Case | None:
    """Return the fastest level that fits, with the next faster one on as many of the last layers as fit, or None.

    `levels` are those to choose from, the fastest first. A level that fits only with layers on the host is not mixed.
    """
    for faster, level in zip(("", *levels), levels):
        found = one_level(case, level, offload)
        if not found.fits():
            continue
        count, mixed = 0, found
        while mixed.fits() and faster and not found.settings.offloaded_layers:
            count, found = count + 1, mixed
            mixed = found.having(upper=faster, upper_layers=count)
        return found
    return None


def longest_sequence(
    case: Case, levels: tuple[str, ...] = LEVELS, offload: str = "none", limit: int = 1 << 27
) -> int:
    """Return the most tokens per document, a multiple of 1024, that some level fits; 0 if not even 1024 do.

    The case's work says how many equal documents share the micro-batch and how many ranks share it.
    """

    def fits(blocks: int) -> bool:
        work = case.work._replace(tokens=1024 * blocks * case.work.documents)
        return any(one_level(case._replace(work=work), x, offload).fits() for x in levels)

    # MLP tiles set in at some length, and a longer sequence can need less than a shorter one: try all powers of two
    low = max((1 << i for i in range(max(limit >> 10, 1).bit_length()) if fits(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not fits(n)))


def recommend(case: Case, batches: int) -> tuple[str, Case] | None:
    """Return offload and the case, with degree and levels, of the fastest step of `batches` micro-batches, or None.

    Layers are offloaded only if no degree fits without. Groups without a micro-batch of their own wait.
    """
    gpus = case.machine.gpus
    for offload in ("none", "auto"):
        works = [
            case.work._replace(sp=sp, micro_batches=-(-batches // (gpus // sp)))
            for sp in range(1, gpus + 1)
            if gpus % sp == 0
        ]
        found = [choose(case._replace(work=work), offload=offload) for work in works]
        fitting = [choice for choice in found if choice is not None]
        if fitting:
            return offload, min(fitting, key=step_seconds)
    return None
