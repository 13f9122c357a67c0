"""Predict the peak of a rank's memory, on the GPU and on the host.

    allocated = states + the largest moment
        head moment:    all that the layers keep; gathered vocabulary weights, their gradient and its reduction
        layer moment:   all that the layers up to it keep; two gathered layers, one's gradients, its attention or its MLP
        rollout moment: the whole policy, the KV cache, the prompts' first pass          (PPO, nothing kept yet)
    device = allocated * (1 + slack) + CUDA context + NCCL's buffers      (the allocator's cache aside: it is given back)
    host   = the process + optimizer, parameters and activations moved there + the copy that a checkpoint passes through

ZeRO-3 states of a trained parameter: 2 (weight) + 4 (master) + 8 (moments) + 4 (accumulated gradient) = 18 bytes over all
ranks in bfloat16; a frozen one, of the model or of another held beside it, costs its weight. Gathered weights that stay until
the backward pass are counted as states too.

Letters as in case.py.
"""

from typing import NamedTuple

from ulysses.memory.case import Model, Options, Rollout, Work, kept_kv_heads, shards
from ulysses.memory.levels import AUTOGRAD, kept_bytes, kept_tensors
from ulysses.memory.offload import CHUNK_BYTES

LOGITS_TILE_BYTES = 1 << 30  # float32 logits of one "auto" tile on a GPU
WORKING_GROUPS = 2  # layers whose kept tensors are on the GPU, in use and being copied, while the others are on the host
PROCESS_BYTES = 4e9  # host memory of one process: interpreter, libraries, NCCL's shared buffers


class Peak(NamedTuple):
    """Hold bytes of one rank: the allocator's peak, all that the GPU must hold, the host's; then parts of
    the first, the pinned memory for activations, and all that the settings moved to the host."""

    allocated: float
    device: float
    host: float
    states: float
    kept: float
    working: float
    offloaded: float
    moved: float


def peak_bytes(model: Model, world: int, work: Work, options: Options) -> Peak:
    """Predict the peak of a step on `world` processes."""
    c, S = options.calibration, work.local
    states, host = _states(model, world, options)
    levels = options.counts(model.layers)
    per_layer = {level: kept_per_layer(model, work.sp, S, options, level) for level in levels}
    upper = options.upper_layers * per_layer.get(options.upper, 0.0)
    away = offloaded_layers(model, options)
    below = model.layers - options.upper_layers
    pair = options.level == "pair"
    here = below - away + min(away, WORKING_GROUPS * (1 + pair))
    if pair:  # one that is left over keeps its own input, the pair at work its second layer's too
        here += below % 2 + 2
    lower = per_layer.get(options.level, 0.0) * here
    kept = model.decoders * (lower + upper)
    offloaded = (
        model.decoders * pinned_per_layer(model, work.sp, S, options) * away if away else 0.0
    )
    moments = {level: _layer_moment(model, world, work, options, level) for level in levels}
    if (
        options.upper != options.level and options.level in moments
    ):  # their stack's upper layers are done, and free, by then
        moments[options.level] -= upper / c.working
    working = c.working * max(_head_moment(model, world, S, options), *moments.values())
    allocated = states + kept + working
    if work.rollout is not None:
        allocated = max(allocated, states + _rollout_moment(model, world, work.rollout, options))
    outside = c.context_bytes + (c.communicator_bytes if world > 1 else 0)
    saving = 4 * model.trained / world if options.saves else 0  # one kind of the state at a time
    device = allocated * (1 + c.slack) + outside
    moved = host + offloaded
    return Peak(
        allocated, device, moved + saving + PROCESS_BYTES, states, kept, working, offloaded, moved
    )


def offloaded_layers(model: Model, options: Options) -> int:
    """Return how many layers' activations really leave: ordinary autograd's stay."""
    return (
        0
        if options.level in AUTOGRAD
        else min(options.offloaded_layers, model.layers - options.upper_layers)
    )


def pinned_per_layer(model: Model, sp: int, local: int, options: Options) -> float:
    """Return the host bytes at most that one layer's activations take: of a tensor's last chunk any part may stay empty."""
    tensors = kept_tensors(options.level, options.tiling.head_chunks)
    return kept_per_layer(model, sp, local, options, options.level) + CHUNK_BYTES * tensors


def _states(model: Model, world: int, options: Options) -> tuple[float, float]:
    weights = options.element_size * (model.parameters + options.frozen_parameters) / world
    trained = 16 * model.trained / world  # float32 weights have a separate master too
    gpu = (0.0 if options.offload_parameters else weights) + (
        0.0 if options.offload_optimizer else trained
    )
    gathered = (
        options.element_size * model.layer_parameters * options.gathered_layers if world > 1 else 0
    )
    return gpu + gathered, weights + trained - gpu


def runs_as(level: str, local: int, options: Options) -> str:
    """Return the level that a layer's work is that of: tiles set by hand make "none" run its MLP again."""
    return "mlp" if level == "none" and options.tiling.rows(local, level) < local else level


def kept_per_layer(model: Model, sp: int, local: int, options: Options, level: str) -> float:
    """Return the bytes that one layer's graph keeps of `local` tokens at a level."""
    level = runs_as(level, local, options)
    kept = kept_bytes(
        level,
        width=model.width,
        intermediate=model.intermediate,
        heads=model.heads,
        kv_heads=kept_kv_heads(model, sp, options.tiling.head_chunks),
        head_dim=model.head_dim,
        element_size=options.element_size,
        exchanged=sp > 1,
    )
    if (
        level in AUTOGRAD and not model.is_full
    ):  # adapters keep the inputs of the projections they stand beside
        kept += options.element_size * (
            model.width + (model.width + model.intermediate if level == "none" else 0)
        )
    return float(kept) * local


def _head_moment(model: Model, world: int, local: int, options: Options) -> float:
    size, words = options.element_size, model.vocabulary_parameters
    gathered = (size * words + 2 * size * model.layer_parameters) if world > 1 else 0
    rows = (3 * size * model.width + 4 * model.head_dim) * local  # and the rotary table
    if not model.has_head:  # the embedding's gradient, whole, and its reduction
        return rows + gathered + (2 * size * words if model.is_full else 0)
    rows_per_tile = options.logits_rows or max(1, LOGITS_TILE_BYTES // (4 * model.vocabulary))
    tile = min(local, rows_per_tile) * model.vocabulary * (4 + size)
    if not model.is_full:
        return rows + gathered + tile
    # the float32 sum over the tiles, then its cast, the buffer it travels in and the float32 sum over the ranks
    reduction = (2 * size + 4 / world) * words if world > 1 else 0
    return rows + gathered + 4 * words + max(tile, reduction)


def _layer_moment(model: Model, world: int, work: Work, options: Options, level: str) -> float:
    size, P, D, F, S = (
        options.element_size,
        model.layer_parameters,
        model.width,
        model.intermediate,
        work.local,
    )
    chunks, q, k = options.tiling.head_chunks, model.query_width, model.kv_width
    held = kept_kv_heads(model, work.sp, chunks) * model.head_dim
    sent = (
        k * shards(model, work.sp, chunks).row_ranks
    )  # keys and values go to every row set, and come back as gradients
    rows = options.tiling.rows(S, level)
    fixed = 2 * size * P if world > 1 else 0
    if model.is_full:  # the layer's gradients, float32 sums over its tiles, and as much as measured steps take beyond: the vocabulary's
        fixed += size * (P + model.vocabulary_parameters) + (4 * 3 * D * F if rows < S else 0)
    wrapped = (
        1 if model.is_full else 2
    )  # projections called as modules keep every intermediate of a tile
    mlp = size * (4 * S * D + 4 * wrapped * rows * F)
    # q, k, v, the gradients of the output and of theirs, the kernel's float32 sums of these: 5 q, and measured steps take one
    # more; before and after them: what the exchanges pack
    attention = max(6 * q + 8 * held, 3 * (q + 2 * sent))
    if level in ("keep_exchange", *AUTOGRAD):
        attention -= q + 2 * held
    attention /= chunks
    attention += 2 * D + (
        q if level in ("block", "pair") else 0
    )  # two gradients of the residual, the output that was computed again
    if (
        chunks > 1
    ):  # of all groups: the input's gradient; with adapters the output's, q, k, v and their gradients
        attention += D if model.is_full else 3 * q + 4 * k
    return fixed + max(mlp, size * S * attention) + 4 * model.head_dim * S


def _rollout_moment(model: Model, world: int, rollout: Rollout, options: Options) -> float:
    size, D, F = options.element_size, model.width, model.intermediate
    policy = size * (model.layers * model.layer_parameters + 2 * model.vocabulary_parameters)
    whole = policy * (2 if rollout.merged else 1)
    count = min(rollout.answers, rollout.batch)
    cache = (
        2
        * size
        * model.layers
        * count
        * (rollout.prompt_tokens + rollout.new_tokens)
        * model.kv_width
    )
    prompts = size * count * rollout.prompt_tokens * (3 * F + 4 * D)
    drawing = (
        4 * 8 * count * model.vocabulary
    )  # float64 logits, log-probabilities, what top_p keeps, their sums
    return whole + cache + max(prompts, drawing)
