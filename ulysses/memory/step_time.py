"""Predict the seconds of an optimizer step from what its GPUs compute, read, write and send.

    one micro-batch = max(GPU, ZeRO-3's traffic, host, copies to and from the host) + what no computation can hide
        GPU     matrix products + attention + elementwise kernels and gradient casts + the exchanges of attention
        ZeRO-3  two gathers of the weights and one reduction of the gradients, beside the computation
        host    hooks and launches, per layer
    step = micro-batches + the update (+ PPO's share of a rollout)

FLOPs are those executed: recomputation counts, adapters' frozen matrices have no gradient of their own (4 N instead of
6 N), causal attention counts half of the square. Letters as in case.py.
"""

from typing import NamedTuple

from ulysses.memory.case import Machine, Model, Options, Rollout, Work, shards
from ulysses.memory.peak import kept_per_layer, offloaded_layers, runs_as

UPDATE_BYTES = 38  # read and written per trained parameter: norm, clipping, AdamW, casts
SUM_BYTES = (
    8  # read and written per trained parameter and micro-batch: sent, received, summed, placed
)
NARROW = 64  # head dim from which attention kernels are faster
TOKEN_LAYER_SECONDS = 2.5e-4  # of a sampler's host for one layer of one token


class Passes(NamedTuple):
    """Count what one layer runs in a step: FLOPs of matrices per token, attention kernels in units of the forward one,
    exchanges in units of q, k, v and the output, bytes of elementwise kernels per token."""

    matrices: float
    attention: float
    exchanges: float
    elementwise: float


def step_seconds(model: Model, machine: Machine, work: Work, options: Options) -> float:
    """Predict the seconds of one optimizer step."""
    c, W = options.calibration, machine.gpus
    per_layer = {
        level: passes(model, work, options, level) for level in options.counts(model.layers)
    }
    counts = options.counts(model.layers)
    sums = [
        model.decoders * sum(counts[v] * getattr(per_layer[v], f) for v in counts)
        for f in Passes._fields
    ]
    S, speed = work.tokens / work.sp, machine.peak_flops
    head = model.vocabulary_parameters if model.has_head else 0
    matrices = sums[0] * S + 2 * S * head * (4 if model.is_full else 3)
    if not model.is_full:
        matrices += 6 * S * model.trained
    all_layers = model.decoders * model.layers
    forward = attention_flops(model, work)
    attention = forward * sums[1]
    chunks = options.tiling.head_chunks
    sent = exchanged_bytes(model, work.sp, options.element_size, chunks) * S
    exchanges = sums[2] * sent
    touched = sums[3] * S + SUM_BYTES * model.trained
    weights = options.element_size * model.parameters
    # forwards without gradient: one decoder, its head, one gather
    matrices += work.forwards * 2 * S * (model.layers * model.layer_parameters + head)
    attention += work.forwards * forward * model.layers
    exchanges += work.forwards * sent * model.layers
    once = (
        options.gathered_layers * options.element_size * model.layer_parameters
    )  # gathered once for both passes
    again = counts.get("pair", 0) / model.layers * weights
    gathered = (2 + work.forwards) * weights + again - once + options.element_size * model.trained
    kernels = c.attention * (c.narrow_heads if model.head_dim <= NARROW else 1.0)
    gpu = (
        matrices / (c.matrices * speed)
        + attention / (kernels * speed)
        + touched / (c.memory * machine.hbm)
    )
    if work.sp > 1:
        gpu += exchanges / (c.exchange * machine.link_over(work.sp))
    link, share = c.gather * machine.link_over(W), (W - 1) / W
    traffic = gathered * share / link
    # the first gather and the last reduction: a layer, and the matrices of the vocabulary
    ends = model.layer_parameters + model.vocabulary_parameters
    exposed = share / link * ends * options.element_size * (2 if model.is_full else 1)
    host = c.layer_seconds * all_layers * (1 + work.forwards / 3)
    copied = _host_copies(model, W, work, options) / machine.host_link
    micro = max(gpu, traffic, host, copied) + exposed + c.step_seconds
    update = machine.host_link if options.offload_optimizer else c.memory * machine.hbm
    seconds = work.micro_batches * micro + UPDATE_BYTES * model.trained / W / update
    return seconds + (
        _rollout_seconds(model, machine, work.rollout, options) if work.rollout is not None else 0.0
    )


def passes(model: Model, work: Work, options: Options, level: str) -> Passes:
    """Count what one layer runs at a level; what is repeated is drawn in recompute.py."""
    D, F, q, k = model.width, model.intermediate, model.query_width, model.kv_width
    project, output, gate_up, down = D * (q + 2 * k), D * q, 2 * D * F, D * F
    level = runs_as(level, work.local, options)
    pair = level == "pair"  # the forward pass of every second layer once more
    if pair:
        level = "block"
    again = {
        "none": 0,
        "mlp": 0,
        "keep_exchange": output,
        "keep_attention": project + output,
        "block": project + output,
    }[level]
    again += (project + output + gate_up + down) / 2 * pair
    groups = level == "block" and options.tiling.head_chunks > 1
    again += project * (groups and model.is_full)
    if level != "none":
        again += gate_up + (0 if model.is_full else down)
    matrices = 2.0 * ((3 if model.is_full else 2) * (project + output + gate_up + down) + again)
    repeats = level in ("keep_attention", "block")
    elementwise = options.element_size * (9 * F + 20 * D + 12 * (q + 2 * k))
    if level != "none":
        elementwise += options.element_size * (3 * F + 8 * D + (6 * (q + 2 * k) if repeats else 0))
    elementwise += options.element_size * (3 * F + 10 * D + 6 * (q + 2 * k)) / 2 * pair
    third = (q + 2 * k) / (2 * q + 2 * k) if groups else 0.0  # q, k, v once more
    return Passes(
        matrices,
        3.5 + (level == "block") + pair / 2,
        2.0 + repeats + third + pair / 2,
        float(elementwise),
    )


def attention_flops(model: Model, work: Work) -> float:
    """Return the FLOPs of one layer's attention forward on one rank: two products over half of each document's square."""
    return 2.0 * work.tokens * work.tokens / work.documents * model.query_width / work.sp


def exchanged_bytes(model: Model, sp: int, element_size: int, chunks: int = 1) -> float:
    """Return the bytes that a rank sends per local token to exchange q, k and v and to bring the output back.

    q and the output travel among the U ranks of a row set, k and v to every rank that attends with them.
    """
    split = shards(model, sp, chunks)
    return float(
        element_size
        * model.head_dim
        * (2 * split.query * (split.head_ranks - 1) + 2 * split.key * (sp - 1))
    )


def _host_copies(model: Model, world: int, work: Work, options: Options) -> float:
    """Return the bytes that one micro-batch copies to the host and back."""
    away = offloaded_layers(model, options)
    kept = kept_per_layer(model, work.sp, work.local, options, options.level) if away else 0.0
    shard = (
        2 * options.element_size * model.parameters / world if options.offload_parameters else 0.0
    )  # for both gathers
    gradients = 4 * model.trained / world if options.offload_optimizer else 0.0
    return 2 * kept * away * model.decoders + shard + gradients


def _rollout_seconds(model: Model, machine: Machine, rollout: Rollout, options: Options) -> float:
    """Return one step's share of decoding: a token of all answers at a time, reading weights and half the cache."""
    c, batches = options.calibration, -(-rollout.answers // rollout.batch)
    policy = model.layers * model.layer_parameters + model.vocabulary_parameters
    count = rollout.answers / batches
    cache = (
        2
        * options.element_size
        * model.layers
        * count
        * model.kv_width
        * (rollout.prompt_tokens + rollout.new_tokens / 2)
    )
    token = max(
        (options.element_size * policy + cache) / (c.memory * machine.hbm),
        model.layers * TOKEN_LAYER_SECONDS,
    )
    prompts = (
        2 * policy * rollout.answers * rollout.prompt_tokens / (c.matrices * machine.peak_flops)
    )
    return (batches * rollout.new_tokens * token + prompts) / rollout.steps
