"""Predict a training step's memory and time from plain numbers, and choose what to recompute and offload.

    peak = states + kept activations + the larger of two moments
           head:   gathered vocabulary weights, their gradient and its reduction; two gathered layers
           layer:  two gathered layers, one layer's gradients, the working set of its attention or of an MLP tile

    seconds = FLOPs / (efficiency * peak) + exchanges + exposed ZeRO-3 traffic + the update + a fixed part per micro-batch

ZeRO-3 states of a trained parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (accumulated gradient) = 18 bytes over
all ranks in bfloat16; a frozen one costs its weight. Peaks are the allocator's: CUDA and NCCL come on top, therefore
`FILL`.

Errors against ten runs of Llama-3-8B layers on 1, 2 and 4 H200 (tests/unit/test_plan.py holds the table): memory -5%
to +5%, time -8% to +5%. All these rows were used to choose the constants below, so this is a fit, not a forecast.
Adapters, 24 and 80 GiB cards, several nodes, offload and more than 65,536 tokens were not measured; links of other
machines are slower than these constants say.

Shapes: T tokens of a micro-batch over a sequence-parallel group, S local tokens, D width, V vocabulary, W processes.
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from ulysses.memory.recompute import kept_bytes
from ulysses.memory.tiling import TilingOptions

GIB = 1 << 30
FILL = 0.9  # share of a GPU's memory that the predicted peak may take
HOST_FILL = 0.8  # share of a node's free memory that training may pin
LOGITS_TILE_BYTES = 1 << 30  # float32 logits of one "auto" tile on a GPU
FASTEST_FIRST = ("none", "keep_exchange", "keep_attention", "block")

EFFICIENCY = 0.58  # of the peak FLOP/s, matrix products and attention alike (bfloat16, H200)
EXPOSED = 0.5  # share of ZeRO-3's traffic that computation does not hide
FIXED_SECONDS = 0.02  # per micro-batch: launches, metadata, the first gather
UPDATE_BYTES = 38  # read and written per trained parameter: norm, clipping, AdamW, casts
WORKING_GROUPS = 3  # layers' kept tensors on the GPU while the others are on the host


class Model(NamedTuple):
    """Give a model's shape; `parameters` and `trained` count all and the trained ones."""

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

    @property
    def layer_parameters(self) -> int:
        D, q, k = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * D * (q + k) + 3 * D * self.intermediate

    @property
    def is_full(self) -> bool:
        """Say whether the matrices themselves are trained, rather than adapters."""
        return 2 * self.trained > self.parameters


class Machine(NamedTuple):
    """Give GPUs and memory in bytes, speeds in FLOP/s and bytes/s per GPU; defaults are an H200 node's."""

    gpus: int
    gpu_bytes: float
    host_bytes: float = 0.0  # per node, free for training
    gpus_per_node: int = 8
    peak_flops: float = 989e12
    link: float = 300e9
    hbm: float = 4e12
    host_link: float = 15e9

    @property
    def host_bytes_per_gpu(self) -> float:
        return HOST_FILL * self.host_bytes / min(self.gpus, self.gpus_per_node)


class Work(NamedTuple):
    """Give what a step computes: `tokens` of one micro-batch per sequence-parallel group, cut into `documents`."""

    tokens: int
    sp: int = 1
    micro_batches: int = 1
    documents: int = 1  # equally long; 2 for one pair


class Options(NamedTuple):
    """Give the memory settings. offloaded_layers: how many layers keep their tensors on the host."""

    level: str = "none"
    offloaded_layers: int = 0
    tiling: TilingOptions = TilingOptions()
    logits_rows: int = 0  # 0: tiles of LOGITS_TILE_BYTES
    element_size: int = 2
    reduce_size: int = 4
    offload_optimizer: bool = False
    offload_parameters: bool = False
    frozen_parameters: int = 0  # of a second model held beside the trained one


class Prediction(NamedTuple):
    """Hold bytes per rank and seconds per optimizer step."""

    gpu_bytes: float
    host_bytes: float
    seconds: float
    states: float
    kept: float
    working: float

    def fits(self, machine: Machine) -> bool:
        """Say whether GPU and host have room, with their reserves."""
        host_ok = self.host_bytes <= machine.host_bytes_per_gpu or self.host_bytes == 0
        return self.gpu_bytes <= FILL * machine.gpu_bytes and host_ok


class Choice(NamedTuple):
    """Hold the chosen level, how many layers are offloaded, and what is predicted for them."""

    level: str
    offloaded_layers: int
    prediction: Prediction


def predict(model: Model, machine: Machine, work: Work, options: Options) -> Prediction:
    """Predict peak GPU bytes and host bytes of a rank, and seconds per step; see the module's text for the errors."""
    S, W = -(-work.tokens // work.sp), machine.gpus
    states, host = _states(model, W, options)
    kept_layer = _kept_per_layer(model, work.sp, S, options)
    away = 0 if options.level == "none" else min(options.offloaded_layers, model.layers)
    working_groups = min(away, WORKING_GROUPS)
    kept = kept_layer * (model.layers - away + working_groups)
    host += kept_layer * away
    working = max(_head_moment(model, W, S, options), _layer_moment(model, W, S, options))
    seconds = _seconds(model, machine, work, options, 2 * kept_layer * away)
    return Prediction(states + kept + working, host, seconds, states, kept, working)


def _states(model: Model, world: int, options: Options) -> tuple[float, float]:
    weights = options.element_size * (model.parameters + options.frozen_parameters) / world
    trained = 16 * model.trained / world  # float32 weights have a separate master too
    gpu = (0.0 if options.offload_parameters else weights) + (0.0 if options.offload_optimizer else trained)
    return gpu, weights + trained - gpu


def _kept_per_layer(model: Model, sp: int, local: int, options: Options) -> float:
    shares = gcd(sp, model.heads)
    copies = -(-shares // model.kv_heads) if shares > model.kv_heads else 1
    kept = kept_bytes(
        options.level,
        width=model.width,
        intermediate=model.intermediate,
        heads=model.heads,
        kv_heads=model.kv_heads * copies,
        head_dim=model.head_dim,
        element_size=options.element_size,
        exchanged=sp > 1,
    )
    if options.level == "none" and not model.is_full:  # adapters need the inputs of the projections they stand beside
        q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
        kept += options.element_size * (2 * model.width + model.intermediate + q + 2 * k)
    if options.level == "none" and options.tiling.rows(local) < local:  # a tiled MLP keeps its input only
        kept -= options.element_size * 2 * model.intermediate
    return float(kept) * local


def _head_moment(model: Model, world: int, local: int, options: Options) -> float:
    size, words = options.element_size, model.vocabulary * model.width
    gathered = (size * words + 2 * size * model.layer_parameters) if world > 1 else 0
    rows = 3 * size * local * model.width
    if not model.has_head:  # the embedding's gradient, whole, and its reduction
        return rows + gathered + ((size + options.reduce_size) * words if model.is_full else 0)
    rows_per_tile = options.logits_rows or max(1, LOGITS_TILE_BYTES // (4 * model.vocabulary))
    tile = min(local, rows_per_tile) * model.vocabulary * (4 + size)
    if not model.is_full:
        return rows + gathered + tile
    # the float32 sum of the gradient, then its cast and the buffer it travels in; the tiles are gone by then
    reduction = (size + options.reduce_size) * words if world > 1 else 0
    return rows + gathered + 4 * words + max(tile, reduction)


def _layer_moment(model: Model, world: int, local: int, options: Options) -> float:
    size, P, D, F = options.element_size, model.layer_parameters, model.width, model.intermediate
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rows = options.tiling.rows(local)
    fixed = 2 * size * P if world > 1 else 0
    if model.is_full:
        fixed += (size + options.reduce_size) * P + (4 * 3 * D * F if rows < local else 0)
    wrapped = 1 if model.is_full else 2  # projections called as modules keep every intermediate of a tile
    mlp = size * (4 * local * D + 4 * wrapped * rows * F)
    chunks = options.tiling.head_chunks
    attention = size * local * (2 * D + (3 * (q + 2 * k) + 5 * q + 2 * k) / chunks)
    return fixed + max(mlp, attention)


def _seconds(model: Model, machine: Machine, work: Work, options: Options, host_traffic: float) -> float:
    T, W, sp = work.tokens, machine.gpus, work.sp
    S, q, k = T / sp, model.heads * model.head_dim, model.kv_heads * model.head_dim
    layers = model.layers * model.layer_parameters
    head = model.vocabulary * model.width if model.has_head else 0
    recomputed = options.level != "none"
    passes = (3 if model.is_full else 2) + recomputed  # adapters need no gradient of the matrices
    linear = 2 * T * (passes * layers + (4 if model.is_full else 3) * head)
    attention_forward = 2.0 * T * T / work.documents * q * model.layers
    attention = attention_forward * (3.5 + (options.level == "block"))
    compute = (linear + attention) / sp / (EFFICIENCY * machine.peak_flops)
    sent = options.element_size * S * (2 * q + 2 * k) * (sp - 1) / sp * model.layers
    exchanges = 2 + {"none": 1.0, "keep_exchange": 1.0, "keep_attention": 2.0, "block": 2.0}[options.level]
    moved = model.parameters * 2 * options.element_size + model.trained * options.reduce_size
    gathers = EXPOSED * moved * (W - 1) / W / machine.link
    micro = max(compute, host_traffic / machine.host_link) + exchanges * sent / machine.link + gathers + FIXED_SECONDS
    update_speed = machine.host_link if options.offload_optimizer else machine.hbm
    return work.micro_batches * micro + UPDATE_BYTES * model.trained / W / update_speed


def choices(
    model: Model, machine: Machine, work: Work, options: Options, *, levels: tuple[str, ...], offload: str
) -> Iterator[Choice]:
    """Yield one choice per level. offload: "none", "checkpoints" (every layer) or "auto" (the fewest that fit)."""
    for level in levels:
        if offload == "checkpoints" and level == "none":
            continue
        counts = {"none": [0], "checkpoints": [model.layers]}.get(offload, range(model.layers + 1))
        found = None
        for count in counts:
            found = predict(model, machine, work, options._replace(level=level, offloaded_layers=count))
            if found.fits(machine) or level == "none":
                break
        assert found is not None
        yield Choice(level, count, found)


def choose_level(
    model: Model,
    machine: Machine,
    work: Work,
    options: Options,
    *,
    levels: tuple[str, ...] = FASTEST_FIRST,
    offload: str = "none",
) -> Choice | None:
    """Return the fastest predicted choice that fits, the higher level where two are alike; None if nothing fits."""
    fitting = [
        c
        for c in choices(model, machine, work, options, levels=levels, offload=offload)
        if c.prediction.fits(machine)
    ]
    return min(fitting, key=lambda c: c.prediction.seconds, default=None)


def longest_sequence(
    model: Model,
    machine: Machine,
    sp: int,
    options: Options,
    *,
    documents: int = 1,
    levels: tuple[str, ...] = FASTEST_FIRST,
    offload: str = "none",
    limit: int = 1 << 27,
) -> int:
    """Return the longest document in tokens, a multiple of 1024, that some level fits; 0 if not even 1024 do.

    `documents` share the micro-batch: 2 for a pair, whose sides may both be that long.
    """

    def fits(blocks: int) -> bool:
        work = Work(1024 * blocks * documents, sp, 1, documents)
        return choose_level(model, machine, work, options, levels=levels, offload=offload) is not None

    # all powers of two are tried: MLP tiles set in at some length, and a longer sequence can need less than a shorter one
    low = max((1 << i for i in range(max(limit >> 10, 1).bit_length()) if fits(1 << i)), default=0)
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low


def recommend_degree(
    model: Model,
    machine: Machine,
    tokens: int,
    options: Options,
    *,
    documents: int = 1,
    groups: int = 1 << 30,
    offload: str = "none",
) -> int | None:
    """Return the sequence-parallel degree of the most tokens per second for micro-batches of `tokens`; None: none fits.

    `groups` bounds the data-parallel groups, as a step with few examples does.
    """
    speeds: dict[int, float] = {}
    for sp in (d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0 and machine.gpus // d <= groups):
        work = Work(tokens, sp, 1, documents)
        choice = choose_level(model, machine, work, options, offload=offload)
        if choice is not None:
            speeds[sp] = machine.gpus / sp / choice.prediction.seconds
    return max(speeds, key=lambda sp: speeds[sp], default=None)
