"""Predict a training step's bytes and seconds from plain numbers; ulysses/plan/memory_choice.py decides by them.

    allocated = states + the largest moment
        head:    all that the layers keep; gathered vocabulary weights, their gradient and its reduction
        layer:   all that the layers up to it keep; two gathered layers, one's gradients, its attention or its MLP
                 (CUDA graphs hold both moments, and every layer's gradients, in memory of their own)
        forward: a pass without gradient, of the model itself or of another one; nothing is kept yet
        rollout: PPO's whole policy, KV cache and first pass over the prompts; nothing is kept yet
    gpu  = allocated * SLACK + CUDA context + NCCL's buffers    (the allocator gives its cache back when it must)
    host = the process + optimizer, parameters and activations moved there + the copy that a checkpoint passes through

ZeRO-3 states of a trained parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (accumulated gradient) = 18 bytes over
all ranks in bfloat16; a frozen one costs its weight. Resident weights take their 2 bytes on every rank, and nothing is
gathered. Measured steps judge all this (tests/unit/test_plan.py).

Shapes: S local tokens, D width, F feed-forward width, V vocabulary, N a layer's matrices, W processes.
"""

from collections import Counter
from math import gcd, inf
from typing import NamedTuple

from losses.logprobs import CUDA_TILE_BYTES, LOSS_TILES, equal_tiles
from ulysses.memory.levels import LEVELS
from ulysses.memory.offload import CHUNK_BYTES
from ulysses.memory.tiling import EXPERT_TILES, TILE_ROWS, tile_rows
from ulysses.parallel.layout import head_layout, squares
from ulysses.plan.model_size import BITS, Model
from ulysses.stages.base import PlannedRollout

GIB = 1 << 30
H200_FLOPS, H200_RATE = 989e12, 4.8e12  # in bfloat16; bytes/s of its memory
CPU_FLOPS = (
    1e11  # of a process without a GPU, roughly: it only decides how much work hides a launch
)
FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
HOST_FILL = 0.9  # share of a node's free memory that training may take
# offloaded layers whose tensors are on the GPU nevertheless: one in use, one being copied
WORKING_GROUPS = 2
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers
SLACK = 1.03  # the allocator's peak with the fragments that it cannot give back
CONTEXT_BYTES = 1.3e9  # CUDA context and libraries, outside the allocator, on an H200
COMMUNICATOR_BYTES = 2.1e9  # NCCL's buffers, with more than one process

# Rates measured on H200, as shares of the peaks.
MATRICES = 0.64  # matrix products
# the time of a step's products where the layers' are of e4m3 numbers, rounding included, as a share of bfloat16's
FP8_PRODUCTS = 0.8
ATTENTION = 0.63  # attention kernels
EXCHANGE = 0.35  # all-to-alls, which share the links with ZeRO-3's traffic
GATHER = 0.37  # all-gathers and reduce-scatters
CONTENTION = 0.2  # of their time is added to that of the kernels beside them
LINK = 450e9  # bytes/s between two GPUs of one node, one direction
NODE_LINK = 50e9  # of two nodes
MEMORY_RATE = 0.6  # GPU memory in the optimizer's update
HOST_LINK = 15e9  # bytes/s between GPU and host, all GPUs of a node copying at once
ELEMENTWISE = (
    48  # bytes that a layer's elementwise kernels move, for each token and unit of D + F
)
STEP_SECONDS = 0.007  # per micro-batch: metadata, the first gather, the last reduction, metrics
# Seconds in which the host launches one layer, forward and backward, with weights that are gathered and that stay;
# CUDA graphs need none. They pay where a layer takes the GPU less than GRAPH_SECONDS.
LAUNCH, LAUNCH_RESIDENT = 7e-3, 3e-3
GRAPH_SECONDS = 5e-3
# read and written per trained parameter: by norm and zero/update.py, and where a micro-batch adds its gradient
UPDATE_BYTES, ADDITION_BYTES = 34, 10
ADAPTER_SECONDS = 6e-4  # of the many small kernels for a layer's adapters, forward and backward
ENOUGH = 4  # times the launches of a pass without gradient, its computation takes: more tokens gain nothing
GAIN = 0.01  # of a step's time, for which a micro-batch is made larger


class Machine(NamedTuple):
    """GPUs, their memory in bytes, which is infinite for a CPU in their place, their peak in FLOP/s, and bytes/s."""

    gpus: int
    gpu_bytes: float
    host_bytes: float = 0.0  # per node, free for training; 0 if unknown
    gpus_per_node: int = 8
    peak_flops: float = H200_FLOPS
    memory_rate: float = H200_RATE

    @property
    def is_gpu(self) -> bool:
        return self.gpu_bytes < inf

    @property
    def local_processes(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def host_budget(self) -> float:
        """The host memory that one process may take."""
        return HOST_FILL * self.host_bytes / self.local_processes

    def link(self, ranks: int) -> float:
        """Return the speed of the slowest link between this many neighbouring ranks."""
        return LINK if ranks <= self.gpus_per_node else NODE_LINK


class Workload(NamedTuple):
    """What the planner is asked about: a model's step on a machine, and the memory settings.

    tokens: of the fullest micro-batch, which `sp` ranks share, in `documents` of equal length (2 for one pair).
    mean_tokens: of a typical step's micro-batches on average; 0: all are as full as the fullest.
    squares: twice the pairs of a query and a key that an average micro-batch sees, shared prompts included; 0: those of
        equal documents.
    pass_tokens: of the micro-batches of passes without gradient; 0: as many.
    forwards: passes without gradient over the same tokens (live reference, KTO's baseline), counted in passes of the
        trained model.
    recompute: the level that is asked for, or "auto".
    levels: every layer's level as chosen, the first layer's first. There are at most two, and the last layers have the
    level that keeps more: their backward comes first, so their memory is free before the other layers recompute.
    offloaded_layers: how many layers, counted from the first, keep their tensors in host memory.
    weights: "sharded" over all ranks, "resident" on each, or "auto" for the faster of those that fit.
    offload: "none"; "auto" for the fewest layers with which the GPU suffices, or if it never does as many as the host
    holds; "checkpoints" for as many as the host holds.
    others: frozen models that the run holds as well; teacher: the one of them whose logits are compared with the
    trained model's.
    """

    model: Model
    machine: Machine
    tokens: int
    sp: int = 1
    micro_batches: int = 1
    mean_tokens: float = 0.0
    documents: int = 1
    squares: float = 0.0
    pass_tokens: int = 0
    forwards: float = 0.0
    rollout: PlannedRollout | None = None
    recompute: str = "auto"
    levels: tuple[str, ...] = ()
    offloaded_layers: int = 0
    weights: str = "auto"
    offload: str = "none"
    element_size: int = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    others: tuple[Model, ...] = ()
    teacher: Model | None = None

    @property
    def local(self) -> int:
        return -(-self.tokens // self.sp)

    @property
    def work(self) -> float:
        """The tokens that a micro-batch computes on average."""
        return self.mean_tokens or self.tokens

    @property
    def allowed(self) -> tuple[str, ...]:
        """The levels to choose from, the fastest first."""
        if self.recompute != "auto":
            return (self.recompute,)
        return LEVELS[1:] if self.offload == "checkpoints" else LEVELS

    @property
    def resident(self) -> bool:
        """Whether the weights stay whole on every rank; one process has them all in any case."""
        stay = self.weights == "resident" or self.machine.gpus == 1
        return stay and not self.offload_parameters

    @property
    def graphs(self) -> bool:
        """Whether the layers run as CUDA graphs (memory/graphs.py)."""
        alone = self.resident and self.sp == 1 and not self.model.experts
        if {*self.levels} != {"none"} or not alone:
            return False
        flops = 6 * self.local * self.model.layer_parameters
        is_short = flops < GRAPH_SECONDS * MATRICES * self.machine.peak_flops
        return is_short and self.element_size == 2 and self.machine.is_gpu

    @property
    def launched_tokens(self) -> float:
        """The tokens that the GPU computes while its host launches all layers, where CUDA graphs spare it that.

        With shared prompts, which the graphs do not know, a layer has twice the launches.
        """
        seconds = 2 * LAUNCH_RESIDENT * self.graphs
        return seconds * MATRICES * self.machine.peak_flops / (6 * self.model.layer_parameters)

    @property
    def name(self) -> str:
        """The levels in short: "block", or "block*20+none*12" where the layers differ."""
        if len({*self.levels}) == 1:
            return self.levels[0]
        return "+".join(f"{level}*{n}" for level, n in Counter(self.levels).items())

    @property
    def common_heads(self) -> int:
        """The common divisor of the heads of all models that share the mesh."""
        return gcd(self.model.heads, *(other.heads for other in self.others))

    @property
    def shards(self) -> tuple[int, int, int]:
        """How many ranks split the heads, how many the query rows, and the key heads on each rank."""
        model, ranks = self.model, gcd(self.sp, self.common_heads)
        return ranks, self.sp // ranks, head_layout(model.heads, model.kv_heads, ranks).key


class Prediction(NamedTuple):
    """Bytes of one rank.

    gpu: all that the GPU must hold. allocated: the allocator's peak, of which states, kept and working are parts.
    host: the host's; moved: all that the settings moved there, pinned memory for activations included.
    fits_host: whether the node has room for what is moved there; a node of unknown memory has. Where nothing is moved,
    what seems free decides nothing: some kernels report memory that grows on demand.
    """

    gpu: float
    host: float
    allocated: float
    states: float
    kept: float
    working: float
    moved: float
    fits_gpu: bool
    fits_host: bool

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host


def predict(case: Workload) -> Prediction:
    """Predict the bytes of a rank."""
    model, machine, world = case.model, case.machine, case.machine.gpus
    held = sum(m.weight_bytes(case.element_size) for m in (model, *case.others))
    weights = held / (1 if case.resident else world)
    trained = 16 * model.trained / world  # float32 weights have a separate master too
    states = weights * (not case.offload_parameters) + trained * (not case.offload_optimizer)
    first, last = case.levels[0], case.levels[-1]
    first_layers, in_pairs = case.levels.count(first), first == "pair"
    away = min(case.offloaded_layers, first_layers)
    on_gpu = first_layers - away + min(away, WORKING_GROUPS * (1 + in_pairs))
    # a layer without a second one keeps its own input, and the pair at work its second layer's too
    on_gpu += (first_layers % 2 + 2) * in_pairs
    kept_by_last = kept_bytes(case, last) * (model.layers - first_layers)
    kept = kept_bytes(case, first) * on_gpu + kept_by_last
    head = _head_moment(case)
    # the last layers are done when the first ones work, and what they kept is free
    layer = max(_layer_moment(case, last), _layer_moment(case, first) - kept_by_last)
    working = max(head, layer)
    if case.graphs:
        working = head + layer + case.element_size * model.layers * model.layer_parameters
    passes = _pass_bytes(case._replace(tokens=case.pass_tokens or case.tokens))
    allocated = states + max(kept + working, _rollout_bytes(case), passes)
    # each of gloo's two threads copies the tensor that it gathers
    gloo = 2 * case.element_size * model.vocabulary_parameters
    buffers = COMMUNICATOR_BYTES if machine.is_gpu else gloo
    gpu = allocated * SLACK + CONTEXT_BYTES + buffers * (world > 1)
    moved = weights + trained - states + pinned_bytes(case) * away
    # a checkpoint passes through, one kind of the state at a time
    host = moved + 4 * model.trained / world + PROCESS_BYTES
    return Prediction(
        gpu,
        host,
        allocated,
        states,
        kept,
        working,
        moved,
        fits_gpu=gpu <= FILL * machine.gpu_bytes,
        fits_host=not (moved and machine.host_bytes) or host <= machine.host_budget,
    )


def kept_bytes(case: Workload, level: str) -> float:
    """Return the bytes that one layer's graph keeps at a level, weights aside; the log-sum-exp is float32."""
    model, out = case.model, case.model.query_width
    kept = model.width // 2 if level == "pair" else model.width
    lse = 0
    if level in ("keep_attention", "none"):
        kept, lse = kept + out, 4 * model.heads
    if level == "none":  # q', k', v', out if it is exchanged, middle, gate and up
        kept += out * (1 + (case.sp > 1)) + 2 * _held(case)
        kept += model.width * (1 + model.norms_after)
        kept += 2 * model.inner_width + model.normalised_width
        # normalised rows, for a trained router in float32 too, its probabilities, what it chose
        if model.experts:
            kept += model.width
            lse += 4 * (model.experts + 4 * model.active_experts)
            lse += 4 * model.width * (case.element_size < 4) * model.is_full
        if not model.is_full:  # adapters keep the inputs of the projections as well
            kept += model.width
            kept += 0 if model.experts else model.width + model.inner_width
    return float(kept * case.element_size + lse) * case.local


def pinned_bytes(case: Workload) -> float:
    """Return the most host bytes that one layer's activations take: any tensor's last chunk may stay partly empty."""
    level = case.levels[0]
    return kept_bytes(case, level) + CHUNK_BYTES * (3 if level == "keep_attention" else 1)


def _held(case: Workload) -> int:
    """Return the width of the keys that a rank holds per local token after the exchange, all copies included."""
    return case.shards[2] * case.sp * case.model.head_dim


def _packed(case: Workload) -> int:
    """Return the width of what an exchange of q, k and v holds: its inputs, its buffer and its results."""
    row_ranks = case.shards[1]  # keys and values go to every row set
    return 3 * (case.model.query_width + 2 * case.model.kv_width * row_ranks)


def _base(case: Workload) -> int:
    """Return the bytes that every moment needs: two gathered layers."""
    return int(2 * case.model.layer_bytes(case.element_size) * (not case.resident))


def _head(case: Workload) -> tuple[int, int]:
    """Return the bytes of the gathered vocabulary, and of a tile of logits in float32 and in the weights' dtype."""
    size, V = case.element_size, case.model.vocabulary
    tiles = LOSS_TILES if case.teacher else 1
    rows = equal_tiles(case.local, 4 * V * tiles, CUDA_TILE_BYTES)
    words = size * case.model.vocabulary_parameters * (not case.resident)
    return words, rows * V * (4 * tiles + size)


def _head_moment(case: Workload) -> float:
    model, size, world = case.model, case.element_size, case.machine.gpus
    gathered, tile = _head(case)
    words = model.vocabulary_parameters
    # the rows' hidden states and gradients
    fixed = _base(case) + 3 * size * model.width * case.local + gathered
    if case.teacher:  # its rows and its whole matrix
        words_of_teacher = case.teacher.vocabulary_parameters * (not case.resident)
        fixed += size * (case.teacher.width * case.local + words_of_teacher)
    if not model.has_head:  # the embedding's gradient, whole, and its reduction
        return fixed + 2 * size * words * model.is_full
    if not model.is_full:
        return fixed + tile
    # the float32 sum over the tiles, then its cast, the buffer it travels in and the float32 sum over the ranks
    reduction = (2 * size + 4 / world) * words * (world > 1)
    return fixed + 4 * words + max(tile, reduction)


def _layer_moment(case: Workload, level: str) -> float:
    model, size, S = case.model, case.element_size, case.local
    D, q, held = model.width, model.query_width, _held(case)
    rows = S if level == "none" else _tile_rows(model, S)
    fixed, travels = _base(case), case.machine.gpus > 1 or case.offload_optimizer
    if model.is_full:
        # the layer's gradients, float32 sums over its tiles, and as measured the vocabulary's on its way elsewhere
        fixed += size * (model.layer_parameters + model.vocabulary_parameters * travels)
        fixed += 4 * model.feed_forward_parameters * (rows < S)
    # q, k, v, the gradients of the output and of theirs, the kernel's float32 sums of these: 5 q, and as measured one
    # more where gradients travel; before and after them: what the exchanges pack
    attention = max((5 + travels) * q + 8 * held, _packed(case))
    # two gradients of the residual, out
    attention += 2 * D + q * (level in ("block", "pair"))
    if level != "none":
        attention += model.normalised_width
    if model.experts and model.quantize != "none":  # gate and up of all experts, dequantised
        fixed += size * 2 * model.feed_forward_parameters // 3
    # of experts: two kinds of copies, and gate and up with their gradients, both twice as wide
    inner = 2 * (model.copied_width + model.inner_width) if model.experts else 0
    return fixed + size * max(4 * S * D + rows * (4 * model.inner_width + inner), S * attention)


def _tile_rows(model: Model, rows: int) -> int:
    """Return the rows of a feed-forward's tile."""
    return tile_rows(rows, TILE_ROWS * (EXPERT_TILES if model.experts else 1))


def _forward_moment(case: Workload) -> float:
    """Return the bytes of a pass without gradient: two gathered layers and one's work, or the head."""
    model, size, S = case.model, case.element_size, case.local
    mlp = _tile_rows(model, S) * (3 * model.inner_width + model.copied_width)
    work = max(size * mlp, size * S * _packed(case), model.has_head * sum(_head(case)))
    return _base(case) + 2 * size * model.width * S + work


def _pass_bytes(case: Workload) -> float:
    """Return the bytes of a pass without gradient of the model that needs most."""
    models = case.model, *case.others
    return max(
        _forward_moment(case._replace(model=m, others=models, teacher=None)) for m in models
    )


def _rollout_bytes(case: Workload) -> float:
    """Return the bytes of decoding: all answers of a batch gain one token at a time."""
    model, size, rollout = case.model, case.element_size, case.rollout
    if rollout is None:
        return 0.0
    layers, words = model.matrices, model.vocabulary_parameters
    count = min(rollout.answers, rollout.batch)
    length = rollout.prompt_tokens + rollout.new_tokens
    cache = 2 * size * model.layers * model.kv_width  # of one token
    prompts = min(count * rollout.prompt_tokens, rollout.prefill_tokens)
    prefill = size * prompts * (3 * model.inner_width + model.copied_width + 4 * model.width)
    # float64 logits, log-probabilities, what top_p keeps, their sums: in the CUDA graphs' memory and outside
    drawing = 2 * 4 * 8 * count * model.vocabulary
    weights = size * (layers + 2 * words) * rollout.merged
    held = layers * BITS.get(model.quantize, 8 * size) / 8
    weights += (held + 2 * size * words) * (not case.resident)
    return weights + cache * count * length + prefill + drawing


def step_flops(case: Workload) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for an average micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    model, passes = case.model, case.forwards
    length = case.work / case.documents
    pairs = case.squares or case.documents * squares(length, windows=model.windows)
    forward = 2.0 * pairs * model.query_width / case.sp
    S, N = case.work / case.sp, model.active_matrices / model.layers
    F = (N - model.attention_parameters) / 3
    again = model.attention_parameters + (2 if model.is_full else 3) * F
    directions = 3 if model.is_full else 2
    matrices = attention = 0.0
    for level in case.levels:
        pair = level == "pair"  # the forward pass of every second layer once more
        matrices += directions * N + again * (level != "none") + N / 2 * pair
        attention += 3.5 + (level in ("block", "pair")) + pair / 2
    head = model.vocabulary_parameters if model.has_head else 0
    matrices += head * (
        directions + 0.5
    )  # most losses take the logits once more, nll alone does without
    matrices += passes * model.forward_parameters + 3 * model.trained * (not model.is_full)
    return 2 * S * matrices, forward * (attention + passes * model.layers)


def step_seconds(case: Workload) -> float:
    """Estimate the seconds of one optimizer step, sampling aside: FLOPs and bytes over the rates measured on H200."""
    model, machine, W = case.model, case.machine, case.machine.gpus
    matrices, attention = step_flops(case)
    matrices *= FP8_PRODUCTS if model.quantize == "fp8" and machine.is_gpu else 1
    seconds = (matrices / MATRICES + attention / ATTENTION) / machine.peak_flops
    passes = (
        model.layers * case.forwards / 3
    )  # without gradient, in layers that run forward and backward
    local, launch = case.work / case.sp, LAUNCH_RESIDENT if case.resident else LAUNCH
    width = model.width + model.copied_width + model.inner_width
    elements = local * width * (model.layers + passes)
    seconds += ELEMENTWISE * elements / machine.memory_rate
    # those of the passes, which are fuller, at least one a step, and which no graph spares the host
    share = case.work / (case.pass_tokens or case.work)
    later = launch * passes * min(1, max(share, 1 / case.micro_batches))
    launches = launch * model.layers * (not case.graphs) + later
    # exchanges: forward, backward and again
    head_ranks, _, keys = case.shards
    heads = 2 * model.heads // head_ranks * (head_ranks - 1) + 2 * keys * (case.sp - 1)
    sent = 3 * model.layers * case.element_size * model.head_dim * heads * local
    seconds += sent / (EXCHANGE * machine.link(case.sp))
    # during the computation: weights are gathered twice and gradients reduced; copies to and from the host
    gathers = 1 / case.micro_batches if case.resident else 2 + case.forwards
    traffic = (
        gathers * model.weight_bytes(case.element_size) + case.element_size * model.trained
    )
    traffic *= (W - 1) / W / (GATHER * machine.link(W))
    seconds += CONTENTION * traffic
    moved = 4 * model.trained / W * case.offload_optimizer
    moved += 2 * model.weight_bytes(case.element_size) / W * case.offload_parameters
    moved += 2 * case.offloaded_layers * kept_bytes(case, case.levels[0])
    together = seconds + later * case.graphs, traffic, moved / HOST_LINK, launches
    seconds = max(together) if machine.is_gpu else seconds + launches
    rate = MEMORY_RATE * machine.memory_rate
    seconds += STEP_SECONDS + ADDITION_BYTES * model.trained / rate
    seconds += ADAPTER_SECONDS * model.layers * (not model.is_full and machine.is_gpu)
    update = UPDATE_BYTES * model.trained / W / (HOST_LINK if case.offload_optimizer else rate)
    return case.micro_batches * seconds + update


def pass_tokens(case: Workload) -> int:
    """Return the tokens of a micro-batch of passes without gradient, which keep nothing: at least the case's own.

    They hide the host's launches, if they take no more memory than a training step.
    """
    launch = (LAUNCH_RESIDENT if case.resident else LAUNCH) / 3 * case.model.layers
    rate = MATRICES * case.machine.peak_flops / (2 * case.model.forward_parameters)
    predicted, tokens = predict(case), case.tokens
    most, room = ENOUGH * launch * rate * case.sp, predicted.allocated - predicted.states
    while 2 * tokens <= most and _pass_bytes(case._replace(tokens=2 * tokens)) <= room:
        tokens *= 2
    return tokens
