"""Predict the bytes, FLOPs and seconds of a training step from what the parts of the model say of themselves.

    allocated = states + the largest moment
        head:    all that the layers keep; gathered vocabulary weights, their gradient and its reduction
        layer:   all that the layers up to it keep; two gathered layers, one's gradients, its mixer or its feed-forward
                 (CUDA graphs hold both moments, and every layer's gradients, in memory of their own)
        forward: a pass without gradient, of the model itself or of another one; nothing is kept yet
        rollout: a whole model (PPO's policy, or one that answers run.samples), and what its sampler takes; nothing is
             kept yet
    gpu  = allocated * SLACK + CUDA context + NCCL's buffers    (the allocator gives its cache back when it must)
    host = the process + optimizer, parameters and activations moved there + the copy that a checkpoint passes through

ZeRO-3 states of a trained parameter: 2 (weight) + 4 (master) + 8 (moments; 2 in 8 bits) + 4 (accumulated gradient) = 18
bytes over all ranks in bfloat16; a frozen one costs its weight. Resident weights take their 2 bytes on every rank, and
nothing is gathered. Where a step is one micro-batch on one process the gradient is not accumulated: its 2 bytes come
while the backward pass frees what the layers kept. Measured steps judge all this (tests/unit/test_measured_steps.py).

The planner counts the FLOPs that are executed: recomputation, passes without gradient, every product of the logits. MFU
counts what the model asks for. Both take those of a layer from its parts (memory/size.py).

Shapes: S local tokens, D width, V vocabulary, W processes.
"""

from typing import NamedTuple

from losses.logprobs import CUDA_TILE_BYTES, LOSS_TILES, equal_tiles
from ulysses.memory.levels import computed_again, kept_bytes
from ulysses.memory.size import LayerSize
from ulysses.memory.tiling import TILE_ROWS, tile_rows
from ulysses.parallel.layout import squares
from ulysses.plan.case import LAUNCH_RESIDENT, MATRICES, Model, Plan

FILL = 0.95  # share of a GPU's memory that the prediction may take, CUDA and NCCL included
# offloaded layers whose tensors are on the GPU nevertheless: one in use, one being copied
WORKING_GROUPS = 2
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers
SLACK = 1.03  # the allocator's peak with the fragments that it cannot give back
CONTEXT_BYTES = 1.3e9  # CUDA context and libraries, outside the allocator, on an H200
COMMUNICATOR_BYTES = 2.1e9  # NCCL's buffers, with more than one process

# Rates measured on H200, as shares of the peaks.
ATTENTION = 0.63  # attention kernels
EXCHANGE = 0.35  # all-to-alls, which share the links with ZeRO-3's traffic
GATHER = 0.37  # all-gathers and reduce-scatters
CONTENTION = 0.4  # of the time of each is added to the other's: they share the memory and the multiprocessors
MEMORY_RATE = 0.68  # GPU memory in the optimizer's update
HOST_LINK = 15e9  # bytes/s between GPU and host, all GPUs of a node copying at once
# bytes that a layer's elementwise kernels move, for each token and unit of D + the feed-forward's width
ELEMENTWISE = 48
# ... and that eight products with adapters of experts, and their additions, move of each input and output
ADAPTED_EXPERTS = 14
# ... and that a pass without gradient moves of every logit: written, and read twice
LOGIT_BYTES = 12
# in which the host lays out, packs and takes in an answer of a rollout, while the GPU waits
ANSWER_SECONDS = 8e-4
STEP_SECONDS = 0.007  # per micro-batch: metadata, the first gather, the last reduction, metrics
# read and written per trained parameter: by norm and zero/update.py, 8 of them the float32 gradient's, and where a
# micro-batch adds its gradient
UPDATE_BYTES, ADDITION_BYTES = 34, 10
ADAPTER_SECONDS = 6e-4  # of the many small kernels for a layer's adapters, forward and backward
# more than that where experts have adapters and the layer is gathered, as measured on NF4 bases
GATHERED_EXPERTS = 6e-3
ENOUGH = 4  # times the launches of a pass without gradient, its computation takes: more tokens gain nothing


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


def predict(plan: Plan) -> Prediction:
    """Predict the bytes of a rank."""
    case, model, machine = plan.case, plan.case.model, plan.case.machine
    world, size = machine.gpus, case.element_size
    held = sum(m.weight_bytes(size) for m in (model, *case.others))
    weights = held / (1 if plan.resident else world)
    # float32 weights have a separate master too
    sums = 4 * (not plan.keeps_gradients)
    trained = (4 + sums + case.moment_bytes) * model.trained / world
    states = weights * (not case.offload_parameters) + trained * (not case.offload_optimizer)
    mean, largest = case.layer_sizes(model)
    kept_by_first, kept_by_last = _kept(plan, mean)
    kept, head = kept_by_first + kept_by_last, _head_moment(plan)
    # the last layers are done when the first ones work, and what they kept is free
    layer = _layer_moment(plan, largest, plan.levels[0]) - kept_by_last
    layer = max(layer, _layer_moment(plan, largest, plan.levels[-1]))
    working = max(head, layer)
    of_graphs = size * model.layers * mean.parameters * plan.graphs
    if plan.graphs:
        working = head + layer + of_graphs
    if plan.keeps_gradients:  # the head's comes first
        words = size * model.vocabulary_parameters * model.is_full
        kept = max(kept + words, size * model.trained - of_graphs)
    moments = [kept + working, pass_bytes(plan, plan.pass_tokens or case.tokens)]
    if case.rollout or case.samples:
        from ulysses.plan.decoding import decoding_bytes

        moments.append(decoding_bytes(plan))
    allocated = states + max(moments)
    # each of gloo's two threads copies the tensor that it gathers
    gloo = 2 * size * model.vocabulary_parameters
    buffers = COMMUNICATOR_BYTES if machine.is_gpu else gloo
    gpu = allocated * SLACK + CONTEXT_BYTES + buffers * (world > 1)
    moved = weights + trained - states
    if away := min(plan.offloaded_layers, plan.levels.count(plan.levels[0])):
        moved += pinned_layer(plan) * away
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


def _kept(plan: Plan, layer: LayerSize) -> tuple[float, float]:
    """Return the bytes on the GPU that the first layers keep for backward, and the last ones."""
    case, first = plan.case, plan.levels[0]
    count, in_pairs = plan.levels.count(first), first == "pair"
    away = min(plan.offloaded_layers, count)
    on_gpu = count - away + min(away, WORKING_GROUPS * (1 + in_pairs))
    # a layer without a second one keeps its own input, and the pair at work its second layer's too
    on_gpu += (count % 2 + 2) * in_pairs
    each = (kept_bytes(x, layer, case.element_size) for x in (first, plan.levels[-1]))
    of_first, of_last = (bytes_of * case.local for bytes_of in each)
    return of_first * on_gpu, of_last * (case.model.layers - count)


def pinned_layer(plan: Plan) -> float:
    """Return the most host bytes that one of the first layers' activations take."""
    from ulysses.memory.offload import pinned_bytes

    case, level = plan.case, plan.levels[0]
    mean, _ = case.layer_sizes(case.model)
    return pinned_bytes(level, mean, kept_bytes(level, mean, case.element_size) * case.local)


def pass_bytes(plan: Plan, tokens: int) -> float:
    """Return the bytes of a pass without gradient over so many tokens, of the model that needs most."""
    case = plan.case
    return max(_forward_moment(plan, m, tokens) for m in (case.model, *case.others))


def _forward_moment(plan: Plan, model: Model, tokens: int) -> float:
    """Return the bytes of a pass without gradient: two gathered layers and one's work, or the head."""
    size, S = plan.case.element_size, -(-tokens // plan.case.sp)
    _, layer = plan.case.layer_sizes(model)
    inner = layer.feed_forward
    mlp = _tile_rows(layer, S) * (3 * inner.inner + inner.copied)
    head = model.has_head * sum(_head(plan, model, S, 1))
    work = max(size * mlp, size * S * layer.mixer.packed, head)
    return _base(plan, model, layer) + 2 * size * layer.width * S + work


def _base(plan: Plan, model: Model, layer: LayerSize) -> float:
    """Return the bytes that every moment needs: two gathered layers."""
    gathered = model.matrix_bytes(layer.parameters, plan.case.element_size)
    return 2 * gathered * (not plan.resident)


def _head(plan: Plan, model: Model, rows: int, tiles: int) -> tuple[int, int]:
    """Return the bytes of the gathered vocabulary, and of float32 tiles of logits and one in the weights' dtype."""
    size, V = plan.case.element_size, model.shape.vocab_size
    rows = equal_tiles(rows, 4 * V * tiles, CUDA_TILE_BYTES)
    words = size * model.vocabulary_parameters * (not plan.resident)
    return words, rows * V * (4 * tiles + size)


def _head_moment(plan: Plan) -> float:
    case, model, size = plan.case, plan.case.model, plan.case.element_size
    world, words, S = case.machine.gpus, model.vocabulary_parameters, case.local
    _, layer = case.layer_sizes(model)
    gathered, tile = _head(plan, model, S, LOSS_TILES if case.teacher else 1)
    # the rows' hidden states and gradients
    fixed = _base(plan, model, layer) + 3 * size * layer.width * S + gathered
    if case.teacher:  # its rows and its whole matrix
        words_of_teacher = case.teacher.vocabulary_parameters * (not plan.resident)
        fixed += size * (case.teacher.shape.hidden_size * S + words_of_teacher)
    if not model.has_head:  # the embedding's gradient, whole, and its reduction
        return fixed + 2 * size * words * model.is_full
    if not model.is_full:
        return fixed + tile
    # the float32 sum over the tiles, then its cast, the buffer it travels in and the float32 sum over the ranks
    reduction = (2 * size + 4 / world) * words * (world > 1)
    return fixed + 4 * words + max(tile, reduction)


def _layer_moment(plan: Plan, layer: LayerSize, level: str) -> float:
    case, model, size, S = plan.case, plan.case.model, plan.case.element_size, plan.case.local
    D, mixer, feed_forward = layer.width, layer.mixer, layer.feed_forward
    rows = S if level == "none" else _tile_rows(layer, S)
    travels = case.machine.gpus > 1 or case.offload_optimizer
    fixed = _base(plan, model, layer)
    if model.is_full:
        # the layer's gradients, float32 sums over its tiles, and as measured the vocabulary's on its way elsewhere
        fixed += size * (layer.parameters + model.vocabulary_parameters * travels)
        fixed += 4 * feed_forward.parameters * (rows < S)
    if model.quantize != "none":
        fixed += size * feed_forward.unpacked
    # as measured one more output where gradients travel; before and after the mix: what the exchanges pack
    mixing = max(mixer.work + travels * mixer.out, mixer.packed)
    # two gradients of the residual, out
    mixing += 2 * D + mixer.out * (level in ("block", "pair"))
    if level != "none":
        mixing += mixer.restored
    return fixed + size * max(4 * S * D + rows * feed_forward.work, S * mixing)


def _tile_rows(layer: LayerSize, rows: int) -> int:
    """Return the rows of a feed-forward's tile."""
    return tile_rows(rows, TILE_ROWS * int(layer.feed_forward.tile_factor))


# ---------------------------------------------------------------- FLOPs and seconds


def step_flops(plan: Plan) -> tuple[float, float]:
    """Count the FLOPs that one rank executes for an average micro-batch: matrix products, attention kernels.

    Recomputation counts; adapters' frozen matrices have no gradient of their own (4 N instead of 6 N); causal attention
    counts half of the square.
    """
    case, model, passes = plan.case, plan.case.model, plan.case.forwards
    (layer, _), S = case.layer_sizes(model), case.work / case.sp
    windows, length = model.shape.windows, case.work / case.documents
    pairs = case.squares or case.documents * squares(length, windows=windows)
    mix = layer.mixer.pair_flops * pairs / case.sp + layer.mixer.row_flops * S
    directions = 3 if model.is_full else 2
    products, mixes = passes * model.forward_parameters, passes * model.layers
    for level in plan.levels:
        more, again = computed_again(level, layer, model.is_full)
        products += directions * layer.met + more
        mixes += 1 + layer.mixer.backward + again
    # most losses take the logits once more, nll alone does without
    products += (directions + 0.5) * model.vocabulary_parameters * model.has_head
    products += 3 * (model.trained - model.unmet) * (not model.is_full)
    return 2 * S * products, mix * mixes


def model_flops(model: Model, tokens: float, squared_lengths: float, projected: float) -> float:
    """Return the FLOPs of one forward and backward pass, the numerator of MFU: 6 N T + 6 L (H E) sum(length^2).

    6 = 2 forward + 2 for the gradient of the activations + 2 for that of the weights. Frozen weights have no
    gradient: with A parameters of adapters it is 4 N T + 6 A T. Causal attention counts half of the full square.
    Recomputation, passes without gradient (references, rollouts) and the optimizer count nothing.

    Args:
        projected: tokens that meet the vocabulary projection: those whose target is trained.
    """
    layer, head = model.layer, model.vocabulary_parameters * model.has_head
    adapters = 0 if model.is_full else model.trained
    # of its layer's experts a token meets a few
    met = model.parameters - adapters - model.layers * (layer.parameters - layer.met)
    weights = (met - head) * tokens + head * projected
    linear = (6.0 if model.is_full else 4.0) * weights + 6.0 * (adapters - model.unmet) * tokens
    mix = layer.mixer.pair_flops * squared_lengths + layer.mixer.row_flops * tokens
    return linear + 3.0 * model.layers * mix


def step_seconds(plan: Plan) -> float:
    """Estimate the seconds of one optimizer step, sampling aside: FLOPs and bytes over the rates measured on H200."""
    case, model, machine = plan.case, plan.case.model, plan.case.machine
    (layer, _), size, W = case.layer_sizes(model), case.element_size, machine.gpus
    products, attention = step_flops(plan)
    seconds = (products / MATRICES + attention / ATTENTION) / machine.peak_flops
    # without gradient, in layers that run forward and backward
    passes, S = model.layers * case.forwards / 3, case.work / case.sp
    copied, inner = layer.feed_forward.copied, layer.feed_forward.inner
    elements = S * (layer.width + copied + inner) * (model.layers + passes)
    seconds += ELEMENTWISE * elements / machine.memory_rate
    rate = MEMORY_RATE * machine.memory_rate
    if model.unmet:
        of_layer = ADAPTED_EXPERTS * S * (2 * copied + 3 * inner) / rate
        gathered = machine.is_gpu and not plan.resident
        seconds += (of_layer + GATHERED_EXPERTS * gathered) * model.layers
    logits = S * model.shape.vocab_size * model.has_head
    seconds += logits * (case.logit_bytes + LOGIT_BYTES * case.forwards) / rate
    # those of the passes, which are fuller, at least one a step, and which no graph spares the host
    share = case.work / (plan.pass_tokens or case.work)
    # a shared prompt has launches of its own
    launch, captured = plan.launch, plan.graphs and not case.shares
    launch += LAUNCH_RESIDENT * case.shares
    later = launch * passes * min(1, max(share, 1 / case.micro_batches))
    launches = launch * model.layers * (not captured) + later
    # exchanges: forward, backward and again
    sent = 3 * model.layers * size * layer.mixer.sent * S
    seconds += sent / (EXCHANGE * machine.link(case.sp))
    # during the computation: weights are gathered twice and gradients reduced; copies to and from the host
    gathers = 1 / case.micro_batches if plan.resident else 2 + case.forwards
    traffic = gathers * model.weight_bytes(size) + size * model.trained
    traffic *= (W - 1) / W / (GATHER * machine.link(W))
    seconds, traffic = seconds + CONTENTION * traffic, traffic + CONTENTION * seconds
    moved = 4 * model.trained / W * case.offload_optimizer
    moved += 2 * model.weight_bytes(size) / W * case.offload_parameters
    kept = kept_bytes(plan.levels[0], layer, size) * case.local
    moved += 2 * plan.offloaded_layers * kept
    together = seconds + later * captured, traffic, moved / HOST_LINK, launches
    seconds = max(together) if machine.is_gpu else seconds + launches
    added, of_update = ADDITION_BYTES, UPDATE_BYTES
    if plan.keeps_gradients:
        added, of_update = 0, UPDATE_BYTES - 8 + 2 * size
    seconds += STEP_SECONDS + added * model.trained / rate
    seconds += ADAPTER_SECONDS * model.layers * (not model.is_full and machine.is_gpu)
    update = of_update * model.trained / W / (HOST_LINK if case.offload_optimizer else rate)
    if case.rollout:
        update += ANSWER_SECONDS * case.rollout.answers / case.rollout.steps
    return case.micro_batches * seconds + update


def pass_tokens(plan: Plan) -> int:
    """Return the tokens of a micro-batch of passes without gradient, which keep nothing: at least the case's own.

    They hide the host's launches, if they take no more memory than a training step.
    """
    case, predicted = plan.case, predict(plan)
    launch = plan.launch / 3 * case.model.layers
    rate = MATRICES * case.machine.peak_flops / (2 * case.model.forward_parameters)
    most, room = ENOUGH * launch * rate * case.sp, predicted.allocated - predicted.states
    tokens = case.tokens
    while 2 * tokens <= most and pass_bytes(plan, 2 * tokens) <= room:
        tokens *= 2
    return tokens
